"""The trainer's client for gateway sessions, and the forwarder that passes agents' requests to the gateway.

An agent gets an address on this machine and its own key, never the run's token. While the gateway is unavailable,
the forwarder retries, so an agent sees only a pause. Retries are exact: each request has a name, and the gateway
repeats the response it gave under that name.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import secrets
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field, replace

import aiohttp
import msgspec
import structlog
from aiohttp import hdrs, web

from grpo_orch.checkpoint.records import documents
from grpo_orch.checkpoint.security import identity
from grpo_orch.checkpoint.store.codec import to_json
from grpo_orch.checkpoint.store.errors import Corrupt, NotFound
from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.policies.model.vocabulary import Precedence
from grpo_orch.policies.serving.wire import (
    CHAT,
    HEADER_OPENING,
    HEADER_REQUEST,
    LOST_CODE,
    SESSIONS,
    TURNS_AT_ONCE_MAX,
    OpenSession,
    Trace,
)
from grpo_orch.tasks.completions.gateway_client import RETRY_S, GenerationFailed

log = structlog.get_logger()

AWAY_STATUSES = frozenset({502, 503, 504})
CONNECT_S = 5.0
CLOSE_S = 1.0  # grace for requests still open when the trainer ends
BODY_BYTES_MAX = 16 << 20  # limit for an agent's request
# Limit per session for requests that were refused, were aborted or requested no turn. Further requests do not
# reach the gateway, so an agent that retries forever uses up its own time.
WITHOUT_TURN_MAX = 1000
# Clients time out when no byte arrives for a while; OpenAI's after 600 s. So a slow request gets a keep-alive at
# this interval: whitespace before a JSON document, or an SSE comment.
KEEPALIVE_S = 20.0
FORWARDED_HEADERS = (hdrs.CONTENT_TYPE, hdrs.ACCEPT)
LOOPBACK = "127.0.0.1"
MODELS = "/v1/models"


class _GatewayAway(Exception):
    """Raised while the gateway is unavailable; the caller retries."""


class SessionLost(Exception):
    """Raised when the gateway does not know an opened session; open and run it again."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A complete response of the gateway."""

    status: int
    content_type: str
    body: bytes


class SessionClient:
    """Client of the run's gateway that retries while it is unavailable. Used in one event loop.

    Args:
        store: the run's store, which has the gateway's address.
        token: the run's token.
        by: of this trainer. Openings of an earlier trainer, or before on this machine, are older than its own.
        retry_s: wait between two tries.

    Attributes:
        moved_s: time of the last response, on the monotonic clock.
    """

    def __init__(self, store: Store, token: str, by: Precedence, retry_s: float = RETRY_S) -> None:
        self._store, self._token, self._retry_s = store, token, retry_s
        self._by = "-".join(f"{part:09d}" for part in by)
        self._clock_ns = time.time_ns() - time.monotonic_ns()  # a clock that is set back makes no earlier names
        self._url = ""
        self._http: aiohttp.ClientSession | None = None
        self._open_since: dict[object, float] = {}  # start time of each open request
        self._refused = 0  # requests that wait for the gateway to return
        self.moved_s = time.monotonic()

    @property
    def is_away(self) -> bool:
        return self._refused > 0

    def idle_s(self, since_s: float) -> float:
        """Return the seconds since `since_s` during which requests were open and got no response."""
        oldest_s = min(self._open_since.values(), default=time.monotonic())
        return time.monotonic() - max(self.moved_s, oldest_s, since_s)

    async def open(self, session: str, settings: OpenSession) -> str:
        """Open a session and return the opening's name. Raises GenerationFailed, StoreError.

        From then on requests of earlier openings get no turn, whoever sent them and however late they arrive.
        """
        opening = self._opening()
        headers = {str(hdrs.CONTENT_TYPE): "application/json"}
        body = to_json(replace(settings, opening=opening))
        answer = await self.request("PUT", f"{SESSIONS}/{session}", body, headers)
        if answer.status >= 300:
            raise GenerationFailed(f"the gateway answered {answer.status} to a session: {_text(answer)}")
        return opening

    async def trace(self, session: str, opening: str) -> Trace:
        """Return what the gateway recorded for a session since that opening of it.

        Raises SessionLost, GenerationFailed, StoreError.
        """
        answer = await self.request("GET", f"{SESSIONS}/{session}", headers={HEADER_OPENING: opening})
        if _is_lost(answer):
            raise SessionLost(session)
        if answer.status != 200:
            raise GenerationFailed(f"the gateway answered {answer.status} for session {session}: {_text(answer)}")
        try:
            trace = msgspec.json.decode(answer.body, type=Trace)
        except ValueError as error:
            raise GenerationFailed(f"the gateway sent no trace of session {session}: {error}") from error
        for branch in trace.branches:
            lengths = {len(branch.token_ids), len(branch.mask), len(branch.logprobs)}
            if len(lengths) != 1 or not branch.turns or not 0 < branch.prompt_tokens < len(branch.token_ids):
                raise GenerationFailed(f"the gateway sent a branch of session {session} without all of its tokens")
        return trace

    async def forget(self, session: str) -> None:
        """Have the gateway drop a session that is stored elsewhere and not opened since. Raises StoreError."""
        await self.request("DELETE", f"{SESSIONS}/{session}", headers={HEADER_OPENING: self._opening()})

    def _opening(self) -> str:
        """Return a name that sorts after each opening that this trainer made, and before those of a later one."""
        return f"{self._by}-{self._clock_ns + time.monotonic_ns():020d}"

    async def request(
        self, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None
    ) -> Answer:
        """Return the gateway's complete response, retrying while it is unavailable. Raises StoreError."""
        request_key = object()
        self._open_since[request_key] = time.monotonic()
        is_refused = False
        try:
            while True:
                try:
                    answer = await self._ask_once(method, path, body, headers or {})
                except (_GatewayAway, NotFound, Corrupt, aiohttp.ClientError, TimeoutError, OSError):
                    self._url = ""  # the store may have a new address
                    self._refused += not is_refused
                    is_refused = True
                    await asyncio.sleep(self._retry_s)
                else:
                    self.moved_s = time.monotonic()
                    return answer
        finally:
            self._refused -= is_refused
            del self._open_since[request_key]

    async def _ask_once(self, method: str, path: str, body: bytes | None, headers: dict[str, str]) -> Answer:
        if not self._url:
            self._url = await asyncio.to_thread(documents.gateway_url, self._store)
        if self._http is None:
            # No limit on connections or time: agents may send many requests, and a turn may take long.
            connector = aiohttp.TCPConnector(limit=0, ssl=identity.client_context(self._token))
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
            self._http = aiohttp.ClientSession(connector=connector, timeout=timeout, trust_env=False)
        authorized = {**headers, hdrs.AUTHORIZATION: f"Bearer {self._token}"}
        url = f"{self._url.rstrip('/')}{path}"
        async with self._http.request(method, url, data=body, headers=authorized, allow_redirects=False) as answer:
            content = await answer.read()  # raises if the response is truncated
            if answer.status in AWAY_STATUSES:
                raise _GatewayAway
            return Answer(answer.status, answer.headers.get(hdrs.CONTENT_TYPE, "application/json"), content)

    async def close(self) -> None:
        if self._http is not None:
            await self._http.close()


