"""The gateway's process: `python -m grpo_orch.orchestrator.gateway`.

Environment: GRPO_ORCH_RUN (the store's URL), GRPO_ORCH_TOKEN (the run's secret), GRPO_ORCH_GATEWAY_HOST (the
address to listen on and to be reached at, 127.0.0.1 by default). Next to a trainer also GRPO_ORCH_TIMELINE,
GRPO_ORCH_NODE and GRPO_ORCH_ATTEMPT, from which follows which gateway is the newest, and GRPO_ORCH_WORKDIR.

It reuses its predecessor's port if that is free, so that clients need not look up the address again. Once it
listens, it writes its address and then its members' status to the store. SIGTERM stops it; next to a trainer it
saves the running requests in the work directory for the next gateway.
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

from grpo_orch.checkpoint.records import documents
from grpo_orch.checkpoint.records.documents import GatewayAddress
from grpo_orch.checkpoint.security import identity
from grpo_orch.checkpoint.store.errors import Corrupt
from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.orchestrator.gateway.routing.member_watch import Watch
from grpo_orch.orchestrator.gateway.surface.gateway_app import Gateway
from grpo_orch.orchestrator.gateway.surface.listener import BACKLOG, listening
from grpo_orch.orchestrator.gateway.surface.session_log import SessionLog
from grpo_orch.orchestrator.gateway.surface.status_writer import StatusWriter
from grpo_orch.policies.model import exit_codes
from grpo_orch.policies.model.node_contract import (
    ATTEMPT_ENV,
    NODE_ENV,
    RUN_ENV,
    TIMELINE_ENV,
    TOKEN_ENV,
    WORKDIR_ENV,
)
from grpo_orch.policies.model.vocabulary import Precedence, precedence_of

log = structlog.get_logger()

SESSIONS_FILE = "gateway-sessions"
REQUESTS_FILE = "gateway-requests"  # running requests, saved for the next gateway
LAST_FLUSH_S = 3.0  # limit of the last write to the store
GC_OBJECTS = 100_000  # allocations between garbage collections


def listen(host: str, port: int | None) -> socket.socket:
    """Return a listening socket on `port` if that is free, else on any free port. Raises OSError."""
    family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
    if port:
        with contextlib.suppress(OSError):
            return socket.create_server((host, port), family=family, backlog=BACKLOG)
    return socket.create_server((host, 0), family=family, backlog=BACKLOG)


def former_port(store: Store, host: str) -> int | None:
    """Return the previous gateway's port, if it was on this host."""
    try:
        previous = documents.read_gateway(store)
    except Corrupt:
        return None
    parts = urlsplit(previous.url) if previous else None
    return parts.port if parts and parts.hostname == host else None


def own_precedence() -> Precedence:
    """Return the precedence of this machine's trainer; the lowest without a trainer. Raises ValueError."""
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
    requests_file: Path | None,
    timeline: int,
) -> None:
    """Serve until SIGTERM or SIGINT.

    Args:
        requests_file: where the running requests are saved for the next gateway on the same timeline.
    """
    stop = asyncio.Event()
    if requests_file is not None:
        gateway.orphans.load(requests_file, timeline)
    gateway.sessions.load(timeline)
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with listening(gateway.app(), gateway.is_authorized, sock, tls):
        work = (Watch(gateway.members).run(), writer.run(), session_log.run(), gateway.sessions.run())
        endless: set[asyncio.Future[Any]] = {asyncio.ensure_future(coroutine) for coroutine in work}
        await asyncio.wait({*endless, asyncio.ensure_future(stop.wait())}, return_when=asyncio.FIRST_COMPLETED)
        for task in endless:
            if task.done():
                task.result()  # only an error ends it
            task.cancel()
    if requests_file is not None:
        gateway.orphans.save(requests_file)
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
    sessions_file = None if folder is None else folder / SESSIONS_FILE
    session_log = SessionLog(sessions_file, Store(store.url, retry_s=0.0), by[0])
    gateway = Gateway(boot_id, token, session_log)
    documents.gateway(by).write(store, GatewayAddress(url, boot_id))
    writer = StatusWriter(Store(store.url, retry_s=0.0), by, gateway.status)
    # Every running request has a connection, and the usual limit is 1,024 open files.
    _, limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    # The hot path makes no reference cycles, and scanning the lists of a large batch costs more than serving it.
    gc.freeze()
    gc.set_threshold(GC_OBJECTS)
    log.info("gateway_started", url=url, boot_id=boot_id)
    requests_file = None if folder is None else folder / REQUESTS_FILE
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(sock, tls, gateway, writer, session_log, requests_file, by[0]))
    log.info("gateway_stopped")
    return exit_codes.OK


if __name__ == "__main__":
    sys.exit(main())
