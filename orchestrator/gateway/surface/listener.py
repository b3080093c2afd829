"""The listening socket: aiohttp's server with limits, and without headers or texts that name the software."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import structlog
from aiohttp import hdrs, web

log = structlog.get_logger()

BACKLOG = 4096
SHUTDOWN_S = 1.0  # then held announcements and batches are cut; their senders retry at the next gateway
# Limit for a request's whole head, from the start of the connection or the end of the last request.
HEAD_S = 30.0
HANDSHAKE_S = 10.0
LINE_SIZE_MAX = 8192  # the request line, and each header
HEADERS_MAX = 64


class Connection(web.RequestHandler):
    """One client's connection. Errors get a bare status, since aiohttp's own pages name it and its version."""

    __slots__ = ()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,  # noqa: ARG002  # aiohttp's signature
    ) -> web.StreamResponse:
        """Answer with the bare status and close."""
        if status >= 500:
            log.error("handler_failed", path=request.path, exc_info=exc)
        if request.writer.output_size > 0:
            raise ConnectionError("the response has already started")
        return _bare(status)


@asynccontextmanager
async def listening(
    app: web.Application,
    is_authorized: Callable[[web.BaseRequest], bool],
    sock: socket.socket,
    tls: ssl.SSLContext | None,
    head_s: float = HEAD_S,
) -> AsyncIterator[None]:
    """Serve the application on the socket while the block runs, for requests that `is_authorized` accepts.

    A handler is cancelled if its client disconnects. If no handler reads the body, the connection is closed.
    """
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=SHUTDOWN_S)
    await runner.setup()
    loop, manager = asyncio.get_running_loop(), runner.server
    assert manager is not None
    handle = manager.request_handler

    async def handle_known(request: web.BaseRequest) -> web.StreamResponse:
        """Authorize first, because routing has answers of its own and sends `100 Continue`."""
        return await handle(request) if is_authorized(request) else _bare(401)

    manager.request_handler = handle_known

    def connection() -> Connection:
        return Connection(
            manager,
            loop=loop,
            keepalive_timeout=head_s,
            access_log=None,  # type: ignore[arg-type]  # disables it
            max_line_size=LINE_SIZE_MAX,
            max_field_size=LINE_SIZE_MAX,
            max_headers=HEADERS_MAX,
            lingering_time=0.0,
            auto_decompress=False,
        )

    handshake_s = None if tls is None else HANDSHAKE_S
    server = await loop.create_server(
        connection, sock=sock, ssl=tls, backlog=BACKLOG, ssl_handshake_timeout=handshake_s
    )
    try:
        yield
    finally:
        server.close()
        await runner.cleanup()


def _bare(status: int) -> web.Response:
    response = web.Response(status=status, headers={hdrs.SERVER: ""})
    response.force_close()
    return response