def _is_lost(answer: Answer) -> bool:
    """Return whether the gateway does not know the session. A wrong model name is also a 404."""
    return answer.status == 404 and LOST_CODE.encode() in answer.body


def _text(answer: Answer) -> str:
    return answer.body.decode(errors="replace")[:500]


@dataclass(slots=True, eq=False)
class OpenedSession:
    """A session as its agent sees it.

    Attributes:
        base_url: URL for an OpenAI client.
        key: API key of that client.
        lost: set when the gateway does not know the session.
        requests: tasks of the open requests.
        without_turn: number of requests so far that got no turn.
    """

    name: str
    opening: str
    base_url: str
    key: str = field(default_factory=lambda: secrets.token_urlsafe(24))
    lost: asyncio.Event = field(default_factory=asyncio.Event)
    requests: set[asyncio.Task[None]] = field(default_factory=set)
    without_turn: int = 0
    _waiting: int = 0  # requests the gateway is working on
    _since_s: float | None = None  # start of the agent's own time; None before it has a process
    _own_s: float = 0.0

    def begin(self) -> None:
        """Start the agent's clock: it has a process."""
        self._since_s = time.monotonic()

    @property
    def is_waiting(self) -> bool:
        """True while the agent waits for the model."""
        return self._waiting > 0

    @property
    def agent_time_s(self) -> float:
        """Seconds since the agent's start during which it did not wait for the model."""
        is_idle = self._since_s is None or self.is_waiting
        return self._own_s + (0.0 if is_idle else time.monotonic() - (self._since_s or 0.0))

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Count the current task as a request of the session within the context."""
        task = asyncio.current_task()
        assert task is not None
        self.requests.add(task)
        try:
            yield
        finally:
            self.requests.discard(task)

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Stop the agent's clock within the context.

        Enter it only while the gateway has a request, not while the agent sends it or reads the response.
        """
        self._own_s = self.agent_time_s
        self._waiting += 1
        try:
            yield
        finally:
            self._waiting -= 1
            if not self._waiting:
                self._since_s = time.monotonic()

    def end(self) -> None:
        """Cancel the open requests after the agent has ended."""
        for task in self.requests:
            task.cancel()


