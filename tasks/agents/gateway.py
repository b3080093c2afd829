"""What the trainer asks of the gateway about sessions, and the forwarder through which agents ask.

An agent gets an address on this machine and a key of its own, never the run's token. While the gateway is away,
the forwarder waits and asks again, so an agent sees only a pause. Asking again is exact: each request has a name,
and the gateway answers what it has answered before under that name.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import secrets
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field

import aiohttp
import msgspec
import structlog
from aiohttp import hdrs, web

from checkpoint.records import documents
from checkpoint.security import identity
from checkpoint.store.codec import to_json
from checkpoint.store.errors import Corrupt
from checkpoint.store.run_store import Store
from policies.serving.sessions import HEADER_REQUEST, LOST_CODE, SESSIONS, TURNS_AT_ONCE_MAX, OpenSession, Trace
from policies.serving.wire import CHAT
from tasks.completions.gateway_client import RETRY_S, GenerationFailed

log = structlog.get_logger()

AWAY = frozenset({502, 503, 504})
CONNECT_S = 5.0
CLOSE_S = 1.0  # for requests that are still open when the trainer ends
BODY_BYTES_MAX = 16 << 20  # of an agent's request
# Of a session: requests that were refused or broken off, or asked for no turn. The next ones do not reach the
# gateway, so an agent that asks for ever uses up its own time.
WITHOUT_TURN_MAX = 1000
# An agent's client gives up after some time without a byte, OpenAI's after 600 s. So a request that takes longer
# gets something from time to time: spaces before a JSON document mean nothing, nor does an SSE comment.
PATIENT_S = 20.0
PASSED = (hdrs.CONTENT_TYPE, hdrs.ACCEPT)
LOOPBACK = "127.0.0.1"
MODELS = "/v1/models"


class _Away(Exception):
    """The gateway is away: ask again."""


class SessionLost(Exception):
    """The gateway does not know a session that was opened: it is to be opened and run again."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer of the gateway's."""

    status: int
    content_type: str
    body: bytes


class Gateway:
    """Asks the run's gateway, patiently. Used in one event loop.

    Attributes:
        moved_s: when it last answered, on the monotonic clock.
    """

    def __init__(self, store: Store, token: str) -> None:
        self._store, self._token = store, token
        self._url = ""
        self._http: aiohttp.ClientSession | None = None
        self._asking: dict[object, float] = {}  # requests that are open, and since when
        self._refused = 0  # requests that wait for the gateway to come back
        self.moved_s = time.monotonic()

    @property
    def is_away(self) -> bool:
        return self._refused > 0

    def idle_s(self, since_s: float) -> float:
        """Seconds, from that moment on, for which a request is open and none was answered."""
        oldest_s = min(self._asking.values(), default=time.monotonic())
        return time.monotonic() - max(self.moved_s, oldest_s, since_s)

    async def open(self, session: str, wanted: OpenSession) -> None:
        """Open a session. Raises GenerationFailed, StoreError."""
        headers = {str(hdrs.CONTENT_TYPE): "application/json"}
        answer = await self.ask("PUT", f"{SESSIONS}/{session}", to_json(wanted), headers)
        if answer.status >= 300:
            raise GenerationFailed(f"the gateway answered {answer.status} to a session: {_text(answer)}")

    async def trace(self, session: str) -> Trace:
        """What was recorded of a session. Raises SessionLost, GenerationFailed, StoreError."""
        answer = await self.ask("GET", f"{SESSIONS}/{session}")
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
        """Tell the gateway that a session is stored elsewhere. Raises StoreError."""
        await self.ask("DELETE", f"{SESSIONS}/{session}")

    async def ask(
        self, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None
    ) -> Answer:
        """Return the gateway's whole answer, however long it is away. Raises StoreError."""
        own = object()
        self._asking[own] = time.monotonic()
        is_refused = False
        try:
            while True:
                try:
                    answer = await self._ask_once(method, path, body, headers or {})
                except (_Away, aiohttp.ClientError, TimeoutError, OSError):
                    self._url = ""  # the store may name another by now
                    self._refused += not is_refused
                    is_refused = True
                    await asyncio.sleep(RETRY_S)
                else:
                    self.moved_s = time.monotonic()
                    return answer
        finally:
            self._refused -= is_refused
            del self._asking[own]

    async def _ask_once(self, method: str, path: str, body: bytes | None, headers: dict[str, str]) -> Answer:
        if not self._url:
            self._url = await asyncio.to_thread(self._address)
        if self._http is None:
            # No limit of connections or time: requests are as many as agents make, and a turn may take long.
            connector = aiohttp.TCPConnector(limit=0, ssl=identity.client_context(self._token))
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
            self._http = aiohttp.ClientSession(connector=connector, timeout=timeout, trust_env=False)
        own = {**headers, hdrs.AUTHORIZATION: f"Bearer {self._token}"}
        url = f"{self._url.rstrip('/')}{path}"
        async with self._http.request(method, url, data=body, headers=own, allow_redirects=False) as answer:
            whole = await answer.read()  # one that breaks off raises
            if answer.status in AWAY:
                raise _Away
            return Answer(answer.status, answer.headers.get(hdrs.CONTENT_TYPE, "application/json"), whole)

    def _address(self) -> str:
        try:
            address = documents.read_gateway(self._store)
        except Corrupt as error:
            raise _Away from error
        if address is None:
            raise _Away
        return address.url

    async def close(self) -> None:
        if self._http is not None:
            await self._http.close()


