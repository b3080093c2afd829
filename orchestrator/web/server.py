"""The server process: serve the pages until interrupted, or until the daemon ends."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress

import structlog

from grpo_orch.checkpoint.store.errors import StoreError
from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.orchestrator.gateway.surface.listener import listening
from grpo_orch.orchestrator.web.app import Site
from grpo_orch.orchestrator.web.watch import Watch

LOOPBACK = "127.0.0.1"
DEFAULT_PORT = 8642  # default; any free port if it is taken
RETRY_S = 5.0
NICE = 10

log = structlog.get_logger()


def serve(store: Store, port: int | None, on_ready: Callable[[str], None]) -> None:
    """Serve until SIGINT or SIGTERM; `on_ready` is called with the URL once the server listens.

    `port`: None means PORT or any free one, 0 any free one. Raises OSError if the port is not available,
    StoreError if the run cannot be read.
    """
    asyncio.run(_serve(store, listen(port), on_ready))


async def _serve(store: Store, sock: socket.socket, on_ready: Callable[[str], None]) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with listening(Site(Watch(store)).app(), lambda _: True, sock, None):
        on_ready(f"http://{LOOPBACK}:{sock.getsockname()[1]}/")
        await stop.wait()


def listen(port: int | None) -> socket.socket:
    """Return a listening socket; `port` as in `serve`. Raises OSError."""
    for candidate in [DEFAULT_PORT, 0] if port is None else [port]:
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((LOOPBACK, candidate))
            sock.listen()
        except OSError:
            sock.close()
            if candidate == 0 or port is not None:
                raise
        else:
            return sock
    raise AssertionError("the loop returns or raises")


async def _serve_for_daemon(store: Store, sock: socket.socket) -> None:
    """Serve until standard input ends; retry while the store cannot be read."""
    stop = asyncio.Event()

    def on_input() -> None:
        if not os.read(sys.stdin.fileno(), 1):
            stop.set()

    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), on_input)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    while not stop.is_set():
        try:
            watch = await asyncio.to_thread(Watch, store)
        except StoreError as error:
            log.warning("waiting_for_store", error=str(error))
            with suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), RETRY_S)
            continue
        async with listening(Site(watch).app(), lambda _: True, sock, None):
            await stop.wait()


def main() -> None:
    """Serve for a daemon: `python -m grpo_orch.orchestrator.web.server STORE-URL FD`; FD is a listening socket.

    Ends when standard input ends. The process is niced, so that the daemon has precedence.
    """
    os.nice(NICE)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    asyncio.run(_serve_for_daemon(Store(sys.argv[1]), socket.socket(fileno=int(sys.argv[2]))))


if __name__ == "__main__":
    main()
