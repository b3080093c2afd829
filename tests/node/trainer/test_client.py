"""The trainer's client towards the gateway, against a stand-in that answers, stalls and breaks."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from grpo_orch.checkpoint.records import metrics, rollouts
from grpo_orch.checkpoint.records.rollouts import EVALUATION_CALLS, Rollout
from grpo_orch.checkpoint.store import layout
from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.policies.model.spec import OnBadPrompt
from grpo_orch.policies.model.vocabulary import PolicyVersion, Precedence
from grpo_orch.policies.serving.trainer_requests import request_seed, split_batches
from grpo_orch.policies.serving.wire import Batch, BatchLine, Completion, CompletionRequest, PolicyRef, Progress
from grpo_orch.policies.tick.snapshot import Trainer
from grpo_orch.tasks.completions import gateway_client
from grpo_orch.tasks.completions.gateway_client import RETRY_S, GatewayCall, GatewayClient, GenerationFailed
from grpo_orch.tasks.completions.refused_prompts import NONE_TAKEN, BadPrompts, RefusedPrompts
from grpo_orch.tasks.completions.rollout_source import RolloutSource
from grpo_orch.tasks.storing.heartbeat import Heartbeat
from grpo_orch.tasks.storing.step_costs import StepCosts
from tests.budget import HANG_S
from tests.node.trainer.stand_in_gateway import TOKEN, StandInGateway

LENGTH = 5
BY = (0, 1, 1)
AT = PolicyVersion(0, 3)
SAMPLING = {"max_tokens": LENGTH, "temperature": 1.0}


class World:
    def __init__(self, folder: Path) -> None:
        self.store = Store(f"file://{folder}/store")
        self.gateway = StandInGateway(self.store, folder / "scratch", model=False)
        self.heartbeat = Heartbeat(self.store, Trainer("trainer-0-i1", 1, 0, 0, 0, "starting", 0.0))
        self.costs = StepCosts()
        self.rule: OnBadPrompt = "skip"

    def client(self, token: str = TOKEN, interrupt: Callable[[], None] = lambda: None) -> GatewayClient:
        return GatewayClient(self.store, token, self.heartbeat, interrupt)

    def source(
        self, by: Precedence = BY, token: str = TOKEN, check_stop: Callable[[], None] = lambda: None
    ) -> RolloutSource:
        refused, client = RefusedPrompts(self.rule, self.costs), self.client(token)
        refused.row_of = lambda prompt: 100 + prompt[0]
        return RolloutSource(
            self.store,
            client,
            self.heartbeat,
            self.costs,
            refused,
            by=by,
            run_seed=42,
            deadline_s=HANG_S,
            check_stop=check_stop,
        )

    def complete(
        self, *prompts: list[int], source: RolloutSource | None = None, at: PolicyVersion = AT, **told: Any
    ) -> Rollout:
        """Two completions of each prompt, or as many as `samples` says, by a source of its own."""
        by = self.source() if source is None else source
        ref = PolicyRef(str(at), layout.policy(at, BY))
        samples, sampling = told.pop("samples", 2), told.pop("sampling", SAMPLING)
        how = {"training": True, "policies": lambda _: ref, **told}
        return by.complete(at, list(prompts), samples, sampling, **how)

    @property
    def seeds(self) -> list[int]:
        """Of all requests that the gateway has seen."""
        return [seed for _, seed in self.gateway.asked]


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    world.gateway.open()
    yield world
    world.gateway.members = 1
    world.gateway.close()


def batch(count: int = 6, deadline_s: float = HANG_S) -> Batch:
    requests = [CompletionRequest(index, [5, 6, 7], 1000 + index) for index in range(count)]
    return Batch(PolicyRef("0-3", "policies/0000/00000003"), SAMPLING, requests, deadline_s)


def test_interrupted_batch_requests_only_missing_completions(world: World) -> None:
    world.gateway.cut_after = 2
    got = world.client().complete(batch())
    assert [one.index for one in got.completions] == list(range(6))
    assert world.seeds == [*range(1000, 1006), *range(1002, 1006)]
    assert got.discarded == LENGTH
    assert got.wait_s > 0


def test_large_batch_is_requested_in_parts(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_client, "split_batches", functools.partial(split_batches, requests_max=4))
    world.gateway.cut_after = 2
    arrived: list[int] = []
    got = world.client().complete(batch(count=10), lambda one: arrived.append(one.index))
    assert [one.index for one in got.completions] == arrived == list(range(10))
    assert world.gateway.batches == [4, 2, 4, 2]
    assert got.discarded == LENGTH
    assert world.client().complete(batch(count=0)).completions == []


def test_prompt_without_tokens_is_refused_and_others_are_sent(world: World) -> None:
    asked = batch()
    empty = [replace(one, prompt_token_ids=[]) if one.index in (0, 3) else one for one in asked.requests]
    began_s = time.monotonic()
    got = world.client().complete(replace(asked, requests=empty))
    assert [one.index for one in got.completions] == list(range(6))
    assert [one.refused for one in got.completions if one.refused] == 2 * ["the prompt is empty"]
    assert world.seeds == [1001, 1002, 1004, 1005]
    assert (got.discarded, got.wait_s) == (0, 0.0), f"served at once, of {time.monotonic() - began_s} s"


def test_missing_gateway_is_awaited(world: World) -> None:
    world.gateway.close()
    opened: list[bool] = []

    def opens() -> None:
        """Once it has looked for it in vain."""
        if not opened:
            world.gateway.open()
            opened.append(True)

    began_s = time.monotonic()
    got = world.client(interrupt=opens).complete(batch())
    assert len(got.completions) == 6
    assert RETRY_S <= got.wait_s <= time.monotonic() - began_s


def test_nothing_until_the_deadline_is_an_error(world: World) -> None:
    world.gateway.members = 0
    with pytest.raises(GenerationFailed, match="no token for"):
        world.client().complete(batch(deadline_s=0.5))


def test_progress_extends_the_wait_and_new_connection_does_not() -> None:
    now_s = 0.0
    call = GatewayCall(batch(), clock=lambda: now_s)
    for moves, moved in ((0, False), (1, True), (1, False), (3, True), (0, False), (1, True)):
        now_s += 10.0
        call.process(BatchLine(progress=Progress(0, 0, 0, 6, moves)))
        assert (call.idle_s == 0.0) is moved, moves
    call.cut()
    now_s += 10.0
    call.process(BatchLine(progress=Progress(0, 0, 0, 6, 1)))
    assert call.idle_s == 10.0


@pytest.mark.parametrize(("kept", "lost"), [(0, 30 + 4), (10, 20), (30, 0)])
def test_tokens_kept_by_gateway_at_broken_connection_not_lost(kept: int, lost: int) -> None:
    """A gateway that has kept something tells itself what it had discarded."""
    call = GatewayCall(batch(count=1))
    call.process(BatchLine(progress=Progress(30, 4, 1, 0)))
    call.cut()
    call.process(BatchLine(progress=Progress(kept, 4 if kept else 0, 1, 0, reused=kept)))
    done = Completion(0, [1] * 40, [-1.0] * 40, "stop", "0-3", "a")
    call.process(BatchLine(completion=done))
    call.process(BatchLine(end=Progress(40, 4 if kept else 0, 1, 0, reused=kept)))
    assert call.result().discarded == lost + (4 if kept else 0)


def test_a_refused_token_is_an_error_at_once(world: World) -> None:
    with pytest.raises(GenerationFailed, match="401"):
        world.client(token="wrong").complete(batch())


def test_a_journalled_call_is_not_made_again(world: World) -> None:
    first = world.complete([5, 6], [7, 8])
    world.gateway.close()

    def publish(_: PolicyVersion) -> PolicyRef:
        raise AssertionError("weights of a replayed step were published")

    assert world.complete([5, 6], [7, 8], policies=publish) == first
    assert world.costs.take()["orch/replayed"] == 0  # one of the two was not
    assert world.seeds == [request_seed(42, 0, 3, 0, prompt, sample) for prompt in (0, 1) for sample in (0, 1)]


@pytest.mark.parametrize("change", ["prompts", "sampling", "damage"])
def test_a_record_of_other_requests_is_not_taken(change: str, world: World) -> None:
    world.complete([5, 6])
    if change == "damage":
        key = layout.rollout(AT, 0, BY)
        world.store.put(key, world.store.get(key)[:-20])
    sampling = {**SAMPLING, "temperature": 0.7} if change == "sampling" else SAMPLING
    world.complete([5, 9] if change == "prompts" else [5, 6], sampling=sampling)
    assert len(world.seeds) == 4
    kept = rollouts.read_rollout(world.store, layout.rollout(AT, 0, BY))
    assert kept is not None
    assert len(kept.completions) == 2


def test_nothing_is_replayed_after_a_remade_step(world: World) -> None:
    """Its completions may be others, and the weights behind it then are not those of the records."""

    def asked_for(source: RolloutSource) -> list[int]:
        counts = []
        for step in range(3, 6):
            before = len(world.seeds)
            for training in (False, True, True):
                world.complete([5, 6], source=source, at=PolicyVersion(0, step), samples=1, training=training)
            counts.append(len(world.seeds) - before)
        return counts

    assert asked_for(world.source()) == [3, 3, 3]
    world.store.delete([layout.rollout(AT, EVALUATION_CALLS, BY)])
    assert asked_for(world.source((0, 1, 2))) == [1, 0, 0], "an evaluation moves no weights"
    world.store.delete([layout.rollout(PolicyVersion(0, 4), 0, BY)])
    assert asked_for(world.source((0, 1, 3))) == [0, 1, 3], "the other call of that step is of the same weights"


def test_replaced_trainers_late_rollout_is_not_replayed(world: World) -> None:
    """Nor does it replace anything; what is the newest trainer's counts."""
    record = world.complete([5, 6], source=world.source((0, 2, 1)))
    newer = layout.rollout(AT, 0, (0, 2, 1))
    stored = world.store.get(newer)
    late = replace(record, completions=[replace(one, token_ids=[9] * LENGTH) for one in record.completions])
    rollouts.write_rollout(world.store, late, (0, 1, 7))
    assert world.store.get(newer) == stored
    assert world.complete([5, 6], source=world.source((0, 3, 1))) == record
    world.store.delete([newer])
    assert world.complete([5, 6], source=world.source((0, 3, 1))) == late, "what there is, is used"
    assert len(world.seeds) == 2


