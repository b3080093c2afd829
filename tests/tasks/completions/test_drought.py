"""A trainer that generates while no rollout node is there: what it makes and asks for, and what is counted."""

from __future__ import annotations

from typing import Any, cast

import pytest

from grpo_orch.policies.serving.wire import CUT, Batch, Completion, CompletionRequest, PolicyRef
from grpo_orch.tasks.completions import node_shortage
from grpo_orch.tasks.completions.gateway_client import Generated, NoNodeServing
from grpo_orch.tasks.completions.node_shortage import NodeShortage, Share, TrainerMustGenerate
from grpo_orch.tasks.storing.heartbeat import Heartbeat
from grpo_orch.tasks.storing.step_costs import StepCosts

AFTER_S = 300.0
NODE, TRAINER = "rollout-0-i1", "trainer-0-i1"


class Heard:
    """A heartbeat's words."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def update(self, activity: str) -> None:
        self.said.append(activity)


class Gateway:
    """Has nodes or not. Without them it hands out what is in `made` and `cut`, once."""

    def __init__(self) -> None:
        self.there = False
        self.made: list[int] = []
        self.cut: list[Completion] = []
        self.asked: list[tuple[list[int], float | None]] = []  # requests, and for how long to wait for nodes

    def complete(self, batch: Batch) -> Generated:
        self.asked.append(([one.index for one in batch.requests], batch.patience_s))
        if not self.there:
            made, cut, self.made, self.cut = self.made, self.cut, [], []
            raise NoNodeServing([finished(index, NODE) for index in made], cut, discarded=5, wait_s=2.0)
        return Generated([finished(one.index, NODE) for one in batch.requests], discarded=1, wait_s=0.5)

    def complete_in_background(self, batch: Batch, *_: Any) -> Generated:
        return self.complete(batch)


def finished(index: int, node: str) -> Completion:
    return Completion(index, [index], [-1.0], "stop", "0-3", node)


def begun(index: int, tokens: int) -> Completion:
    return Completion(index, [7] * tokens, [-1.0] * tokens, CUT, "0-3", "")


def batch(count: int = 6, first_seed: int = 100) -> Batch:
    requests = [CompletionRequest(index, [5], first_seed + index) for index in range(count)]
    return Batch(PolicyRef("0-3", "p"), {"max_tokens": 9}, requests, 60.0)


class World:
    def __init__(self) -> None:
        self.gateway, self.heard, self.costs = Gateway(), Heard(), StepCosts()
        self.ends: Exception | None = None
        self.drought = NodeShortage(
            self.gateway, AFTER_S, self._check_stop, cast(Heartbeat, self.heard), self.costs
        )

    def _check_stop(self) -> None:
        if self.ends is not None:
            raise self.ends

    def share(self, asked: Batch, processes: int = 1) -> Share:
        with pytest.raises(TrainerMustGenerate):
            self.drought.complete(asked)
        return self.drought.share(processes)

    def take(self, share: Share, took_s: float = 4.0) -> None:
        made = [finished(one.index, TRAINER) for one in share.batch.requests]
        self.drought.take(made, took_s, training=True)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(node_shortage, "MAX_CONCURRENT", 2)
    return World()


def indices(share: Share) -> list[int]:
    return [one.index for one in share.batch.requests]


def test_part_after_part_is_made_with_a_look_for_nodes_before(world: World) -> None:
    asked = batch()
    for expected in ([0, 1], [2, 3]):
        share = world.share(asked)
        assert indices(share) == expected
        world.take(share)
    world.gateway.there = True
    got = world.drought.complete(asked)
    assert [one.node for one in got.completions] == [TRAINER] * 4 + [NODE] * 2
    assert [one.index for one in got.completions] == list(range(6))
    assert world.gateway.asked == [(list(range(6)), AFTER_S), ([2, 3, 4, 5], 0.0), ([4, 5], 0.0)]
    assert (got.discarded, got.wait_s) == (11, 4.5)
    assert world.heard.said == ["generating alone"] * 2
    assert world.costs.own_generate_s == world.costs.generate_s == world.costs.generated_s == 8.0


def test_shortage_waits_for_no_node_until_one_serves(world: World) -> None:
    asked = batch(count=2)
    world.take(world.share(asked))
    world.drought.complete(asked)
    world.take(world.share(batch(first_seed=200)))
    world.gateway.there = True
    world.drought.complete(batch(first_seed=200))
    world.gateway.there = False
    world.share(batch(first_seed=300))
    assert [patience_s for _, patience_s in world.gateway.asked] == [AFTER_S, 0.0, 0.0, AFTER_S]


def test_completions_of_nodes_stay_and_begun_ones_continue(world: World) -> None:
    world.gateway.made, world.gateway.cut = [0, 3], [begun(2, 4), begun(4, 3), begun(5, 2)]
    share = world.share(batch())
    assert (indices(share), share.begun) == ([2, 4], [begun(2, 4), begun(4, 3)])
    world.take(share)
    world.gateway.there = True
    got = world.drought.complete(batch())
    assert [one.node for one in got.completions] == [NODE, NODE, TRAINER, NODE, TRAINER, NODE]
    assert got.discarded == 5 + 1 + 2, "what was begun of 5 has been made anew"


def test_longer_of_duplicate_starts_stays_and_lost_tokens_count(world: World) -> None:
    world.gateway.cut = [begun(0, 1), begun(1, 1), begun(4, 4), begun(5, 2)]
    world.take(world.share(batch()))
    world.gateway.cut, world.gateway.made = [begun(4, 1), begun(5, 3)], [2]
    share = world.share(batch())
    assert (indices(share), share.begun) == ([4, 5], [begun(4, 4), begun(5, 3)])
    world.drought.take([finished(4, TRAINER)], 4.0, training=True)
    world.gateway.made = [5]
    world.take(world.share(batch()))
    got = world.drought.complete(batch())
    assert [one.node for one in got.completions] == [TRAINER] * 2 + [NODE] + [TRAINER] * 2 + [NODE]
    assert got.discarded == 3 * 5 + 1 + 2 + 3


def test_new_batch_starts_empty_and_each_process_has_a_part(world: World) -> None:
    world.take(world.share(batch()))
    share = world.share(batch(first_seed=200), processes=2)
    assert indices(share) == [0, 1, 2, 3]
    assert [indices(share.of_process(number, 2)) for number in range(2)] == [[0, 2], [1, 3]]


def test_too_large_part_is_halved_down_to_one(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_shortage, "MAX_CONCURRENT", 4)
    world = World()
    sizes = []
    for _ in range(3):
        share = world.share(batch())
        sizes.append(len(share.batch.requests))
        world.drought.take([], 1.0, training=True)
        world.drought.halve_share()
    assert sizes == [4, 2, 1]
    world.gateway.there = True
    world.drought.complete(batch())
    assert world.gateway.asked[-1] == (list(range(6)), 2 * AFTER_S), "nodes are waited for"


def fail(world: World, asked: Batch) -> None:
    """Have the trainer's model fail at a share."""
    world.share(asked)
    world.drought.take([], 1.0, training=True)
    world.drought.record_failure("the model says no")


