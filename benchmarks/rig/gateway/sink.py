"""A store that costs the machine next to nothing: S3's requests, bodies counted and thrown away.

It keeps small objects, so that catalog, journal and heartbeat work. What a trainer loses beside it is lost to the
uploader, not to a server which in practice is another machine. `python -m benchmarks.rig.gateway.sink PORT`.
"""

from __future__ import annotations

import os
import sys
from xml.sax.saxutils import escape

from aiohttp import web

KEPT_BYTES = 1 << 20
DATE = "2026-01-01T00:00:00.000Z"
LAST_MODIFIED = "Thu, 01 Jan 2026 00:00:00 GMT"


class Sink:
    """One bucket of any name; keys include it."""

    def __init__(self) -> None:
        self._objects: dict[str, tuple[int, bytes]] = {}

    async def put(self, request: web.Request) -> web.Response:
        key = request.match_info["key"]
        if request.headers.get("If-None-Match") == "*" and key in self._objects:
            return web.Response(status=412)
        size_bytes, kept = 0, b""
        async for piece in request.content.iter_any():
            size_bytes += len(piece)
            kept = kept + piece if size_bytes <= KEPT_BYTES else b""
        self._objects[key] = (size_bytes, kept)
        return web.Response(headers={"ETag": '"0"'})

    async def get(self, request: web.Request) -> web.Response:
        key = request.match_info["key"]
        if "list-type" in request.query:
            return self._list(
                key.rstrip("/"), request.query.get("prefix", ""), request.query.get("start-after", "")
            )
        if key not in self._objects:
            body = "<Error><Code>NoSuchKey</Code><Message>none</Message></Error>"
            return web.Response(status=404, text=body, content_type="application/xml")
        return web.Response(body=self._objects[key][1], headers={"ETag": '"0"', "Last-Modified": LAST_MODIFIED})

    async def delete(self, request: web.Request) -> web.Response:
        self._objects.pop(request.match_info["key"], None)
        return web.Response(status=204)

    def _list(self, bucket: str, prefix: str, after: str) -> web.Response:
        keys = sorted(key.removeprefix(f"{bucket}/") for key in self._objects if key.startswith(f"{bucket}/"))
        rows = "".join(
            f"<Contents><Key>{escape(key)}</Key><Size>{self._objects[f'{bucket}/{key}'][0]}</Size>"
            f"<LastModified>{DATE}</LastModified></Contents>"
            for key in keys
            if key.startswith(prefix) and key > after
        )
        text = f"<ListBucketResult><Name>{bucket}</Name><IsTruncated>false</IsTruncated>{rows}</ListBucketResult>"
        return web.Response(text=text, content_type="application/xml")


def main() -> None:
    os.nice(19)
    sink = Sink()
    app = web.Application(client_max_size=1 << 40)
    app.router.add_put("/{key:.*}", sink.put)
    app.router.add_get("/{key:.*}", sink.get)
    app.router.add_delete("/{key:.*}", sink.delete)
    web.run_app(app, host="127.0.0.1", port=int(sys.argv[1]), print=None, access_log=None)


if __name__ == "__main__":
    main()
