"""Rollout nodes on demand that took the room under `budget.usd_per_h` which spot needs make place for it again."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import example, given, settings
from hypothesis import strategies as st

from policies.control.fleet.fill import STAYS_S
from policies.control.fleet.stand_ins import stand_ins_of
from policies.fleet.how_many import StepShape
from policies.model.events import BudgetRefused
from policies.model.spec import Budget, Replicas, RunSpec
from policies.model.vocabulary import RunPhase
from tests.budget import examples
from tests.stand_ins.world import HOUR_S, World, spec, two_markets

ONE = 9.0  # USD an hour: a trainer and one node on demand, at the most that it may cost


def capped(usd_per_h: float, low: int, high: int) -> RunSpec:
    run = replace(spec(high), budget=Budget(usd_per_h=usd_per_h))
    return replace(run, rollout=replace(run.rollout, replicas=Replicas(min=low, max=high)))


def until_spot_alone(world: World, within_s: float) -> None:
    ends_s = world.now_s + within_s
    while stand_ins_of(world.state) or not world.serving_on_spot:
        world.let_pass(20.0 / HOUR_S)
        assert world.now_s < ends_s, (world.state.live, world.state.kinds)


def test_a_day_without_spot_costs_next_to_nothing_for_asking() -> None:
    world = two_markets(capped(ONE, 1, 2))
    world.let_pass(1.0)
    bought, steps, told = len(world.stood_in), world.steps, len(world.of(BudgetRefused))
    world.let_pass(24.0)
    assert len(world.stood_in) - bought <= 24 * HOUR_S / STAYS_S
    assert world.steps - steps > 0.98 * 24 * HOUR_S
    assert len(world.of(BudgetRefused)) - told <= 1
    assert world.state.phase is RunPhase.TRAINING


def test_with_room_for_both_nothing_goes_back_before_spot_has_come() -> None:
    world = two_markets(capped(ONE + 2.0, 1, 1))
    world.let_pass(24.0)
    assert len(world.stood_in) == 1


@settings(max_examples=examples(10), deadline=None, derandomize=True)
@given(
    cap=st.sampled_from([9.0, 10.0, 13.0, 17.0, 18.0]),
    low=st.integers(0, 2),
    more=st.integers(1, 3),
    shape=st.sampled_from([None, StepShape(1.0, 100.0), StepShape(10.0, 60.0)]),
    away_h=st.floats(0.5, 12.0),
    again=st.booleans(),
)
@example(cap=ONE, low=1, more=1, shape=None, away_h=0.5, again=False)  # the only node goes back for it
@example(cap=10.0, low=2, more=3, shape=None, away_h=5.0, again=True)  # it was refused a moment ago, and now comes
def test_spot_that_comes_back_is_found_under_any_cap(
    cap: float, low: int, more: int, shape: StepShape | None, away_h: float, again: bool
) -> None:
    world = two_markets(capped(cap, low, low + more), shape=shape, no_spot=not again)
    world.let_pass(1.0)
    if again:
        world.no_spot = True
        for node in world.serving_on_spot:
            world.lose(node)
    world.let_pass(away_h)
    world.no_spot = False
    until_spot_alone(world, STAYS_S + 3 * HOUR_S)
    stood_in = len(world.stood_in)
    world.let_pass(2.0)
    assert len(world.stood_in) == stood_in
