"""A reverse proxy in front of an S3 server that breaks on command.

It runs in a thread of the test. The Host header is passed on unchanged, so that signatures hold.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web
from yarl import URL

from tests.budget import HANG_S


@dataclass(frozen=True, slots=True)
class Away:
    """Nothing listens, and what was connected is cut."""


@dataclass(frozen=True, slots=True)
class Hang:
    """The request is taken and never answered."""


@dataclass(frozen=True, slots=True)
class Slow:
    """The answer's body trickles."""

    bytes_per_s: int


@dataclass(frozen=True, slots=True)
class Answer:
    """The store refuses, with S3's error document; nothing is done."""

    status: int
    code: str
    message: str = "told so by the test"


@dataclass(frozen=True, slots=True)
class CutUpload:
    """The connection is reset after so many bytes of the request's body; nothing is done."""

    after_bytes: int


@dataclass(frozen=True, slots=True)
class CutDownload:
    """The connection is reset after so many bytes of the answer's body."""

    after_bytes: int


@dataclass(frozen=True, slots=True)
class LoseAnswer:
    """The request is done, and the connection reset instead of an answer."""


@dataclass(frozen=True, slots=True)
class WrongBytes:
    """The first byte of the answer's body is changed."""


@dataclass(frozen=True, slots=True)
class IgnoreConditions:
    """If-None-Match is dropped, as by a store that does not know it."""


Fault = Away | Hang | Slow | Answer | CutUpload | CutDownload | LoseAnswer | WrongBytes | IgnoreConditions
_HOP = {"connection", "keep-alive", "transfer-encoding", "expect"}


@dataclass(slots=True)
class _Plan:
    fault: Fault | None = None
    left: int | None = None  # requests still to strike; None: all, until `heal`


@dataclass(slots=True)
class FaultProxy:
    """Use as `with fault_proxy(endpoint) as proxy`. `seen` are the methods of the requests that came, in order."""

    upstream: str
    port: int
    loop: asyncio.AbstractEventLoop
    seen: list[str] = field(default_factory=list)
    _plan: _Plan = field(default_factory=_Plan)
    _runner: web.ServerRunner | None = None
    _released: asyncio.Event | None = None

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def inject(self, fault: Fault, times: int | None = None) -> None:
        """From now on `fault` strikes the next `times` requests, or all until `heal`."""
        self.wait_for(self._inject(fault, times))

    def heal(self) -> None:
        """End the fault."""
        self.wait_for(self._heal())

    def heal_after(self, delay_s: float) -> None:
        """End the fault after a delay."""
        self.loop.call_soon_threadsafe(
            lambda: self.loop.call_later(delay_s, lambda: self.loop.create_task(self._heal()))
        )

    def wait_for(self, coroutine: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(timeout=HANG_S)

    async def start(self) -> None:
        self._released = asyncio.Event()
        self._runner = web.ServerRunner(web.Server(self._serve), shutdown_timeout=0)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True).start()

    async def _inject(self, fault: Fault, times: int | None) -> None:
        self._plan = _Plan(fault, times)
        if isinstance(fault, Away):
            await self.stop()

    async def _heal(self) -> None:
        was, self._plan = self._plan, _Plan()
        if self._released:
            self._released.set()
            self._released = asyncio.Event()
        if isinstance(was.fault, Away):
            await self.start()

    async def stop(self) -> None:
        """Stop listening, and cut what is connected."""
        if self._released:
            self._released.set()
        runner, self._runner = self._runner, None
        if runner and runner.server:
            for site in list(runner.sites):
                await site.stop()
            for connection in list(runner.server.connections):
                if connection.transport:
                    connection.transport.abort()
            await runner.cleanup()

    def _next_fault(self) -> Fault | None:
        plan = self._plan
        if plan.left is None:
            return plan.fault
        if plan.left == 0:
            return None
        plan.left -= 1
        return plan.fault

    async def _serve(self, request: web.BaseRequest) -> web.StreamResponse:
        self.seen.append(request.method)
        fault = self._next_fault()
        if isinstance(fault, Answer):
            return _refusal(fault)
        if request.headers.get("Expect", "").lower() == "100-continue":
            await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            request.writer.output_size = 0
        body = await self._request_body(request, fault.after_bytes if isinstance(fault, CutUpload) else None)
        if isinstance(fault, Hang) and self._released:
            await self._released.wait()
            raise _cut(request)
        headers = {key: value for key, value in request.headers.items() if key.lower() not in _HOP}
        if isinstance(fault, IgnoreConditions):
            headers.pop("If-None-Match", None)
        url = URL(self.upstream + request.raw_path, encoded=True)
        async with (
            aiohttp.ClientSession(
                auto_decompress=False, connector=aiohttp.TCPConnector(force_close=True)
            ) as session,
            session.request(request.method, url, headers=headers, data=body, allow_redirects=False) as answer,
        ):
            content = await answer.read()
            if isinstance(fault, LoseAnswer):
                raise _cut(request)
            return await _send(request, answer, content, fault)

    async def _request_body(self, request: web.BaseRequest, cut_after_bytes: int | None) -> bytes:
        body = bytearray()
        async for chunk in request.content.iter_any():
            body += chunk
            if cut_after_bytes is not None and len(body) >= cut_after_bytes:
                raise _cut(request)
        return bytes(body)


async def _send(
    request: web.BaseRequest, answer: aiohttp.ClientResponse, content: bytes, fault: Fault | None
) -> web.StreamResponse:
    response = web.StreamResponse(status=answer.status, reason=answer.reason)
    for key, value in answer.headers.items():
        if key.lower() not in _HOP:
            response.headers.add(key, value)
    if request.method != "HEAD":
        response.content_length = len(content)
    await response.prepare(request)
    match fault:
        case CutDownload(after_bytes):
            await response.write(content[:after_bytes])
            raise _cut(request)
        case WrongBytes() if content:
            await response.write(bytes([content[0] ^ 1]) + content[1:])
        case Slow(bytes_per_s):
            for start in range(0, len(content), bytes_per_s // 10):
                await response.write(content[start : start + bytes_per_s // 10])
                await asyncio.sleep(0.1)
        case _ if request.method != "HEAD":
            await response.write(content)
    await response.write_eof()
    return response


def _cut(request: web.BaseRequest) -> BaseException:
    """Reset the connection. Returns what ends the handler without an answer."""
    if request.transport:
        request.transport.abort()
    return asyncio.CancelledError()


def _refusal(answer: Answer) -> web.Response:
    text = f"<Error><Code>{answer.code}</Code><Message>{answer.message}</Message></Error>"
    # Closed, because the request's body may still be on its way.
    return web.Response(
        status=answer.status, text=text, content_type="application/xml", headers={"Connection": "close"}
    )


@contextlib.contextmanager
def fault_proxy(upstream: str) -> Iterator[FaultProxy]:
    """A proxy in front of `upstream`, such as http://127.0.0.1:9000, while the block runs."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="fault-proxy", daemon=True)
    thread.start()
    held = socket.socket()  # the port, also while nobody listens: else others may get it
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # for who listens, and asks for it too
    held.bind(("127.0.0.1", 0))
    proxy = FaultProxy(upstream, held.getsockname()[1], loop)
    proxy.wait_for(proxy.start())
    try:
        yield proxy
    finally:
        held.close()
        proxy.wait_for(proxy.stop())
        loop.call_soon_threadsafe(loop.stop)
        thread.join(timeout=HANG_S)
        loop.close()
