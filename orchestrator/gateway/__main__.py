"""The gateway's process: `python -m orchestrator.gateway`.

Environment: GRPO_ORCH_RUN (the store's URL), GRPO_ORCH_TOKEN (the run's secret), GRPO_ORCH_GATEWAY_HOST (the
address to listen on and to be reached at, 127.0.0.1 by default); beside a trainer also GRPO_ORCH_TIMELINE,
GRPO_ORCH_NODE and GRPO_ORCH_ATTEMPT, which say whether it is the newest. It takes the port of its predecessor
if that is free, so that nobody who knew the old one must look again, writes its address to the store once it
listens, and from then on what it knows of its members. SIGTERM ends it; in GRPO_ORCH_WORKDIR, beside a trainer, it
leaves the requests under way to the next one.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import resource
import secrets
import signal
import socket
import ssl
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import structlog
import uvloop

from checkpoint.records import documents
from checkpoint.records.documents import GatewayAddress
from checkpoint.security import identity
from checkpoint.store.errors import Corrupt
from checkpoint.store.run_store import Store
from orchestrator.gateway.routing.watch import Watch
from orchestrator.gateway.surface.app import Gateway
from orchestrator.gateway.surface.listener import BACKLOG, listening
from orchestrator.gateway.surface.session_log import SessionLog
from orchestrator.gateway.surface.status_writer import StatusWriter
from policies.model import exit_codes
from policies.model.node_contract import ATTEMPT_ENV, NODE_ENV, RUN_ENV, TIMELINE_ENV, TOKEN_ENV, WORKDIR_ENV
from policies.model.vocabulary import Precedence, precedence_of

log = structlog.get_logger()

TURNS = "gateway-sessions"  # the file of the turns of sessions
LEFT = "gateway-requests"  # the file of the requests that one gateway leaves to the next
LAST_FLUSH_S = 3.0  # for the store, at the end
GC_OBJECTS = 100_000  # made and not freed before garbage is looked for


def listen(host: str, port: int | None) -> socket.socket:
    """Return a listening socket on `port` if that is free, else on any free one. Raises OSError."""
    family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
    for candidate in [port, 0] if port else [0]:
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((host, candidate))
            sock.listen(BACKLOG)
        except OSError:
            sock.close()
            if candidate == 0:
                raise
        else:
            return sock
    raise AssertionError("the loop returns or raises")


def former_port(store: Store, host: str) -> int | None:
    """The port of the gateway before this one, if it was on this host."""
    try:
        before = documents.read_gateway(store)
    except Corrupt:
        return None
    parts = urlsplit(before.url) if before else None
    return parts.port if parts and parts.hostname == host else None


def own_precedence() -> Precedence:
    """Of the trainer that this gateway stands beside; the lowest where it stands alone. Raises ValueError."""
    node = os.environ.get(NODE_ENV)
    if node is None:
        return 0, 0, 0
    timeline, attempt = os.environ.get(TIMELINE_ENV, "0"), os.environ.get(ATTEMPT_ENV, "0")
    return precedence_of(int(timeline), node, int(attempt))


async def serve(
    sock: socket.socket,
    tls: ssl.SSLContext | None,
    gateway: Gateway,
    writer: StatusWriter,
    session_log: SessionLog,
    left: Path | None,
    timeline: int,
) -> None:
    """Serve until SIGTERM or SIGINT.

    Args:
        left: the file of the requests that a gateway leaves to the next one, on the same timeline.
    """
    stop = asyncio.Event()
    if left is not None:
        gateway.orphans.load(left, timeline)
    gateway.sessions.load(timeline)
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with listening(gateway.app(), gateway.is_authorized, sock, tls):
        work = (Watch(gateway.members).run(), writer.run(), session_log.run(), gateway.sessions.run())
        endless: set[asyncio.Future[Any]] = {asyncio.ensure_future(one) for one in work}
        await asyncio.wait({*endless, asyncio.ensure_future(stop.wait())}, return_when=asyncio.FIRST_COMPLETED)
        for task in endless:
            if task.done():
                task.result()  # only an error ends it
            task.cancel()
    if left is not None:
        gateway.orphans.save(left)
    gateway.sessions.close()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LAST_FLUSH_S):
            await session_log.flush()
    await gateway.members.close()


def main() -> int:
    structlog.configure(
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
    )
    store = Store(os.environ[RUN_ENV])
    host = os.environ.get("GRPO_ORCH_GATEWAY_HOST", "127.0.0.1")
    sock = listen(host, former_port(store, host))
    boot_id, token = secrets.token_hex(8), os.environ[TOKEN_ENV]
    url = identity.url(host, sock.getsockname()[1])
    tls = identity.server_context(token) if identity.protects(host) else None
    by = own_precedence()
    workdir = os.environ.get(WORKDIR_ENV)
    folder = Path(workdir) if workdir and NODE_ENV in os.environ else None
    turns = None if folder is None else folder / TURNS
    session_log = SessionLog(turns, Store(store.url, retry_s=0.0), by[0])
    gateway = Gateway(boot_id, token, session_log)
    documents.gateway(by).write(store, GatewayAddress(url, boot_id))
    writer = StatusWriter(Store(store.url, retry_s=0.0), by, gateway.status)
    # Every request under way has a connection, and the usual limit is 1,024 open files.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    # Nothing on the hot path makes cycles, and walking the lists of a large batch costs more than all else there.
    gc.freeze()
    gc.set_threshold(GC_OBJECTS)
    log.info("gateway_started", url=url, boot_id=boot_id)
    left = None if folder is None else folder / LEFT
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(sock, tls, gateway, writer, session_log, left, by[0]))
    log.info("gateway_stopped")
    return exit_codes.OK


if __name__ == "__main__":
    sys.exit(main())
