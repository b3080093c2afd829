"""A rollback as stories in the simulated world, and cut off between any two of its stages."""

from __future__ import annotations

from dataclasses import replace

import pytest

from grpo_orch.policies.control.decide import decide
from grpo_orch.policies.detect.pitfalls import Pitfall
from grpo_orch.policies.model.events import (
    Diverged,
    DivergenceCleared,
    DivergenceSuspected,
    Event,
    FleetMoved,
    PitfallFound,
    ProbationPassed,
    RollbackStarted,
    TimelineForked,
    TimelineResumed,
    TrainerFenced,
)
from grpo_orch.policies.model.timelines import Skipped
from grpo_orch.policies.model.vocabulary import Role, RunPhase
from grpo_orch.policies.tick.snapshot import ControllerVerdict, Launch, WriteFork
from tests.stand_ins.world import world_of

STAGES: list[type[Event]] = [
    RollbackStarted,
    TimelineForked,
    TrainerFenced,
    TimelineResumed,
    FleetMoved,
    ProbationPassed,
]


def test_diverging_run_returns_before_onset_and_finishes() -> None:
    world = world_of({0: (13, 9)})
    world.run()
    assert world.state.phase is RunPhase.FINISHED
    (one,) = world.begun
    assert one.fork.start == "0-8"  # 10 and 12 are newer, and not from before step 9
    assert one.fork.timeline == 1
    assert one.fork.changes == {"beta": 0.08, "learning_rate": 5e-4}
    assert one.fork.skipped == (Skipped(0, 9, 13),)
    assert [type(event) for event in world.of(*STAGES)] == STAGES
    assert world.beat is not None
    assert (world.beat.timeline, world.beat.step) == (1, 40)


def test_watch_and_trip_are_journalled() -> None:
    world = world_of({0: (13, 9)})
    world.until(lambda w: bool(w.begun))
    watched, diverged = world.of(DivergenceSuspected, Diverged)
    assert watched == DivergenceSuspected(0, 9, 9, ("KL 9",))
    assert diverged == Diverged(0, 13, 9, ("KL 9",), "trainer")


def test_passed_watch_is_journalled() -> None:
    world = world_of({0: (10**6, 9)})
    world.until(lambda w: w.state.suspected is not None)
    world.trips = {}
    world.until(lambda w: w.state.suspected is None)
    assert len(world.of(DivergenceCleared)) == 1
    world.run()
    assert not world.begun


def test_unaware_trainer_is_stopped_by_the_controller() -> None:
    world = world_of({0: (13, 9)})
    world.guarded = False
    world.run()
    assert world.state.phase is RunPhase.FINISHED
    (diverged,) = world.of(Diverged)
    assert isinstance(diverged, Diverged)
    assert diverged.seen_by == "controller"
    assert world.begun[0].fork.start == "0-8"


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("act", [True, False], ids=["acted", "not-acted"])
def test_controller_dying_at_any_stage_is_continued(stage: type[Event], act: bool) -> None:
    world = world_of({0: (13, 9)})
    while not world.of(stage):
        if world.tick(journal_only=not act and bool(world.decides(stage))):
            break
        world.advance()
    world.take_over()
    world.run()
    assert world.state.phase is RunPhase.FINISHED
    assert [type(event) for event in world.of(*STAGES)] == STAGES
    assert [fork.timeline for fork in world.forks] == [1]
    assert world.timelines["trainer-0-i1", 2] == 1
    assert world.beat is not None
    assert (world.beat.timeline, world.beat.step) == (1, 40)


@pytest.mark.parametrize("stage", STAGES[:-1])
@pytest.mark.parametrize("who", [Role.TRAINER, Role.ROLLOUT])
def test_machine_lost_at_any_stage_does_not_change_the_end(stage: type[Event], who: Role) -> None:
    world = world_of({0: (13, 9)})
    world.until(lambda w: bool(w.of(stage)))
    for name in world.up(who):
        world.lose(name)
    world.run()
    assert world.state.phase is RunPhase.FINISHED
    assert len(world.begun) == 1
    assert world.beat is not None
    assert (world.beat.timeline, world.beat.step) == (1, 40)


def test_fork_is_stored_before_a_trainer_starts_on_it() -> None:
    world = world_of({0: (13, 9)})
    world.until(lambda w: w.decides(RollbackStarted))
    decision = decide(world.state, world.snapshot(), world.spec)
    assert [action for action in decision.actions if isinstance(action, WriteFork)]
    assert not [action for action in decision.actions if isinstance(action, Launch)]
    world.until(lambda w: bool(w.of(TimelineForked)))
    assert [fork.timeline for fork in world.forks] == [1]
    assert ("trainer-0-i1", 2) not in world.launches


def test_a_pitfall_is_journalled_once() -> None:
    world = world_of({})
    world.until(lambda w: w.steps >= 3)
    found = Pitfall("no_signal", 3, "every group has one reward")
    for step in (3, 3, 2, 4):
        snapshot = world.snapshot()
        assert snapshot.verdict is not None
        watched = ControllerVerdict(0, snapshot.verdict.verdict, (replace(found, step=step),))
        decision = decide(world.state, replace(snapshot, verdict=watched), world.spec)
        world.journal(decision.events)
    assert [event.step for event in world.of(PitfallFound) if isinstance(event, PitfallFound)] == [3, 4]
