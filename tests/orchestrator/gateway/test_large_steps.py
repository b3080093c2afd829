"""A step of thousands of long prompts costs the gateway pieces of time, between which it hears everybody else."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from array import array
from collections.abc import Iterator
from contextlib import aclosing, contextmanager

import httpx
import msgspec
import pytest

from grpo_orch.orchestrator.gateway.__main__ import GC_OBJECTS
from grpo_orch.orchestrator.gateway.surface.admission import Prompt
from grpo_orch.orchestrator.gateway.surface.batch import PROMPT_TOKEN_SIZE, BatchRun
from grpo_orch.policies.serving.silence_limits import SilenceLimits
from grpo_orch.policies.serving.wire import Announce, Batch, BatchLine, CompletionRequest, PolicyRef, Sample
from grpo_orch.tasks.completions.gateway_client import body_of
from tests.budget import HANG_S
from tests.rigs.gateway_world import TOKEN, World, serve
from tests.stand_ins.fake_vllm import FakeVllm

PROMPTS, SAMPLES, PROMPT_TOKENS = 600, 32, 4096
AT_A_TIME = 1024
SHARE = 1 / 20  # of the step's work that may lie in one piece: the largest here are a fortieth
TRIES = 5  # a busy machine stretches a piece now and then; one that is too long is so each time
POLICY = PolicyRef("0-0", "policies/0-0")


@pytest.fixture
def rare_garbage() -> Iterator[None]:
    """As the gateway's process has it."""
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(GC_OBJECTS)
    yield
    gc.set_threshold(*before)
    gc.unfreeze()