class Forwarder:
    """A local server that forwards agents' requests to the gateway. Used in one event loop.

    Args:
        gateway: client of the gateway.
        patient_s: how long a client waits without a byte.
    """

    def __init__(self, gateway: SessionClient, patient_s: float = KEEPALIVE_S) -> None:
        self._gateway, self._patient_s = gateway, patient_s
        self._sessions: dict[str, OpenedSession] = {}
        self._port = 0
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        app = web.Application(client_max_size=BODY_BYTES_MAX)
        # Only these paths: on others of the gateway, the run's token grants more.
        for method, path in (("POST", CHAT), ("GET", MODELS)):
            app.router.add_route(method, f"{SESSIONS}/{{session}}{path}", self._forward)
        # An agent that disconnects and retries gets the turn of its first request.
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=CLOSE_S)
        await self._runner.setup()
        site = web.TCPSite(self._runner, LOOPBACK, 0)
        await site.start()
        self._port = self._runner.addresses[0][1]

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    @contextlib.asynccontextmanager
    async def session(self, name: str, opening: str) -> AsyncIterator[OpenedSession]:
        """Let an agent reach that opening of a session of the gateway within the context."""
        opened = OpenedSession(name, opening, f"http://{LOOPBACK}:{self._port}{SESSIONS}/{name}/v1")
        self._sessions[name] = opened
        try:
            yield opened
        finally:
            opened.end()
            if self._sessions.get(name) is opened:  # a later call may have reused the name
                del self._sessions[name]

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        session = self._sessions.get(request.match_info["session"])
        api_key = request.headers.get(hdrs.AUTHORIZATION, "").removeprefix("Bearer ")
        if session is None or not hmac.compare_digest(api_key.encode(errors="replace"), session.key.encode()):
            return _error(401, "this API key is of another session")
        if len(session.requests) >= TURNS_AT_ONCE_MAX:
            return _error(429, f"a session may have {TURNS_AT_ONCE_MAX} requests open at a time")
        if session.without_turn >= WITHOUT_TURN_MAX:
            return _error(429, f"{session.without_turn} requests of the session got no turn; no more are taken")
        with session.counted():
            return await self._forward_counted(request, session)

    async def _forward_counted(self, request: web.Request, session: OpenedSession) -> web.StreamResponse:
        body = await request.read()  # raises 413 above BODY_BYTES_MAX
        headers = {str(name): request.headers[name] for name in FORWARDED_HEADERS if name in request.headers}
        # Without the same name, the gateway takes a retry for another turn.
        headers |= {HEADER_REQUEST: secrets.token_hex(16), HEADER_OPENING: session.opening}
        path = f"{SESSIONS}/{session.name}{CHAT if request.method == 'POST' else MODELS}"
        answering = asyncio.ensure_future(self._answer(session, request.method, path, body, headers))
        try:
            await asyncio.wait([answering], timeout=self._patient_s)
            if not answering.done():
                return await _respond_late(request, body, answering, self._patient_s)
            answer = answering.result()
        finally:
            answering.cancel()
        if _is_lost(answer):
            session.lost.set()  # the gateway restarted without it
        # Send a streamed response only when complete: parts of an aborted one could not be taken back.
        content_type = {hdrs.CONTENT_TYPE: answer.content_type}
        return web.Response(status=answer.status, body=answer.body, headers=content_type)

    async def _answer(
        self, session: OpenedSession, method: str, path: str, body: bytes, headers: dict[str, str]
    ) -> Answer:
        session.without_turn += 1
        with session.waiting():
            answer = await self._gateway.request(method, path, body or None, headers)
        session.without_turn -= method == "POST" and answer.status == 200
        return answer


async def _respond_late(
    request: web.Request, body: bytes, answering: asyncio.Future[Answer], every_s: float
) -> web.StreamResponse:
    """Send keep-alives to the agent's client every `every_s` until the response is complete.

    After a failure, abort the connection so that the client retries.
    """
    is_stream = _is_stream(body)
    content_type, keep_alive = ("text/event-stream", b": wait\n\n") if is_stream else ("application/json", b" ")
    response = web.StreamResponse(headers={hdrs.CONTENT_TYPE: content_type})
    await response.prepare(request)
    while not answering.done():
        await response.write(keep_alive)
        await asyncio.wait([answering], timeout=every_s)
    answer = answering.result()
    if answer.status != 200 or answer.content_type.startswith("text/event-stream") != is_stream:
        if request.transport is not None:
            request.transport.abort()
        return response
    await response.write(answer.body)
    await response.write_eof()
    return response


def _is_stream(body: bytes) -> bool:
    try:
        content = json.loads(body)
    except (ValueError, RecursionError):
        return False
    return isinstance(content, dict) and bool(content.get("stream"))


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "type": "invalid_request_error"}}, status=status)
