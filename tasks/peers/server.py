"""Gives other nodes of the run the chunks that this one has. In a thread of its own, beside the agent's loop.

| request | answer |
|---|---|
| `GET /chunks/ROOT/CHUNK` | 200: its bytes; 202: it is waited for here, too, or too many are sent; 404 |
| `GET /on-hand/ROOT?by=HOST:PORT` | 200: the names of those that are here or on their way, as JSON; 404 |

Whoever asks the latter takes part in that download, and listens at HOST:PORT. A request carries
`Authorization: Bearer TOKEN`; all addresses but loopback are under mutual TLS.
"""

from __future__ import annotations

import asyncio
import hmac
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future

import msgspec
from aiohttp import hdrs, web

from checkpoint.security import identity
from tasks.peers.shelf import Shelf

CHUNKS, ON_HAND = "/chunks", "/on-hand"
HOLD_S = 1.0  # a chunk that is wanted here, too, is waited for so long
SENDS = 8  # of chunks at a time: what that takes of memory is so many chunks
SEND_S = 40.0  # a bit more than what who receives allows
PIECE_BYTES = 256 * 1024  # between two of which the loop does other things
IDLE_S = 600.0

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class PeerServer:
    """Serves one node's shelf.

    Args:
        host: where others reach this machine.
        heard: called, from the server's thread, with a root and the address of who takes part in it.
    """

    def __init__(self, shelf: Shelf, host: str, token: str, heard: Callable[[str, str], None]) -> None:
        self._shelf = shelf
        self._host = host
        self._expected = f"Bearer {token}".encode()
        self._tls = identity.server_context(token) if identity.protects(host) else None
        self._heard = heard
        self._loop: asyncio.AbstractEventLoop | None = None
        self._over: asyncio.Event | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> str:
        """Serve until `stop`. Returns host and port. Raises OSError."""
        listens: Future[int] = Future()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._serve(listens)), name="peers", daemon=True
        )
        self._thread.start()
        return identity.address(self._host, listens.result())

    def stop(self) -> None:
        """Cut whoever is served, and end."""
        if self._loop is None or self._over is None or self._thread is None or not self._thread.is_alive():
            return
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join()

    async def _serve(self, listens: Future[int]) -> None:
        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        self._sends = asyncio.Semaphore(SENDS)
        app = web.Application(middlewares=[self._known])
        app.on_response_prepare.append(_hide_server)
        app.add_routes(
            [
                web.get("/health", self._health),
                web.get(f"{CHUNKS}/{{root:.+}}/{{chunk}}", self._chunk),
                web.get(f"{ON_HAND}/{{root:.+}}", self._on_hand),
            ]
        )
        runner = web.AppRunner(
            app, handler_cancellation=True, shutdown_timeout=0.0, access_log=None, keepalive_timeout=IDLE_S
        )
        try:
            await runner.setup()
            site = web.TCPSite(runner, self._host, 0, ssl_context=self._tls)
            await site.start()
            listens.set_result(runner.addresses[0][1])
        except (OSError, ValueError) as error:  # the latter for a host that cannot be a name
            listens.set_exception(OSError(str(error)))
            return
        try:
            await self._over.wait()
        finally:
            await runner.cleanup()

    @web.middleware
    async def _known(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        shown = request.headers.get(hdrs.AUTHORIZATION, "").encode(errors="surrogateescape")
        if not hmac.compare_digest(shown, self._expected):
            return web.Response(status=401)
        return await handler(request)

    async def _health(self, _: web.Request) -> web.StreamResponse:
        return web.Response()

    async def _on_hand(self, request: web.Request) -> web.StreamResponse:
        root = request.match_info["root"]
        names = self._shelf.on_hand(root)
        self._heard(root, request.query.get("by", ""))
        if names is None:
            return web.Response(status=404)
        return web.Response(body=msgspec.json.encode(names), content_type="application/json")

    async def _chunk(self, request: web.Request) -> web.StreamResponse:
        root, chunk = request.match_info["root"], request.match_info["chunk"]
        arrival = self._shelf.arrival(root, chunk)
        if arrival is None:
            return web.Response(status=404)
        try:
            async with asyncio.timeout(HOLD_S):
                await asyncio.shield(asyncio.wrap_future(arrival))
                await self._sends.acquire()
        except TimeoutError:
            return web.Response(status=202)
        try:
            return await self._send(request, root, chunk)
        finally:
            self._sends.release()

    async def _send(self, request: web.Request, root: str, chunk: str) -> web.StreamResponse:
        data = await asyncio.to_thread(self._shelf.read, root, chunk)
        if data is None:
            return web.Response(status=404)
        response, view = web.StreamResponse(), memoryview(data)
        response.content_length = len(data)
        try:
            async with asyncio.timeout(SEND_S):
                await response.prepare(request)
                for at in range(0, len(data), PIECE_BYTES):
                    await response.write(view[at : at + PIECE_BYTES])
                await response.write_eof()
        except TimeoutError:  # who asked does not take it
            if request.transport is not None:
                request.transport.abort()
        return response


async def _hide_server(_: web.Request, response: web.StreamResponse) -> None:
    response.headers.pop(hdrs.SERVER, None)
