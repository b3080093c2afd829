"""HTTP/1.1 connections to one member, kept open between requests. They pass response data on by callback.

This is the hot path: nothing is awaited per piece of data. If a peer sends invalid HTTP or too long a header, its
connection is closed and the receiver gets the reason.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from typing import Protocol, cast
from urllib.parse import urlsplit

import httptools

from grpo_orch.checkpoint.security import identity
from grpo_orch.policies.serving.wire import GATEWAY_IDLE_S

HEAD_SIZE_MAX = 64 * 1024  # status line and headers
# Concurrent connection attempts. A TLS handshake takes 1 ms of this process; a thousand at once would block it for
# a second.
CONNECTING_MAX = 32
# Added under TLS, where the node's server has to answer, which may be busy. Probes show whether it is alive.
HANDSHAKE_S = 10.0
# A timeout that fires this late shows that this process stalled: responses may be waiting in its sockets.
STALLED_S = 0.5
END_TIMEOUT_S = 5.0  # from the last event to the end of the response
# The kernel probes idle connections: a peer that no longer knows the connection sends a reset, a peer that is gone
# sends nothing.
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 2), (socket.TCP_KEEPCNT, 3))
USER_TIMEOUT_MS = 5_000  # sent data must be acknowledged within this
# Shared by all connections, since data is parsed as soon as it is read. Under TLS the event loop would otherwise
# allocate 256 KiB for every read, at three times the cost of decrypting.
_read_buffer = memoryview(bytearray(64 * 1024))


class Receiver(Protocol):
    """Gets one response: `head` once, `body` any number of times, then `end`; or `lost` at any time before."""

    def head(self, status: int) -> None: ...
    def body(self, data: bytes) -> None: ...
    def end(self) -> None: ...
    def lost(self, why: str) -> None: ...


class Connection(asyncio.BufferedProtocol):
    """One connection, for one request at a time."""

    __slots__ = ("_busy", "_head_size", "_in_head", "_parser", "_pool", "_receiver", "_transport", "idle_since_s")

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._receiver: Receiver | None = None
        self._busy = False
        self._in_head = True
        self._head_size = 0
        self.idle_since_s = 0.0

    def send(self, request: list[bytes], receiver: Receiver) -> None:
        """Send a request whose response goes to the receiver."""
        self._receiver, self._busy = receiver, True
        self._in_head, self._head_size = True, 0
        if self._transport is None:
            self._fail_receiver("connection closed by the peer")
        else:
            self._transport.writelines(request)

    def cancel(self, receiver: Receiver) -> None:
        """Close the connection, which makes the node abort, unless the receiver's response has ended."""
        if self._receiver is receiver:
            self._receiver = None
            self.abort()

    def abort(self) -> None:
        """Close immediately. A waiting receiver gets `lost`."""
        if self._transport is not None:
            self._transport.abort()

    def detach(self, now_s: float) -> None:
        """Ignore the rest of this response, which is about to end, and keep the connection for the next one."""
        self._receiver = None
        self.idle_since_s = now_s

    def is_overdue(self, now_s: float) -> bool:
        """Return whether the rest of a detached response is late by more than END_TIMEOUT_S."""
        return self._busy and self._receiver is None and now_s - self.idle_since_s > END_TIMEOUT_S

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are no subclass of it
        sock = transport.get_extra_info("socket")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, USER_TIMEOUT_MS)

    def get_buffer(self, _sizehint: int) -> memoryview:
        return _read_buffer

    def buffer_updated(self, nbytes: int) -> None:
        try:
            self._parser.feed_data(_read_buffer[:nbytes])
        except httptools.HttpParserCallbackError:
            raise  # a bug in the gateway: the event loop logs it and closes the connection
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._fail_and_abort(f"invalid HTTP response: {error}")
            return
        if self._in_head and self._busy:
            self._head_size += nbytes
            if self._head_size > HEAD_SIZE_MAX:
                self._fail_and_abort(f"response header over {HEAD_SIZE_MAX >> 10} KiB")

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._pool.remove(self)
        why = "closed by the peer" if exc is None else f"lost: {str(exc) or type(exc).__name__}"
        self._fail_receiver(f"connection {why}")

    def on_message_begin(self) -> None:
        if not self._busy:  # an unrequested response must not be taken for that of the next request
            self._pool.remove(self)
            self.abort()

    def on_headers_complete(self) -> None:
        self._in_head = False
        if self._receiver is not None:
            self._receiver.head(self._parser.get_status_code())

    def on_body(self, data: bytes) -> None:
        if self._receiver is not None:
            self._receiver.body(data)

    def on_message_complete(self) -> None:
        receiver, self._receiver = self._receiver, None
        self._busy, self._in_head, self._head_size = False, True, 0
        if self._parser.should_keep_alive():
            self._pool.keep(self)
        elif self._transport is not None:
            self._transport.close()
        if receiver is not None:
            receiver.end()

    def _fail_and_abort(self, why: str) -> None:
        self._fail_receiver(why)
        self.abort()

    def _fail_receiver(self, why: str) -> None:
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            receiver.lost(why)


