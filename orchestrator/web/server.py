"""The server's process: it listens, says where, and serves until it is interrupted."""

from __future__ import annotations

import asyncio
import signal
import socket
import ssl
from collections.abc import Callable

from checkpoint.security import identity
from checkpoint.store.run_store import Store
from orchestrator.gateway.surface.listener import listening
from orchestrator.web.app import Site
from orchestrator.web.certificate import browser_context
from orchestrator.web.watch import Watch

PORT = 8642  # or another one that is free


def serve(store: Store, host: str, port: int | None, secret: str | None, tell: Callable[[str], None]) -> None:
    """Serve until SIGINT or SIGTERM; `tell` is called with the URL once it listens.

    Args:
        port: None: PORT, or any free one. 0: any free one.
        secret: the run's, for an address that can be reached from elsewhere; those are under TLS.

    Raises OSError where it cannot listen there, StoreError where the run cannot be read.
    """
    sock = _listen(host, port)
    tls = browser_context(secret) if secret is not None and identity.protects(host) else None
    asyncio.run(_serve(store, host, secret, sock, tls, tell))


async def _serve(
    store: Store,
    host: str,
    secret: str | None,
    sock: socket.socket,
    tls: ssl.SSLContext | None,
    tell: Callable[[str], None],
) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    watch = Watch(store)
    async with listening(Site(watch, host, secret).app(), lambda _: True, sock, tls):
        tell(identity.url(host, sock.getsockname()[1]) + "/")
        await stop.wait()


def _listen(host: str, port: int | None) -> socket.socket:
    """Raises OSError."""
    family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
    for candidate in [PORT, 0] if port is None else [port]:
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((host, candidate))
            sock.listen()
        except OSError:
            sock.close()
            if candidate == 0 or port is not None:
                raise
        else:
            return sock
    raise AssertionError("the loop returns or raises")
