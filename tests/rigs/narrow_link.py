"""A TCP relay whose answers share so many bytes a second, as those of a server with one network card do."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager

PIECE_BYTES = 64 * 1024


class NarrowLink:
    """Listens on 127.0.0.1 in a thread of its own. `passed_bytes` are those of all answers so far."""

    def __init__(self, port: int, bytes_per_s: float) -> None:
        self.passed_bytes = 0
        self.endpoint = ""
        self._port = port
        self._bytes_per_s = bytes_per_s
        self._free_at_s = 0.0
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self._listens = threading.Event()

    def start(self) -> None:
        self._thread.start()
        self._listens.wait()

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join()

    async def _serve(self) -> None:
        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_server(self._relay, "127.0.0.1", 0)
        self.endpoint = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._listens.set()
        await self._over.wait()
        server.close()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        theirs, ours = await asyncio.open_connection("127.0.0.1", self._port)
        with contextlib.suppress(ConnectionError):
            await asyncio.gather(self._copy(reader, ours, narrow=False), self._copy(theirs, writer, narrow=True))

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, narrow: bool) -> None:
        while piece := await reader.read(PIECE_BYTES):
            if narrow:
                self.passed_bytes += len(piece)
                self._free_at_s = max(self._free_at_s, self._loop.time()) + len(piece) / self._bytes_per_s
                await asyncio.sleep(self._free_at_s - self._loop.time())
            writer.write(piece)
            await writer.drain()
        writer.close()


@contextmanager
def narrow_link(port: int, bytes_per_s: float) -> Iterator[NarrowLink]:
    """A relay to that port of this machine, for as long as the block runs."""
    link = NarrowLink(port, bytes_per_s)
    link.start()
    try:
        yield link
    finally:
        link.stop()