def test_calls_are_numbered_within_step_and_kind(world: World) -> None:
    """Whether a step was evaluated before it generates, as after a restart, must not move its seeds."""
    source = world.source()
    for training in (False, False, True, True):
        world.complete([5], source=source, samples=1, training=training)
    calls = [EVALUATION_CALLS, EVALUATION_CALLS + 1, 0, 1]
    assert world.seeds == [request_seed(42, 0, 3, call, 0, 0) for call in calls]
    took = world.costs.take()
    assert took["orch/tokens"] == 2 * LENGTH
    assert took["orch/generate_node_s"] == took["orch/generate_s"] > 0  # one machine made them


def test_refused_prompt_is_reported_and_the_call_continues(world: World) -> None:
    world.gateway.refuses = lambda prompt: len(prompt) > 2
    for _ in range(2):  # the second is from the journal
        got = world.complete([5, 6], [7, 8, 9], [4, 4])
        assert [len(one.token_ids) for one in got.completions] == [LENGTH, LENGTH, 0, 0, LENGTH, LENGTH]
    told = {name: value for name, value in world.costs.take().items() if "refused" in name}
    assert told == {
        metrics.PROMPTS_REFUSED: 2,
        metrics.REFUSED_ROW: 107,
        metrics.REFUSED_TOKENS: 3,
        metrics.REFUSED_LIMIT: 9,
    }
    assert metrics.PROMPTS_REFUSED not in world.costs.take()


def test_refused_prompt_that_fails_the_run_is_named_and_retried(world: World) -> None:
    world.gateway.refuses, world.rule = (lambda prompt: len(prompt) > 2), "fail"
    with pytest.raises(BadPrompts, match="row 107 of the dataset has 3 tokens, and the nodes take sequences of 9"):
        world.complete([5, 6], [7, 8, 9])
    world.gateway.refuses = lambda _: False  # rollout.vllm.max-model-len was raised
    assert not any(one.refused for one in world.complete([5, 6], [7, 8, 9]).completions)


def test_a_fleet_that_takes_nothing_is_not_the_prompts_fault(world: World) -> None:
    world.gateway.refuses = lambda prompt: prompt[0] != 1
    source, bad = world.source(), [[2]] * (NONE_TAKEN - 1)
    for prompts in (bad, [[1], *bad, [2]], bad):
        world.complete(*prompts, source=source, samples=1)
    with pytest.raises(BadPrompts, match=f"nodes refused {NONE_TAKEN} prompts in a row"):
        world.complete([2], source=source, samples=1)
