"""Calls that are begun ahead: taken when their turn comes, stored before, and never waited for in vain."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from grpo_orch.checkpoint.records import rollouts
from grpo_orch.checkpoint.store import layout
from grpo_orch.checkpoint.store.errors import StoreUnavailable
from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.policies.model.vocabulary import PolicyVersion
from grpo_orch.policies.serving.wire import PolicyRef
from grpo_orch.tasks.completions.gateway_client import GenerationFailed
from grpo_orch.tasks.completions.rollout_source import Call, RolloutSource
from grpo_orch.tasks.machine.leaving import LeaveNow
from tests.budget import until
from tests.node.trainer.test_client import BY, SAMPLING, World

NOW, NEXT = PolicyVersion(0, 3), PolicyVersion(0, 4)
PROMPTS = [[5, 6], [7, 8]]


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    world.gateway.members = 1  # a thread that still waits ends here, and does not log into another test
    world.gateway.close()


def ref(version: PolicyVersion) -> PolicyRef:
    return PolicyRef(str(version), layout.policy(version, (0, 1, 1)))


def no_policy(version: PolicyVersion) -> PolicyRef:
    raise AssertionError(f"{version} was published")


def ahead(prompts: list[list[int]] = PROMPTS) -> Call:
    """The next step's call, of the present policy."""
    return Call(NEXT, 0, NOW, prompts, 2, SAMPLING)


def take(source: RolloutSource, prompts: list[list[int]] = PROMPTS) -> rollouts.Rollout:
    return source.complete(NEXT, prompts, 2, SAMPLING, training=True, policies=no_policy, policy=NOW)


def test_begun_call_is_stored_before_use_and_not_repeated(world: World) -> None:
    world.gateway.open()
    source = world.source()
    source.begin([ahead()], ref)
    source.begin([ahead()], no_policy)
    until("its record", lambda: rollouts.read_rollout(world.store, layout.rollout(NEXT, 0, BY)))
    got = take(source)
    assert len(world.gateway.asked) == len(got.completions) == 4
    assert {one.policy for one in got.completions} == {"0-3"}
    assert (got.at, got.policy) == ("0-4", "0-3")
    world.gateway.close()
    restarted = world.source((0, 1, 2))
    restarted.begin([ahead()], no_policy)
    assert take(restarted) == got
    assert world.costs.take()["orch/replayed"] == 0  # one of the two was not


def test_unforeseen_call_is_made_when_it_comes(world: World) -> None:
    world.gateway.open()
    source = world.source()
    source.begin([ahead([[1, 2]])], ref)
    got = source.complete(NEXT, PROMPTS, 2, SAMPLING, training=True, policies=ref, policy=NOW)
    world.gateway.close()
    assert [one.index for one in got.completions] == [0, 1, 2, 3]
    assert world.gateway.prompts["0-3"] >= {tuple(prompt) for prompt in PROMPTS}
    assert rollouts.read_rollout(world.store, layout.rollout(NEXT, 0, BY)) == got


def test_error_of_a_begun_call_is_raised_where_it_is_taken(world: World) -> None:
    """Whichever thread or queue it was in: nothing is waited for that cannot come."""
    world.gateway.open()
    source = world.source(token="wrong")
    source.begin([ahead()], ref)
    with pytest.raises(GenerationFailed, match="401"):
        take(source)
    world.gateway.close()


def test_store_failure_in_background_is_the_steps_error(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise StoreUnavailable("no bucket")

    world.gateway.open()
    source = world.source()
    monkeypatch.setattr(rollouts, "write_rollout", fails)
    source.begin([ahead()], ref)
    with pytest.raises(StoreUnavailable, match="no bucket"):
        take(source)
    world.gateway.close()


def test_leaving_trainer_does_not_wait_for_a_begun_call(world: World) -> None:
    def leave() -> None:
        raise LeaveNow

    world.gateway.members = 0
    world.gateway.open()
    source = world.source(check_stop=leave)
    source.begin([ahead()], ref)
    with pytest.raises(LeaveNow):
        take(source)
    world.gateway.close()


def test_refused_prompt_is_judged_before_it_is_stored(world: World) -> None:
    """What ends the run is asked for anew: a record would end it again after the user has mended its cause."""
    world.gateway.refuses = lambda prompt: prompt == PROMPTS[1]
    world.gateway.open()
    source = world.source()
    source.begin([ahead()], ref)
    got = take(source)
    world.gateway.close()
    assert [bool(one.refused) for one in got.completions] == [False, False, True, True]
    assert rollouts.read_rollout(Store(world.store.url), layout.rollout(NEXT, 0, BY)) == got


def test_time_without_serving_node_counts_while_trainer_works(world: World) -> None:
    world.gateway.members = 0
    world.gateway.open()
    source = world.source()
    source.begin([ahead()], ref)
    until("a request", lambda: world.gateway.batches)  # the time counts from its first answer on
    time.sleep(1.5)  # the trainer is at work on an earlier step
    world.gateway.members = 1
    until("its record", lambda: rollouts.read_rollout(world.store, layout.rollout(NEXT, 0, BY)))
    take(source)
    found = world.costs.take()
    assert found["orch/unserved_s"] >= 0.3
    assert (found["orch/wait_s"], found["orch/staleness"]) == (0, 1)


def test_nothing_is_replayed_behind_a_remade_turn(world: World) -> None:
    """A tool answers otherwise than before: the weights behind that step are not those of the records."""
    behind = PolicyVersion(0, 5)

    def complete(source: RolloutSource, at: PolicyVersion, number: int, policy: PolicyVersion) -> int:
        before = len(world.gateway.asked)
        source.complete(at, PROMPTS, 2, SAMPLING, training=True, policies=ref, policy=policy, number=number)
        return len(world.gateway.asked) - before

    world.gateway.open()
    assert complete(world.source(), behind, 0, NEXT) == 4
    source = world.source((0, 1, 2))
    source.begin([ahead()], ref)
    take(source)
    assert complete(source, NOW, 1, NOW) == 4
    assert complete(source, behind, 0, NEXT) == 4
    world.gateway.close()