def _is_lost(answer: Answer) -> bool:
    """Whether the gateway does not know the session; a wrong model's name is a 404, too."""
    return answer.status == 404 and LOST_CODE.encode() in answer.body


def _text(answer: Answer) -> str:
    return answer.body.decode(errors="replace")[:500]


@dataclass(slots=True, eq=False)
class OpenedSession:
    """A session as its agent sees it.

    Attributes:
        base_url: for an OpenAI client.
        key: its API key.
        lost: set when the gateway does not know the session.
        requests: that are open.
        without_turn: requests that have got no turn, so far.
    """

    name: str
    base_url: str
    key: str = field(default_factory=lambda: secrets.token_urlsafe(24))
    lost: asyncio.Event = field(default_factory=asyncio.Event)
    requests: set[asyncio.Task[None]] = field(default_factory=set)
    without_turn: int = 0
    _waiting: int = 0  # requests that the gateway has
    _since_s: float | None = None  # the agent has not waited for the model; None: it has no process yet
    _own_s: float = 0.0

    def begin(self) -> None:
        """The agent has a process."""
        self._since_s = time.monotonic()

    @property
    def is_waiting(self) -> bool:
        """Whether the agent waits for the model."""
        return self._waiting > 0

    @property
    def own_s(self) -> float:
        """Seconds since its start in which the agent did not wait for the model."""
        is_idle = self._since_s is None or self.is_waiting
        return self._own_s + (0.0 if is_idle else time.monotonic() - (self._since_s or 0.0))

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Within, the present task is a request of the session."""
        task = asyncio.current_task()
        assert task is not None
        self.requests.add(task)
        try:
            yield
        finally:
            self.requests.discard(task)

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Within, the gateway has a request: not while the agent sends it, or takes its answer."""
        self._own_s = self.own_s
        self._waiting += 1
        try:
            yield
        finally:
            self._waiting -= 1
            if not self._waiting:
                self._since_s = time.monotonic()

    def end(self) -> None:
        """Cancel its requests: its agent is gone."""
        for task in self.requests:
            task.cancel()


