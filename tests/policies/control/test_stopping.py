"""`down`: what goes at once, what is waited for, and how long."""

from __future__ import annotations

from dataclasses import replace

import pytest

from grpo_orch.policies.control.decide import decide
from grpo_orch.policies.fleet.budget import STOP_WAIT_S
from grpo_orch.policies.model.events import MachineBought, RunMoved
from grpo_orch.policies.model.spec import Budget
from grpo_orch.policies.model.vocabulary import Market, PolicyVersion, Role, RunPhase
from grpo_orch.policies.tick.snapshot import Command, RequestStop
from tests.stand_ins.world import World, until_training


def test_down_stops_everything_and_is_taken_once() -> None:
    world = until_training(World())
    world.commands.append(Command("c1", "down"))
    world.run()
    assert world.state.phase is RunPhase.STOPPED
    assert world.machines == {}
    moves = world.of(RunMoved)
    assert [e.phase for e in moves] == [RunPhase.TRAINING, RunPhase.STOPPING, RunPhase.STOPPED]


def test_down_gives_the_trainer_time_to_store() -> None:
    """The rollout nodes go at once, and the trainer as soon as it has ended: not before, and not much later."""
    world = until_training(World(storing_s=40.0))
    world.commands.append(Command("c1", "down"))
    world.tick()
    assert world.up(Role.ROLLOUT) == []
    asked_at_s, step = world.now_s, int(world.steps)
    while world.up(Role.TRAINER):
        world.advance()
        world.tick()
    assert 40.0 <= world.now_s - asked_at_s < 45.0
    assert world.checkpoints[-1] == PolicyVersion(0, step)
    world.run()
    assert (world.state.phase, world.state.failures.count) == (RunPhase.STOPPED, 0)


def test_down_does_not_wait_for_a_trainer_that_has_not_started() -> None:
    world = World(storing_s=10_000.0)
    while not world.machines:
        world.tick()
    world.tick()
    world.commands.append(Command("c1", "down"))
    world.tick()
    world.tick()
    assert world.machines == {}
    world.run()
    assert world.state.phase is RunPhase.STOPPED


def test_down_now_does_not_wait() -> None:
    world = until_training(World(storing_s=10_000.0))
    world.commands.append(Command("c1", "down"))
    world.tick()
    assert world.up(Role.TRAINER)
    world.commands = [Command("c2", "down_now")]
    world.tick()
    assert world.machines == {}
    world.run()
    assert world.state.phase is RunPhase.STOPPED


@pytest.mark.parametrize(
    ("budget", "stored_at_s"),
    [
        (Budget(), 3600.0),  # 459 GB at 128 MB/s
        (Budget(usd=100.0), 3600.0),
        (Budget(usd=10.0), None),  # for less than an hour, and the quarter of one that is kept for its end
    ],
)
def test_down_waits_for_progressing_checkpoint_within_budget(budget: Budget, stored_at_s: float | None) -> None:
    world = until_training(World(storing_s=3600.0))
    world.spec = replace(world.spec, budget=budget)
    world.journal((MachineBought("trainer-0-i1", Market.ON_DEMAND, "here", 8.0, 8.0),))
    world.commands.append(Command("c1", "down"))
    world.tick()
    began_s = world.now_s
    while world.machines:
        world.now_s += 30.0
        assert world.beat is not None
        world.beat = replace(world.beat, beat_at_s=world.now_s)
        if world.now_s - began_s < 3600.0:
            world.moved_at_s = world.now_s // 300.0 * 300.0
        elif stored_at_s is not None:
            world.advance(0.0)
        world.tick()
    took_s = world.now_s - began_s
    least_s, most_s = (2700.0, 3300.0) if stored_at_s is None else (stored_at_s, stored_at_s + 60.0)
    assert least_s <= took_s < most_s


def test_down_stops_waiting_for_a_stalled_checkpoint() -> None:
    world = until_training(World(storing_s=10_000.0))
    world.commands.append(Command("c1", "down"))
    world.tick()
    began_s = world.now_s
    while world.machines:
        world.now_s += 5.0
        assert world.beat is not None
        world.beat = replace(world.beat, beat_at_s=world.now_s)
        world.moved_at_s = min(world.now_s, began_s + 1200.0)
        world.tick()
    assert 1200.0 + STOP_WAIT_S <= world.now_s - began_s < 1200.0 + STOP_WAIT_S + 10.0


def test_trainer_is_asked_to_stop_until_it_is_leaving() -> None:
    world = until_training(World())
    asked = RequestStop("trainer-0-i1", 1)
    world.commands.append(Command("c1", "down"))
    assert asked in decide(world.state, world.snapshot(), world.spec).actions
    world.tick(journal_only=True)
    assert asked in decide(world.state, world.snapshot(), world.spec).actions, (
        "the controller died before it acted"
    )
    world.tick()
    world.advance()
    assert world.beat is not None
    assert world.beat.leaving
    assert asked not in decide(world.state, world.snapshot(), world.spec).actions
