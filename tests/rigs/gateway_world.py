"""A whole gateway on its own port and stand-ins for vLLM, all on one event loop, and clients for it.

Tests decide what a node does, and when, without a process.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, TypeVar

import httpx
import msgspec
from prometheus_client.parser import text_string_to_metric_families

from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.orchestrator.gateway.__main__ import listen
from grpo_orch.orchestrator.gateway.job import Finished, Job
from grpo_orch.orchestrator.gateway.routing.member_watch import Watch
from grpo_orch.orchestrator.gateway.surface.gateway_app import Gateway
from grpo_orch.orchestrator.gateway.surface.listener import HEAD_S, listening
from grpo_orch.orchestrator.gateway.surface.session_log import SessionLog
from grpo_orch.policies.model.vocabulary import Recovery
from grpo_orch.policies.serving.membership import Member
from grpo_orch.policies.serving.silence_limits import SilenceLimits
from grpo_orch.policies.serving.wire import Announce, AnnounceReply, Batch, BatchLine, PolicyRef
from tests.budget import HANG_S
from tests.rigs.gateway_process import Heard, hear
from tests.stand_ins.fake_vllm import FakeVllm, completion, prompt_of

TOKEN = "secret"
DRAIN_S = 0.1  # what a drained member has not finished by then goes on elsewhere
T = TypeVar("T")


class Node(FakeVllm):
    """A member. Its agent announces it for as long as the world lasts."""

    def __init__(self, world: World, name: str, policy: str | None, attributes: dict[str, Any]) -> None:
        super().__init__(name, TOKEN)
        self.world = world
        self.change(**{"boot_id": f"boot-of-{name}", "policy": policy, **attributes})

    async def start(self, port: int = 0) -> None:
        await self.listen(port=port)
        self.announcing = asyncio.ensure_future(self.announce_forever(self._announce))

    def announce(self) -> None:
        """Have its agent announce it now."""
        self.world.members.announcements.answer(self.name)

    def lose(self) -> None:
        """Its machine is gone, and the connection of its announcement with it."""
        self.announcing.cancel()
        self.kill()
        self.world.members.leave(self.name, self.boot_id)

    async def load(self, policy: str) -> None:
        """Hold this policy; return once the gateway knows."""
        self.change(policy=policy)
        self.announce()
        await self.world.until(lambda: self.row.policy == policy)

    @property
    def row(self) -> Member:
        found = self.world.members.table.member(self.name)
        assert found is not None
        return found

    async def _announce(self, name: str, announcement: Announce) -> AnnounceReply:
        reply = await self.world.members.announce(name, announcement)
        if reply.drain:
            self.world.members.leave(name, self.boot_id)
        return reply


class World:
    """A gateway that wants policy 0-0. `http` has the token.

    Args:
        head_s: how long a client may take for a request's head.
        policy: what is wanted, if anything.
        folder: of the gateway's machine, for the turns of sessions.
        store: the run's, for the same.
    """

    def __init__(
        self,
        *,
        head_s: float = HEAD_S,
        policy: str = "0-0",
        folder: Path | None = None,
        store: Store | None = None,
    ) -> None:
        self.limits: Callable[[], SilenceLimits] = SilenceLimits  # of members that come
        self.nodes: list[Node] = []
        self._head_s, self._policy = head_s, policy
        self._folder, self._store = folder, store
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> World:
        self.session_log = SessionLog(self._folder and self._folder / "turns", self._store)
        self.gateway = Gateway("boot-of-gateway", TOKEN, self.session_log, lambda: self.limits())
        sock = listen("127.0.0.1", None)
        self.members, self.ledger = self.gateway.members, self.gateway.ledger
        self.completer = self.gateway.completer
        self.watch = Watch(self.members, DRAIN_S)
        self.loop = asyncio.get_running_loop()
        self.port: int = sock.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        enter = self._stack.enter_async_context
        self._stack.push_async_callback(self.members.close)
        await enter(listening(self.gateway.app(), self.gateway.is_authorized, sock, None, self._head_s))
        headers = {"Authorization": f"Bearer {TOKEN}"}
        client = httpx.AsyncClient(headers=headers, base_url=self.url, timeout=HANG_S, trust_env=False)
        self.http = await enter(client)
        if self._policy:
            self.want(self._policy)
        self._watching = asyncio.ensure_future(self.watch.run())
        self.gateway.sessions.load(0)
        return self

    async def __aexit__(self, *_: object) -> None:
        watched = not self._watching.done()
        self._watching.cancel()
        for node in self.nodes:
            node.announcing.cancel()
            await node.close()
        await self._stack.aclose()
        assert watched, self._watching.exception()

    def want(self, policy: str) -> None:
        self.members.want(PolicyRef(policy, f"policies/{policy}"))

    async def node(
        self, name: str, policy: str | None = "0-0", max_requests: int = 256, port: int = 0, **attributes: Any
    ) -> Node:
        """Start a node that is a member when this returns, and has these attributes from its first request on."""
        node = Node(self, name, policy, {"max_requests": max_requests, **attributes})
        self.nodes.append(node)
        await node.start(port)
        await self.until(
            lambda: (row := self.members.table.member(name)) is not None and row.boot_id == node.boot_id
        )
        return node

    def ask(self, job: Job) -> asyncio.Task[Finished]:
        return asyncio.ensure_future(self.completer.complete(job))

    async def begun(self, job: Job, tokens: int = 5) -> asyncio.Task[Finished]:
        """Ask; return once so many tokens have arrived."""
        task = self.ask(job)
        await self.until(lambda: len(job.token_ids) == tokens)
        return task

    def note_jobs(self) -> list[Job]:
        """Return a list to which each job that begins from now on is added."""
        jobs, complete = list[Job](), self.completer.complete

        async def noted(job: Job) -> Finished:
            jobs.append(job)
            return await complete(job)

        self.completer.complete = noted  # type: ignore[method-assign]
        return jobs

    async def lines(self, batch: Batch) -> AsyncIterator[BatchLine]:
        """Send a batch as a trainer does, and yield the answer's lines as they come."""
        body = msgspec.json.encode(batch)
        async with self.http.stream("POST", "/v1/rollouts", content=body) as answer:
            assert answer.status_code == 200, await answer.aread()
            async for line in answer.aiter_lines():
                yield msgspec.json.decode(line, type=BatchLine)

    async def complete(self, batch: Batch) -> Heard:
        return hear(iter([line async for line in self.lines(batch)]))

    async def numbers(self) -> dict[str, float]:
        """Every sample of /metrics, by its name and its labels' values in the order of their names."""
        response = await self.http.get("/metrics")
        assert response.headers["content-type"].startswith("text/plain")
        found: dict[str, float] = {}
        for family in text_string_to_metric_families(response.text):
            assert family.documentation
            for sample in family.samples:
                labels = ",".join(value for _, value in sorted(sample.labels.items()))
                found[f"{sample.name.removeprefix('grpo_gateway_')}{{{labels}}}"] = sample.value
        return found

    async def until(self, ready: Callable[[], object]) -> None:
        async with asyncio.timeout(HANG_S):
            while not ready():
                await asyncio.sleep(0.005)


