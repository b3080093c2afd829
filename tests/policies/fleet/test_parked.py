"""A parked run is stopped, resumed, rolled back and taken over as any other, and costs nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from grpo_orch.policies.control.lifecycle import DOWN
from grpo_orch.policies.fleet.plan import IDLE_MIN_S
from grpo_orch.policies.model import exit_codes
from grpo_orch.policies.model.events import TimelineForked
from grpo_orch.policies.model.vocabulary import PolicyVersion, Role, RunPhase
from grpo_orch.policies.tick.snapshot import Command, Trainer
from tests.stand_ins.world import HOUR_S, capped, drought, parked, priced


def test_a_parked_run_is_stopped_and_resumed_as_any_other() -> None:
    world = parked()
    world.commands.append(Command("c1", DOWN))
    world.until(RunPhase.STOPPED)
    assert world.machines == {}
    world.resume()
    world.refusing_rollouts = False
    world.until(RunPhase.TRAINING)
    world.wait(60.0)
    assert world.steps > world.checkpoints[0].step


def test_take_over_of_parked_run_keeps_it_parked_and_resumes() -> None:
    world = parked()
    world.take_over()
    world.wait(600.0)
    assert (world.state.phase, world.machines) == (RunPhase.PARKED, {})
    world.refusing_rollouts = False
    world.until(RunPhase.TRAINING)


@pytest.mark.parametrize("storing_s", [1.0, 60.0])
def test_a_rollback_by_hand_of_a_parked_run_waits_for_a_node(storing_s: float) -> None:
    world = drought(storing_s=storing_s)
    world.checkpoints = [PolicyVersion(0, 10)]
    world.until(RunPhase.PARKED)
    world.commands.append(Command("c1", "rollback", "0-10"))
    world.wait(HOUR_S)
    world.stops_at_s = None  # of the old trainer, which met the new timeline before
    assert (world.state.phase, world.machines) == (RunPhase.PARKED, {})
    assert len(world.of(TimelineForked)) == 1
    world.refusing_rollouts = False
    world.until(RunPhase.TRAINING)
    world.wait(60.0)
    assert world.beat is not None
    assert world.beat.timeline == 1
    assert 10 < world.beat.step < 100


def test_divergence_in_last_rows_is_answered_while_parked() -> None:
    world = drought()
    world.checkpoints = [PolicyVersion(0, 10)]
    world.until(RunPhase.PARKED)
    world.trips[0] = (int(world.steps), int(world.steps) - 1)
    world.wait(HOUR_S)
    assert len(world.of(TimelineForked)) == 1
    assert (world.state.phase, world.machines) == (RunPhase.PARKED, {})
    world.refusing_rollouts = False
    world.until(RunPhase.TRAINING)
    world.wait(30.0)
    assert world.beat is not None
    assert world.beat.timeline == 1


def test_no_run_parks_in_the_middle_of_a_rollback() -> None:
    world = drought()
    world.checkpoints = [PolicyVersion(0, 10)]
    act = world.act
    world.act = lambda action: None if type(action).__name__ == "WriteFork" else act(action)  # type: ignore[method-assign]
    world.commands.append(Command("c1", "rollback", "0-10"))
    world.wait(HOUR_S)
    assert RunPhase.PARKED not in world.moves
    world.act = act  # type: ignore[method-assign]
    world.until(RunPhase.PARKED)


def test_a_stale_heartbeat_of_the_drained_trainer_starts_nothing() -> None:
    world = parked()
    stale = world.beat
    assert isinstance(stale, Trainer)
    world.boot_s[Role.TRAINER] = 300.0
    world.refusing_rollouts = False
    world.until(RunPhase.STARTING)
    world.wait(200.0)
    world.beat = replace(stale, beat_at_s=world.now_s)
    world.tick()
    assert world.is_at(RunPhase.STARTING)
    world.until(RunPhase.TRAINING)


def test_run_at_its_last_step_finishes_instead_of_parking() -> None:
    world = drought(storing_s=600.0)
    world.until(RunPhase.PARKED)
    assert world.beat is not None
    world.beat = replace(world.beat, step=world.beat.max_steps, activity="done")
    [node] = world.up(Role.TRAINER)
    world.exit(node, exit_codes.OK)
    world.run()
    assert world.is_at(RunPhase.FINISHED)


def test_parked_a_run_costs_nothing_and_its_cap_holds() -> None:
    world = priced(capped(30.0), max_steps=10**9)
    world.wait(200.0, 1.0)
    world.refusing_rollouts = True
    for node in world.up(Role.ROLLOUT):
        world.lose(node)
    world.wait(1000.0, 5.0)
    assert world.is_at(RunPhase.PARKED)
    spent = world.spent
    world.wait(10000.0, 20.0)
    assert world.spent - spent < 0.05  # what its probe would cost, if it came
    assert f"{36.0 * IDLE_MIN_S / 3600:.2f} USD" in world.state.reason


def test_controller_death_in_any_parking_tick_changes_nothing() -> None:
    whole = drought(storing_s=20.0)
    first = len(whole.history)
    whole.until(RunPhase.PARKED)
    whole.refusing_rollouts = False
    whole.until(RunPhase.TRAINING)
    ticks = 0
    for at in range(first, len(whole.history)):
        world = drought(storing_s=20.0)
        end_s = world.now_s + 2 * HOUR_S
        while world.state.phase is not RunPhase.PARKED or world.machines:
            assert world.now_s < end_s
            world.tick(journal_only=len(world.history) == at)
            if len(world.history) == at + 1:
                world.take_over()
            world.advance(5.0)
            ticks += 1
        world.refusing_rollouts = False
        world.until(RunPhase.TRAINING)
        assert len(world.up(Role.TRAINER)) == 1
    assert ticks > 100
