"""The server's process: it listens, says where, and serves until it is interrupted, or until its daemon ends."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress

import structlog

from checkpoint.store.errors import StoreError
from checkpoint.store.run_store import Store
from orchestrator.gateway.surface.listener import listening
from orchestrator.web.app import Site
from orchestrator.web.watch import Watch

HERE = "127.0.0.1"
PORT = 8642  # or another one that is free
RETRY_S = 5.0
NICE = 10

log = structlog.get_logger()


def serve(store: Store, port: int | None, tell: Callable[[str], None]) -> None:
    """Serve until SIGINT or SIGTERM; `tell` is called with the URL once it listens.

    `port`: None: PORT, or any free one. 0: any free one. Raises OSError where it cannot listen there, StoreError
    where the run cannot be read.
    """
    asyncio.run(_serve(store, listen(port), tell))


async def _serve(store: Store, sock: socket.socket, tell: Callable[[str], None]) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with listening(Site(Watch(store)).app(), lambda _: True, sock, None):
        tell(f"http://{HERE}:{sock.getsockname()[1]}/")
        await stop.wait()


def listen(port: int | None) -> socket.socket:
    """A socket for the page; for `port` see `serve`. Raises OSError."""
    for candidate in [PORT, 0] if port is None else [port]:
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((HERE, candidate))
            sock.listen()
        except OSError:
            sock.close()
            if candidate == 0 or port is not None:
                raise
        else:
            return sock
    raise AssertionError("the loop returns or raises")


async def _serve_beside(store: Store, sock: socket.socket) -> None:
    """Until standard input ends; a store that cannot be read is tried again."""
    stop = asyncio.Event()

    def heard() -> None:
        if not os.read(sys.stdin.fileno(), 1):
            stop.set()

    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), heard)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    while not stop.is_set():
        try:
            watch = await asyncio.to_thread(Watch, store)
        except StoreError as error:
            log.warning("page_waits_for_the_store", error=str(error))
            with suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), RETRY_S)
            continue
        async with listening(Site(watch).app(), lambda _: True, sock, None):
            await stop.wait()


def main() -> None:
    """Serve beside a daemon, `python -m orchestrator.web.server STORE-URL FD`, on a socket that listens already.

    To this machine alone, until standard input ends. The daemon goes before it where time is short.
    """
    os.nice(NICE)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    asyncio.run(_serve_beside(Store(sys.argv[1]), socket.socket(fileno=int(sys.argv[2]))))


if __name__ == "__main__":
    main()