class Forwarder:
    """A server on this machine that hands agents' requests to the gateway. Used in one event loop."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._sessions: dict[str, OpenedSession] = {}
        self._port = 0
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        app = web.Application(client_max_size=BODY_BYTES_MAX)
        # These alone: the gateway serves others to whom the run's token is enough.
        for method, path in (("POST", CHAT), ("GET", MODELS)):
            app.router.add_route(method, f"{SESSIONS}/{{session}}{path}", self._forward)
        # An agent that goes away, and asks again, gets the turn that it has left behind.
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=CLOSE_S)
        await self._runner.setup()
        site = web.TCPSite(self._runner, LOOPBACK, 0)
        await site.start()
        self._port = self._runner.addresses[0][1]

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    @contextlib.asynccontextmanager
    async def session(self, name: str) -> AsyncIterator[OpenedSession]:
        """Within, an agent can reach the gateway's session of that name."""
        opened = OpenedSession(name, f"http://{LOOPBACK}:{self._port}{SESSIONS}/{name}/v1")
        self._sessions[name] = opened
        try:
            yield opened
        finally:
            opened.end()
            if self._sessions.get(name) is opened:  # and not another call's of the same name
                del self._sessions[name]

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        session = self._sessions.get(request.match_info["session"])
        told = request.headers.get(hdrs.AUTHORIZATION, "").removeprefix("Bearer ")
        if session is None or not hmac.compare_digest(told.encode(errors="replace"), session.key.encode()):
            return _error(401, "this API key is of another session")
        if len(session.requests) >= TURNS_AT_ONCE_MAX:
            return _error(429, f"a session may have {TURNS_AT_ONCE_MAX} requests open at a time")
        if session.without_turn >= WITHOUT_TURN_MAX:
            return _error(429, f"{session.without_turn} requests of the session got no turn; no more are taken")
        with session.counted():
            return await self._forward_counted(request, session)

    async def _forward_counted(self, request: web.Request, session: OpenedSession) -> web.StreamResponse:
        body = await request.read()  # raises 413 where it is longer than BODY_BYTES_MAX
        headers = {str(name): request.headers[name] for name in PASSED if name in request.headers}
        # The gateway takes what is asked for again as another turn, unless it has the same name.
        headers[HEADER_REQUEST] = secrets.token_hex(16)
        path = f"{SESSIONS}/{session.name}{CHAT if request.method == 'POST' else MODELS}"
        asked = asyncio.ensure_future(self._asked(session, request.method, path, body, headers))
        try:
            await asyncio.wait([asked], timeout=PATIENT_S)
            if not asked.done():
                return await _answered_late(request, body, asked)
            answer = asked.result()
        finally:
            asked.cancel()
        if _is_lost(answer):
            session.lost.set()  # a gateway that was started again without it
        # A streamed answer is sent once it is complete: pieces of one that breaks off could not be taken back.
        kind = {hdrs.CONTENT_TYPE: answer.content_type}
        return web.Response(status=answer.status, body=answer.body, headers=kind)

    async def _asked(
        self, session: OpenedSession, method: str, path: str, body: bytes, headers: dict[str, str]
    ) -> Answer:
        session.without_turn += 1
        with session.waiting():
            answer = await self._gateway.ask(method, path, body or None, headers)
        session.without_turn -= method == "POST" and answer.status == 200
        return answer


async def _answered_late(request: web.Request, body: bytes, asked: asyncio.Future[Answer]) -> web.StreamResponse:
    """Keep an agent's client from giving up until the answer is there. What is no success breaks the connection
    off: its client asks again."""
    is_stream = _is_stream(body)
    kind, nothing = ("text/event-stream", b": wait\n\n") if is_stream else ("application/json", b" ")
    response = web.StreamResponse(headers={hdrs.CONTENT_TYPE: kind})
    await response.prepare(request)
    while not asked.done():
        await response.write(nothing)
        await asyncio.wait([asked], timeout=PATIENT_S)
    answer = asked.result()
    if answer.status != 200 or answer.content_type.startswith("text/event-stream") != is_stream:
        if request.transport is not None:
            request.transport.abort()
        return response
    await response.write(answer.body)
    await response.write_eof()
    return response


def _is_stream(body: bytes) -> bool:
    try:
        asked = json.loads(body)
    except (ValueError, RecursionError):
        return False
    return isinstance(asked, dict) and bool(asked.get("stream"))


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "type": "invalid_request_error"}}, status=status)