class Pool:
    """The connections to one boot of a node.

    Args:
        address: host:port.
        tls: used for addresses that are not on this machine.
    """

    def __init__(self, address: str, tls: ssl.SSLContext | None) -> None:
        parts = urlsplit(f"//{address}")
        self._host, self._port = parts.hostname or "", parts.port or 0
        self._tls = tls if identity.protects(self._host) else None
        self._idle: list[Connection] = []
        self._open: set[Connection] = set()
        self._connect_slots = asyncio.Semaphore(CONNECTING_MAX)
        self._closed = False

    def take(self) -> Connection | None:
        """Return the most recently used idle connection, or None."""
        return self._idle.pop() if self._idle else None

    async def connect(self, limit_s: float) -> Connection:
        """Return a new connection. Raises OSError, TimeoutError."""
        loop = asyncio.get_running_loop()
        while not self._closed:
            started_s = loop.time()
            try:
                async with asyncio.timeout(limit_s):
                    connection = await self._connect()
            except TimeoutError:
                if loop.time() - started_s < limit_s + STALLED_S:
                    raise
                continue
            if self._closed:
                connection.abort()
                break
            self._open.add(connection)
            return connection
        raise ConnectionAbortedError("the member has left")

    async def _connect(self) -> Connection:
        name = self._host if self._tls else None
        _, connection = await asyncio.get_running_loop().create_connection(
            lambda: Connection(self), self._host, self._port, ssl=self._tls, server_hostname=name
        )
        return connection

    async def connect_throttled(self, limit_s: float) -> Connection:
        """Return a new connection; at most CONNECTING_MAX are made at a time. Raises OSError, TimeoutError.

        The limit does not include the wait for a slot. Under TLS it is longer by HANDSHAKE_S.
        """
        async with self._connect_slots:
            return await self.connect(limit_s + HANDSHAKE_S if self._tls else limit_s)

    def keep(self, connection: Connection) -> None:
        """Keep a connection whose response is complete for the next request."""
        connection.idle_since_s = asyncio.get_running_loop().time()
        self._idle.append(connection)

    def remove(self, connection: Connection) -> None:
        """Remove a closed connection."""
        self._open.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)

    def close_idle(self, now_s: float) -> None:
        """Close connections that were idle too long or wait for the rest of a detached response.

        `now_s` is on the event loop's clock.
        """
        while self._idle and now_s - self._idle[0].idle_since_s > GATEWAY_IDLE_S:
            self._idle.pop(0).abort()
        for connection in [connection for connection in self._open if connection.is_overdue(now_s)]:
            connection.abort()

    def close(self) -> None:
        """Close every connection. Waiting receivers get `lost`."""
        self._closed = True
        self._idle.clear()
        for connection in list(self._open):
            connection.abort()
