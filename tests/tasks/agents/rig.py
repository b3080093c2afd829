"""A stand-in gateway over HTTP, without torch: tokens are the characters' numbers."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
from aiohttp import web

from grpo_orch.checkpoint.records import documents
from grpo_orch.checkpoint.records.documents import GatewayAddress
from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.policies.serving.wire import (
    CHAT,
    HEADER_OPENING,
    HEADER_REQUEST,
    LOST_CODE,
    Batch,
    OpenSession,
    PolicyRef,
)
from grpo_orch.policies.tick.snapshot import Trainer
from grpo_orch.tasks.agents.processes import AgentHost
from grpo_orch.tasks.agents.runner import AgentRunner, Limits
from grpo_orch.tasks.agents.session_client import MODELS, SessionClient
from grpo_orch.tasks.completions.rollout_source import SessionRequest
from grpo_orch.tasks.storing.heartbeat import Heartbeat
from tests.stand_ins.stand_in_sessions import StandInSessions

TOKEN = "run-secret"
RETRY_S = 0.02
BY = (0, 1, 1)
POLICY = PolicyRef("0-0", "policies/0-0", "00" * 16)
HERE = Path(__file__).parent
ANSWER_TOKENS = 8


def sample(_: OpenSession, __: list[int], seed: int, most: int) -> tuple[list[int], list[float]]:
    dice = random.Random(seed)
    tokens = [dice.randrange(97, 123) for _ in range(min(most, ANSWER_TOKENS))]
    return tokens, [-1.0] * len(tokens)


def encode(text: str) -> list[int]:
    return [ord(character) for character in text]


def decode(tokens: list[int]) -> str:
    return "".join(map(chr, tokens))


class HttpGateway:
    """Serves the sessions, and goes away and comes back as tests want.

    Attributes:
        asked: every request, as (method, path).
        before: awaited before each answer; may raise, or return a response in the place of the real one.
    """

    def __init__(self, store: Store) -> None:
        self.store, self.sessions = store, StandInSessions(encode, decode, sample)
        self.asked: list[tuple[str, str]] = []
        self.bodies: list[bytes] = []
        self.openings: dict[str, str] = {}  # of each session's path
        self.before: Callable[[web.Request], object] = lambda _: None
        self._runner: web.AppRunner | None = None

    async def open(self) -> None:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        documents.gateway((0, 1, 1)).write(self.store, GatewayAddress(url, "stand-in"))

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        assert request.headers["Authorization"] == f"Bearer {TOKEN}"
        body = await request.read()
        self.asked.append((request.method, request.path))
        self.bodies.append(body)
        if request.method == "PUT":
            self.openings[request.path] = msgspec.json.decode(body, type=OpenSession).opening
            assert self.openings[request.path]
        opening = self.openings.get(request.path.removesuffix(CHAT).removesuffix(MODELS))
        if request.method in ("GET", "POST") and opening and request.headers[HEADER_OPENING] != opening:
            return web.json_response({"error": {"code": LOST_CODE}}, status=404)
        instead = self.before(request)
        if asyncio.iscoroutine(instead):
            instead = await instead
        if isinstance(instead, web.StreamResponse):
            return instead
        status, kind, answer = self.sessions.answer(request.method, request.path, body, request_of(request))
        return web.Response(status=status, body=answer, headers={"Content-Type": kind})


def request_of(request: web.Request) -> str:
    return request.headers.get(HEADER_REQUEST, "")


@contextlib.asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[HttpGateway]:
    gateway = HttpGateway(Store(f"file://{folder}/store"))
    await gateway.open()
    try:
        yield gateway
    finally:
        await gateway.close()


def runner_of(
    gateway: HttpGateway,
    agent: str,
    *,
    time_s: float = 600.0,
    turns: int = 32,
    tokens: int = 1000,
    make_host: type[AgentHost] = AgentHost,
    check_stop: Callable[[], None] = lambda: None,
) -> AgentRunner:
    beat = Heartbeat(gateway.store, Trainer("trainer-0", 1, 0, 0, 0, "starting", 0.0))
    host = make_host(f"rig_agents.{agent}", HERE)
    return AgentRunner(
        SessionClient(gateway.store, TOKEN, BY, RETRY_S), host, Limits(time_s, turns, tokens), beat, check_stop
    )


def batch_of(rows: list[dict[str, object]], deadline_s: float = 600.0) -> Batch:
    requests = [
        SessionRequest(index, [], 100 + index, f"0-0-0-{index}-0", dict(row)) for index, row in enumerate(rows)
    ]
    return Batch(POLICY, {"temperature": 1.0}, list(requests), deadline_s)