def serve(story: Callable[[World], Coroutine[Any, Any, T]], **options: Any) -> T:
    """Run the story in a world with these options, for HANG_S at most."""

    async def both() -> T:
        async with asyncio.timeout(HANG_S), World(**options) as world:
            return await story(world)

    return asyncio.run(both())


def events_of(answer: httpx.Response) -> list[dict[str, Any]]:
    """The events of a streamed answer."""
    assert answer.status_code == 200, answer.text
    *events, done = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert done == "[DONE]"
    return [json.loads(event) for event in events]


_seeds: Iterator[int] = iter(range(1_000_000))


def job(*, policy: str = "0-0", group: object = None, recovery: Recovery = "continue", **body: Any) -> Job:
    """A job whose tokens are its own."""
    seed = next(_seeds)
    return Job(
        body={"temperature": 1.0, "max_tokens": 16, "seed": seed, "prompt": [1, 2, 3], **body},
        policy=policy,
        group=seed if group is None else group,
        recovery=recovery,
    )


def undisturbed(job: Job) -> tuple[list[int], list[float], str]:
    """What the job must come to."""
    return completion(job.body, prompt_of(job.body))


def check(job: Job, got: Finished) -> None:
    assert (got.token_ids, got.logprobs, got.finish_reason) == undisturbed(job)