def test_failed_generation_is_tried_later_and_at_the_next_step(world: World) -> None:
    for _ in range(3):
        fail(world, batch())
    world.gateway.there = True
    world.drought.complete(batch())
    world.gateway.there = False
    world.take(world.share(batch(first_seed=200)))
    patience_s = [AFTER_S, 2 * AFTER_S, 4 * AFTER_S, None, AFTER_S]
    assert [asked_s for _, asked_s in world.gateway.asked] == patience_s


def test_completions_that_were_made_forgive_earlier_failures(world: World) -> None:
    for _ in range(2):
        fail(world, batch())
    world.take(world.share(batch()))
    fail(world, batch())
    world.share(batch())
    assert world.gateway.asked[-1][1] == 2 * AFTER_S


def test_ending_trainer_begins_no_further_part(world: World) -> None:
    world.take(world.share(batch()))
    world.ends = InterruptedError("leave")
    with pytest.raises(InterruptedError):
        world.drought.complete(batch())
    assert len(world.gateway.asked) == 1


def test_evaluation_costs_no_step_anything(world: World) -> None:
    share = world.share(batch())
    world.drought.take([finished(one, TRAINER) for one in indices(share)], 4.0, training=False)
    costs: dict[str, Any] = world.costs.take()
    assert "orch/own_generate_s" not in costs
    assert world.costs.generated_s == 4.0


def test_batch_of_a_thread_is_made_here_once_no_node_serves(world: World) -> None:
    asked = batch(count=3)
    world.gateway.made, world.gateway.cut = [0], [begun(1, 4)]
    with pytest.raises(NoNodeServing) as nobody:
        world.drought.complete_in_background(asked, lambda _: None, lambda _: None)
    world.drought.resume(asked, nobody.value)
    share = world.share(asked)
    assert (indices(share), share.begun) == ([1, 2], [begun(1, 4)])
    world.take(share)
    assert [one.node for one in world.drought.complete(asked).completions] == [NODE, TRAINER, TRAINER]
    assert world.gateway.asked == [([0, 1, 2], AFTER_S), ([1, 2], 0.0)]
    world.gateway.there = True
    world.drought.complete_in_background(batch(first_seed=200), lambda _: None, lambda _: None)
    world.drought.complete_in_background(batch(first_seed=300), lambda _: None, lambda _: None)
    assert [patience_s for _, patience_s in world.gateway.asked[2:]] == [0.0, AFTER_S]