def large_batch() -> Batch:
    prompts = [[number, *range(50_000, 50_000 + PROMPT_TOKENS - 1)] for number in range(PROMPTS)]
    requests = [CompletionRequest(n, prompts[n // SAMPLES], seed=n) for n in range(PROMPTS * SAMPLES)]
    return Batch(POLICY, {"temperature": 1.0, "max_tokens": 64}, requests, deadline_s=HANG_S)


@contextmanager
def node_in_a_thread() -> Iterator[FakeVllm]:
    """A node that takes requests and makes no token of them."""
    node, listens, over = FakeVllm("a", TOKEN), threading.Event(), threading.Event()
    node.change(policy=POLICY.label, stalls=0)

    async def serve() -> None:
        await node.listen()
        listens.set()
        await asyncio.to_thread(over.wait)
        await node.close()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        assert listens.wait(HANG_S)
        yield node
    finally:
        over.set()
        thread.join()


class Patient(SilenceLimits):
    """Does not ask whether a member lives that is silent on a busy machine."""

    __slots__ = ()

    soft_s = HANG_S  # type: ignore[misc]


class Lag:
    """The most CPU time that this thread needed between two rounds of its event loop, and all that it needed."""

    def __init__(self) -> None:
        self.worst_s = self.all_s = 0.0

    @property
    def share(self) -> float:
        return self.worst_s / self.all_s

    async def watch(self) -> None:
        before_s = time.thread_time()
        while True:
            await asyncio.sleep(0)
            now_s = time.thread_time()
            self.worst_s, self.all_s = max(self.worst_s, now_s - before_s), self.all_s + now_s - before_s
            before_s = now_s


def ask(url: str, body: bytes, enough: threading.Event) -> list[BatchLine]:
    """What the gateway says until there is enough; then the connection breaks."""
    headers, lines = {"Authorization": f"Bearer {TOKEN}"}, []
    with (
        httpx.Client(headers=headers, timeout=HANG_S, trust_env=False) as http,
        http.stream("POST", f"{url}/v1/rollouts", content=body) as answer,
    ):
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            lines.append(msgspec.json.decode(line, type=BatchLine))
            if enough.is_set():
                return lines
    raise AssertionError("it ended before there was enough")


@pytest.mark.usefixtures("rare_garbage")
def test_large_step_leaves_the_event_loop_free() -> None:
    body = body_of(large_batch())
    assert len(body) < 1.1 * PROMPTS * PROMPT_TOKENS * len("50000,")  # each prompt crosses once
    shares: list[float] = []
    while not shares or (shares[-1] > SHARE and len(shares) < TRIES):
        shares.append(largest_share(body))
    assert min(shares) <= SHARE, shares


def largest_share(body: bytes) -> float:
    """Begin the step and give it up; return the share of its work that its largest piece was."""
    lag, enough = Lag(), threading.Event()

    async def announce(world: World, node: FakeVllm) -> None:
        while True:
            await world.members.announce("a", Announce(node.boot_id, node.address, POLICY.label, AT_A_TIME))

    async def story(world: World) -> None:
        world.limits = Patient
        with node_in_a_thread() as node:
            announcing = asyncio.ensure_future(announce(world, node))
            await world.until(lambda: world.members.table.members)
            world.members.table.members[0].allowed = AT_A_TIME
            watching = asyncio.ensure_future(lag.watch())
            idle = len(asyncio.all_tasks())
            asking = asyncio.ensure_future(asyncio.to_thread(ask, world.url, body, enough))
            await world.until(lambda: len(node.asked) == AT_A_TIME or asking.done())
            await world.until(lambda: world.members.places.waiting.count == PROMPTS * SAMPLES - AT_A_TIME)
            waits = world.members.places.waiting.size_bytes
            assert waits <= PROMPTS * PROMPT_TOKENS * PROMPT_TOKEN_SIZE
            enough.set()
            lines = await asking
            assert lines[-1].progress is not None
            await world.until(lambda: world.gateway.orphans.batches)
            world.gateway.orphans.expire_superseded("1-0")  # another timeline: nobody will come for it
            await world.until(lambda: len(asyncio.all_tasks()) <= idle)
            assert (world.members.places.waiting.count, world.members.table.members[0].running) == (0, 0)
            watching.cancel()
            announcing.cancel()

    serve(story)
    return lag.share


async def test_abandoned_batch_leaves_no_prompt_in_memory(world: World) -> None:
    prompt = Prompt(array("I", [1, 2, 3]), [Sample(0, 1)])
    batch = Batch(POLICY, {"max_tokens": 4}, [], deadline_s=HANG_S)
    kept = world.gateway.orphans
    batch_run = BatchRun(batch, [prompt], world.members, world.ledger, kept)
    async with aclosing(batch_run.chunks()) as chunks:
        await anext(chunks)
    assert prompt.token_ids
    kept.expire_superseded("1-0")
    await world.until(lambda: not prompt.token_ids)


@pytest.mark.parametrize(
    "lines", [b"\n", b'\n{"prompt_token_ids":[-1],"samples":[{"index":9,"seed":1}]}', b"\n[]"]
)
async def test_lines_that_are_no_prompts_are_refused(world: World, lines: bytes) -> None:
    batch = Batch(POLICY, {"max_tokens": 4}, [], deadline_s=HANG_S)
    answer = await world.http.post("/v1/rollouts", content=body_of(batch) + lines)
    assert answer.status_code == (200 if lines == b"\n" else 400), answer.text


async def test_batch_of_lines_equals_one_document(world: World) -> None:
    requests = [CompletionRequest(n, [1, 2, n // 2], seed=n) for n in range(6)]
    batch = Batch(POLICY, {"max_tokens": 4}, requests, deadline_s=HANG_S)
    assert len(body_of(batch).split(b"\n")) == 4
    await world.node("a")
    answers = []
    for body in (body_of(batch), msgspec.json.encode(batch)):
        answer = await world.http.post("/v1/rollouts", content=body)
        lines = [msgspec.json.decode(line, type=BatchLine) for line in answer.text.splitlines()]
        found = [line.completion for line in lines if line.completion is not None]
        answers.append({one.index: (one.token_ids, one.logprobs) for one in found})
    assert answers[0] == answers[1]
    assert len(answers[0]) == len(requests)
