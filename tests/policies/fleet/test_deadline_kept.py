"""The deadline as the controller keeps it: more nodes, on demand without the wait, within budget; told once."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import UTC, datetime

from grpo_orch.policies.costs.steps import StepShape
from grpo_orch.policies.fleet.deadline import deadline_progress
from grpo_orch.policies.fleet.objective import rollouts_wanted
from grpo_orch.policies.model.events import BudgetReached, BudgetRefused, DeadlineMissed, FleetSized, NodeRequested
from grpo_orch.policies.model.fold import fold
from grpo_orch.policies.model.reports import DEADLINE
from grpo_orch.policies.model.spec import Budget, FleetPolicy, PoliciesSpec, RunSpec
from grpo_orch.policies.model.state import RunState
from grpo_orch.policies.model.vocabulary import Market, Role, RunPhase
from grpo_orch.policies.tick.snapshot import Snapshot
from tests.stand_ins.world import ON_DEMAND, World, fallback_nodes, on_two_markets, spec

SHAPE = StepShape(60.0, 60.0)  # 2 nodes on spot are cheapest; with 6, a step takes 70 s
STEPS = 1000


@dataclass
class Dated(World):
    """A run of a thousand steps that is as far as a test says."""

    at_step: int = 0
    activity: str = "training"

    def snapshot(self) -> Snapshot:
        looked = super().snapshot()
        beat = looked.trainer
        if beat is None or beat.activity in ("starting", "restoring"):
            return looked
        return replace(looked, trainer=replace(beat, step=self.at_step, max_steps=STEPS, activity=self.activity))


def dated(run: RunSpec, **world: object) -> Dated:
    return Dated(run, **on_two_markets(**{"no_spot": False, "shape": SHAPE, **world}))


def due(hours: float, replicas: int = 6, **others: object) -> RunSpec:
    """A run whose deadline is so many hours after the world's beginning."""
    at = datetime.fromtimestamp(1000.0 + hours * 3600, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    run = replace(spec(replicas), policies=PoliciesSpec(fleet=FleetPolicy(deadline=at)))
    return replace(run, **others)  # type: ignore[arg-type]  # RunSpec's own keys


def sized(world: Dated) -> list[int]:
    return [event.nodes for event in world.of(FleetSized)]


def test_there_are_as_many_nodes_as_the_time_left_takes() -> None:
    free, bound = dated(spec(6)), dated(due(24.0))  # 86 s a step: 2.3 nodes
    for world in (free, bound):
        world.let_pass(0.5)
    assert sized(free) == [2]
    assert sized(bound) == [4]  # of six so many stay as leave a tenth over
    assert "4 nodes meet the deadline: 1000 steps remain, with " in bound.of(FleetSized)[0].reason
    bound.at_step = 40
    bound.let_pass(4.0)  # 40 steps in 4.5 h: 73 s each of the others, 4.6 nodes
    assert (sized(bound)[-1], rollouts_wanted(bound.state, bound.spec)) == (5, 5)
    assert len(bound.up(Role.ROLLOUT)) == 5
    bound.at_step = 400  # 111 s each: what is cheapest is enough
    bound.let_pass(1.0)
    assert rollouts_wanted(bound.state, bound.spec) == 2


def test_late_run_without_spot_buys_on_demand_after_a_minute() -> None:
    ahead, behind = (dated(due(24.0), no_spot=True) for _ in range(2))
    ahead.at_step = 100
    for world in (ahead, behind):
        world.let_pass(0.05)
    assert ahead.stood_in == []
    assert len(behind.stood_in) == 3
    ahead.let_pass(1.0)
    assert len(ahead.stood_in) == 2  # which suffice, once the wait was as dear as they are


def test_fallback_stays_until_ahead_and_goes_when_spot_holds() -> None:
    world = dated(due(24.0), no_spot=True)
    world.let_pass(0.5)
    world.no_spot = False
    world.let_pass(1.5)
    assert len(fallback_nodes(world.state)) == 3
    world.at_step = 200
    world.let_pass(1.0)
    assert fallback_nodes(world.state) == []


def test_budget_comes_first_and_its_limit_is_reported_once() -> None:
    world = dated(due(24.0, budget=Budget(usd_per_h=10.0)), no_spot=True)  # a trainer at 4, one node at 5
    world.let_pass(2.0)
    (told,) = (one for one in world.of(BudgetRefused) if one.role == ON_DEMAND)
    assert "although the deadline needs it" in told.reason
    assert len(fallback_nodes(world.state)) == 1
    assert world.of(BudgetReached) == []
    assert world.state.phase is RunPhase.TRAINING


def test_unreachable_deadline_is_reported_once_without_buying() -> None:
    world = dated(due(15.0))  # 54 s a step
    world.let_pass(1.0)
    (told,) = world.of(DeadlineMissed)
    assert isinstance(told, DeadlineMissed)
    assert (told.nodes, told.step_s, told.step, told.steps) == (6, 70.0, 0, STEPS)
    assert told.expected_end_s is not None
    assert told.expected_end_s > told.deadline_s + 3600
    assert rollouts_wanted(world.state, world.spec) == 2
    assert DEADLINE in fold(world.history).reports
    world.take_over()
    world.let_pass(1.0)
    assert len(world.of(DeadlineMissed)) == 1


def test_passed_deadline_is_reported_without_measurements() -> None:
    world = dated(due(0.5), shape=None)
    world.let_pass(1.0)
    assert [event.expected_end_s for event in world.of(DeadlineMissed)] == [None]


def test_a_trainer_that_restores_is_at_no_step_and_buys_nothing() -> None:
    world = dated(due(24.0), at_step=500)
    world.let_pass(2.0)
    before, size = len(world.of(NodeRequested)), rollouts_wanted(world.state, world.spec)
    world.at_step, world.activity, world.no_spot = 0, "restoring", True
    for node in world.up(Role.ROLLOUT)[:1]:
        world.lose(node)
    world.let_pass(0.05)
    assert rollouts_wanted(world.state, world.spec) == size
    assert all(one.market is Market.SPOT for one in world.of(NodeRequested)[before:])


def test_schedule_begins_with_training_and_needs_a_total() -> None:
    world = dated(due(24.0))
    world.let_pass(0.5)
    beat = world.snapshot().trainer
    assert beat is not None
    course = deadline_progress(world.state, world.spec, beat, world.now_s)
    assert course is not None
    assert 1000.0 <= course.started_s < 1100.0
    assert (course.deadline_s, course.steps) == (1000.0 + 24 * 3600, STEPS)
    assert deadline_progress(world.state, world.spec, replace(beat, max_steps=0), world.now_s) is None
    assert deadline_progress(world.state, world.spec, replace(beat, step=STEPS), world.now_s) is None
    assert deadline_progress(world.state, spec(6), beat, world.now_s) is None
    assert deadline_progress(RunState(), world.spec, beat, world.now_s) is None
