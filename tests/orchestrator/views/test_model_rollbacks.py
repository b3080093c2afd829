"""What is seen of a run that diverges and is rolled back."""

from __future__ import annotations

from pathlib import Path

from orchestrator.views.model import HealthView, to_json
from policies.detect.divergence import Health
from policies.model.events import (
    DivergenceCleared,
    Event,
    FleetMoved,
    ProbationPassed,
    TimelineForked,
    TimelineResumed,
    TrainerFenced,
)
from policies.model.timelines import Fork
from policies.model.vocabulary import RollbackStage
from tests.generators.views_world import EVIDENCE, FIRST_FORK, T0, World, diverging, look


def test_the_limit_is_above_the_run_s_own_start() -> None:
    world = World(kl_limit=0.5)
    for step, kl in enumerate((3.0, 3.5, 90.0), start=1):
        assert look(world, step).kl_limit is None
        world.logs(step, step, kl=kl)
    assert look(world, 4).kl_limit == 4.0
    assert look(World(kl_limit=None), 1).kl_limit is None


def test_what_the_detectors_say_is_seen() -> None:
    assert look(World(), 1).health == HealthView()
    world = diverging()
    assert look(world, 40).health == HealthView(Health.WATCH, 9, 7, EVIDENCE[:1])
    world.happens(41, DivergenceCleared(0, 10))
    assert look(world, 41).health == HealthView()
    world.diverges(42, onset_step=7, step=10)
    health = to_json(look(world, 42))["health"]
    assert health == {"health": "tripped", "step": 10, "onset_step": 7, "evidence": EVIDENCE}


def test_a_rollback_is_seen_at_each_of_its_stages(tmp_path: Path) -> None:
    world = diverging()
    world.saves(32, 5, tmp_path)
    world.saves(42, 10, tmp_path)
    world.beats(41, 10)
    world.diverges(42, onset_step=7, step=10)
    world.begins_rollback(43, FIRST_FORK, 10)
    view = look(world, 44)
    assert view.rollback is not None
    assert (view.rollback.stage, view.rollback.since_s) == (RollbackStage.BEGUN, T0 + 43)
    assert (view.timeline, view.step, view.kl, view.rollbacks) == (0, 10, 3.0, 1)

    stages: list[tuple[RollbackStage, str]] = []
    events: tuple[Event, ...] = (TimelineForked(1), TrainerFenced(1), TimelineResumed(1, 5), FleetMoved(1, "1-5"))
    for at_s, event in enumerate(events, start=45):
        world.happens(at_s, event)
        view = look(world, at_s)
        assert view.rollback is not None
        stages.append((view.rollback.stage, view.rollback.text))
        assert view.rollback.since_s == T0 + at_s
        assert view.health == HealthView(), "that was the old timeline's"
        # The old trainer's last word is no longer the run's.
        assert (view.timeline, view.step, view.max_steps, view.activity, view.kl) == (1, 5, 40, None, 0.05)
        assert view.eta_s == 35 * 2.0
        assert view.nodes[0].policy is None
        assert view.checkpoint is not None
        assert view.checkpoint.version == "0-5", "0-10 is abandoned"
    assert stages == [
        (RollbackStage.FORKED, "waits for the old trainer to end"),
        (RollbackStage.FENCED, "waits for its trainer"),
        (RollbackStage.RESUMED, "is trained, and waits for the fleet"),
        (RollbackStage.PROBATION, "is on probation until step 15"),
    ]
    assert to_json(view)["rollback"] == {
        "timeline": 1,
        "cause": "diverged",
        "reason": FIRST_FORK.reason,
        "from_step": 10,
        "start": "0-5",
        "stage": "probation",
        "since_s": T0 + 48,
        "probation_until_step": 15,
        "text": "is on probation until step 15",
    }
    world.logs(50, 6, timeline=1, reward=0.9, kl=0.06)
    world.beats(50, 6, timeline=1)
    view = look(world, 51)
    assert (view.step, view.activity, view.reward, view.kl) == (6, "generating", 0.9, 0.06)
    assert [point.step for point in view.recent] == [1, 2, 3, 4, 5, 6]
    assert view.nodes[0].policy == "1-6"
    world.happens(60, ProbationPassed(1, 16))
    view = look(world, 61)
    assert (view.rollback, view.rollbacks, view.timeline) == (None, 1, 1)


def test_a_run_that_began_anew_has_a_line_of_its_own() -> None:
    world = diverging()
    world.rolls_back(45, Fork(1, None), 10)
    view = look(world, 50)
    assert (view.step, view.reward, view.recent, view.checkpoint, view.kl_limit) == (0, None, (), None, None)
