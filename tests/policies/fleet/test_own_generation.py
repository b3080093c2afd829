"""A trainer that generates while no rollout node can be had: told, and gone on with only where that pays."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest

from grpo_orch.policies.costs.steps import StepShape
from grpo_orch.policies.fleet.plan import IDLE_MIN_S
from grpo_orch.policies.model.events import NodesGenerate, TrainerGenerates
from grpo_orch.policies.model.spec import FleetPolicy, RunSpec
from grpo_orch.policies.model.vocabulary import Market, Role, RunPhase
from grpo_orch.policies.tick.snapshot import OWN_GENERATION, Machine, Snapshot
from tests.stand_ins.world import HOUR_S, USD, World, on_two_markets, spec

SHAPE = StepShape(60.0, 120.0)
# Of a step alone, at 4 USD an hour for the trainer and 5 at most for a node on demand, of which one is best.
LIMIT_S = 405.0
PARKS_AFTER_S = IDLE_MIN_S + 90.0  # this world's trainer boots in seconds


@dataclass
class Alone(World):
    """Its trainer generates once no node is there, a step in `own_step_s`; infinite: it does not get on. The
    completions of `at_once` steps are made before the first of them ends."""

    own_step_s: float = 300.0
    own_after_s: float = 100.0
    alone_s: float = 0.0
    stepped_at_s: float = -math.inf
    own_steps: float = 0.0
    measured: bool = True
    at_once: int = 1
    seen: int = 0  # the step that the heartbeat says

    def snapshot(self) -> Snapshot:
        looked = super().snapshot()
        known = self.own_steps >= 2 * self.at_once - 1 and self.measured  # once the next generation is logged
        own = StepShape(SHAPE.fixed_s, self.own_step_s - SHAPE.fixed_s) if known else None
        return replace(looked, measured=replace(looked.measured, own_step=own), stepped_at_s=self.stepped_at_s)

    def _advance_trainer(self, trainer: Machine, dt_s: float) -> None:
        super()._advance_trainer(trainer, dt_s)
        assert self.beat is not None
        self.alone_s = self.alone_s + dt_s if self.beat.activity == "waiting" else 0.0
        if self.alone_s >= self.own_after_s:
            self.steps += dt_s / self.own_step_s
            self.own_steps += dt_s / self.own_step_s
            self.beat = replace(self.beat, activity=OWN_GENERATION)
        seen = int(self.steps) - int(self.own_steps) % self.at_once
        if seen != self.seen:
            self.seen, self.stepped_at_s = seen, self.now_s
        self.beat = replace(self.beat, step=seen)


def alone(run: RunSpec | None = None, **world: object) -> Alone:
    """A run that has trained with nodes, and has now lost them."""
    made = Alone(run or spec(2), **on_two_markets(**{"no_spot": False, "shape": SHAPE, **world}))
    made.let_pass(0.2, 5.0)
    assert made.steps > 60
    made.no_spot = True
    made.dry_up()
    return made


def until_parked(world: Alone, hours: float = 6.0) -> float:
    """Seconds until the run parks; infinite if it does not."""
    from_s = world.now_s
    while world.now_s - from_s < hours * HOUR_S:
        world.let_pass(0.002, 5.0)
        if world.state.phase is RunPhase.PARKED:
            return world.now_s - from_s
    return math.inf


def test_a_run_whose_own_steps_pay_does_not_park_and_its_diary_says_so() -> None:
    world = alone()
    steps = world.steps
    assert until_parked(world) == math.inf
    assert world.steps - steps == pytest.approx(6 * HOUR_S / world.own_step_s, abs=2)
    (told,) = world.of(TrainerGenerates)
    assert told.waited_s == pytest.approx(world.own_after_s, abs=30.0)
    world.no_spot = world.refusing_rollouts = False
    world.let_pass(0.2, 5.0)
    (ended,) = world.of(NodesGenerate)
    assert ended.lasted_s == pytest.approx(6 * HOUR_S, rel=0.05)
    assert ended.step > steps
    assert world.state.own_generation_since_s is None


def test_a_run_whose_own_steps_cost_more_than_with_nodes_on_demand_parks_once_that_is_measured() -> None:
    world = alone(own_step_s=LIMIT_S + 40.0)
    assert until_parked(world) <= world.own_after_s + world.own_step_s + PARKS_AFTER_S
    assert world.own_steps >= 1
    assert world.state.own_generation_since_s is None


def test_where_it_was_measured_before_it_parks_as_if_it_did_not_generate() -> None:
    world = alone(own_step_s=LIMIT_S + 40.0)
    world.own_steps = 1.0
    assert until_parked(world) <= PARKS_AFTER_S


def test_a_trainer_that_does_not_get_on_parks_after_its_wait_and_the_time_of_a_step() -> None:
    world = alone(own_step_s=math.inf, measured=False)
    parked_s = until_parked(world)
    assert LIMIT_S + IDLE_MIN_S < parked_s <= world.own_after_s + LIMIT_S + PARKS_AFTER_S


def test_where_nothing_is_measured_it_has_as_long_again_as_its_wait() -> None:
    world = alone(own_step_s=math.inf, measured=False, shape=None)
    parked_s = until_parked(world)
    assert 2 * IDLE_MIN_S <= parked_s <= world.own_after_s + 2 * PARKS_AFTER_S


@pytest.mark.parametrize(
    "grpo", [{"steps_per_generation": 8}, {"num_iterations": 8}, {"generation_batch_size": 64}], ids=str
)
def test_one_that_generates_for_several_steps_at_once_has_the_time_of_all_of_them(grpo: dict[str, int]) -> None:
    of_eight = replace(spec(2), grpo={**spec(2).grpo, "per_device_train_batch_size": 8, **grpo})
    assert until_parked(alone(of_eight, at_once=8)) == math.inf
    # But no more than that.
    assert until_parked(alone(of_eight, at_once=8, own_step_s=math.inf, measured=False)) < 2 * HOUR_S


def test_a_run_behind_its_deadline_takes_what_it_can_get() -> None:
    late = spec(2)
    late = replace(late, policies=replace(late.policies, fleet=FleetPolicy(deadline="1970-01-01T01:00:00Z")))
    world = alone(late, own_step_s=LIMIT_S + 40.0, max_steps=10**5)
    assert until_parked(world, hours=2.0) == math.inf


def test_a_trainer_of_unknown_price_goes_on_generating() -> None:
    paid = {**USD, (Role.TRAINER, Market.ON_DEMAND): 0.0}
    assert until_parked(alone(own_step_s=10 * LIMIT_S, paid=paid)) == math.inf


def test_a_trainer_that_does_not_generate_parks_as_ever() -> None:
    assert until_parked(alone(own_after_s=math.inf)) <= PARKS_AFTER_S
