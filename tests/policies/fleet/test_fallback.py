"""Rollout nodes on demand in place of spot, as the controller steers them: bought late, returned late.

They are those that make a step cheapest, after a wait no dearer than they are; and those that took the room under
`budget.usd_per_h` which spot needs make place for it again.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from grpo_orch.policies.costs.steps import StepShape
from grpo_orch.policies.fleet.plan import FALLBACK_MIN_S
from grpo_orch.policies.model import exit_codes
from grpo_orch.policies.model.breaker import SPOT_STABLE_S
from grpo_orch.policies.model.events import BudgetReached, BudgetRefused, NodeMoved, NodeRequested
from grpo_orch.policies.model.pools import Pool, PoolOffer
from grpo_orch.policies.model.spec import Budget, Replicas, RunSpec
from grpo_orch.policies.model.vocabulary import Market, NodePhase, Role, RunPhase, role_of
from grpo_orch.policies.tick.snapshot import Launch, Snapshot
from tests.budget import examples
from tests.stand_ins.world import (
    HOUR_S,
    ON_DEMAND,
    USD,
    World,
    capped,
    fallback_nodes,
    on_two_markets,
    spec,
    two_markets,
)


@pytest.mark.parametrize("failed", [1, 2])
def test_expensive_unproven_spot_yields_to_on_demand_in_budget(failed: int) -> None:
    run = replace(spec(1, boot_timeout_s=200.0), budget=Budget(usd_per_h=9.0))
    world = two_markets(run, no_spot=False, boot_s={Role.ROLLOUT: 10.0**9})
    assert world.most is not None
    while (kind := world.state.kinds.get("rollout on spot")) is None or kind.unserved_in_a_row < failed:
        world.let_pass(10.0 / 3600)
    world.most = {**world.most, "rollout on spot": 10.0}
    world.boot_s.clear()
    world.let_pass(1.0)
    assert world.of(BudgetReached) == []
    assert world.stood_in
    assert world.steps > 1000
    assert any("spot is too expensive" in event.reason for event in world.of(NodeRequested))


def test_run_continues_without_spot_and_returns_once_it_holds() -> None:
    world = two_markets(spec(2))
    world.let_pass(1.0)
    assert (
        len(fallback_nodes(world.state)) == len(world.stood_in) == 1
    )  # what the trainer needs, with nothing measured
    assert world.steps > 0.8 * 3600
    world.no_spot = False
    while not world.serving_on_spot:
        world.let_pass(10.0 / 3600)
    world.let_pass((SPOT_STABLE_S - 60.0) / 3600)
    assert len(fallback_nodes(world.state)) == 1
    world.let_pass(300.0 / 3600)
    assert fallback_nodes(world.state) == []
    assert all(world.markets[one] is Market.SPOT for one in world.up(Role.ROLLOUT))
    before = len(world.of(NodeRequested))
    world.let_pass(2.0)
    assert len(world.of(NodeRequested)) == before


def test_no_fallback_is_returned_during_an_outage() -> None:
    world = two_markets(spec(2))
    world.let_pass(1.0)
    world.no_spot = False
    while not world.serving_on_spot:
        world.let_pass(10.0 / 3600)
    world.away = True
    world.no_spot = True
    for node in world.serving_on_spot:
        world.lose(node)
    world.let_pass(2 * SPOT_STABLE_S / 3600)
    assert len(fallback_nodes(world.state)) == 1
    world.away = False
    world.let_pass(2 * SPOT_STABLE_S / 3600)
    assert world.serving_on_spot == []
    assert len(fallback_nodes(world.state)) == 1


@pytest.mark.parametrize(("low", "shape"), [(3, None), (1, StepShape(1.0, 100.0))])
def test_all_fallbacks_are_returned_even_if_max_is_cheapest(low: int, shape: StepShape | None) -> None:
    wanted = replace(spec(3), rollout=replace(spec(3).rollout, replicas=Replicas(min=low, max=3)))
    world = two_markets(wanted, shape=shape)
    world.let_pass(1.0)
    assert len(fallback_nodes(world.state)) == 3
    world.no_spot = False
    most, ends_s = 0, world.now_s + 2 * 3600.0
    while fallback_nodes(world.state):
        world.let_pass(20.0 / 3600)
        most = max(most, len(world.up(Role.ROLLOUT)))
        assert world.now_s < ends_s, world.up(Role.ROLLOUT)
    assert most == 4
    world.let_pass(0.5)
    assert len(world.serving_on_spot) == len(world.up(Role.ROLLOUT)) == 3


def test_flickering_spot_neither_returns_nor_buys() -> None:
    """A machine that lasts seven minutes, then none for five, for hours: one stands in all the while."""
    world = two_markets(spec(2))
    world.let_pass(0.5)
    for _ in range(10):
        world.no_spot = False
        world.let_pass(7 / 60)
        world.no_spot = True
        for node in world.up(Role.ROLLOUT):
            if world.markets[node] is Market.SPOT:
                world.lose(node)
        world.let_pass(5 / 60)
    assert len(world.stood_in) == 1
    assert len(fallback_nodes(world.state)) == 1


def test_a_refusal_of_a_moment_buys_nothing_on_demand() -> None:
    world = two_markets(spec(2))
    world.let_pass(50 / 3600, 10.0)
    assert any(event.phase is NodePhase.REFUSED for event in world.of(NodeMoved))
    world.no_spot = False
    world.let_pass(1.0)
    assert world.stood_in == []


def test_named_market_excludes_the_other() -> None:
    for resources in ({"use_spot": True}, {"any_of": [{"use_spot": True}]}):
        run = spec(2)
        world = two_markets(replace(run, rollout=replace(run.rollout, resources=resources)))
        world.let_pass(1.0)
        assert world.stood_in == []


def test_fallback_over_budget_is_reported_once_and_ends_nothing() -> None:
    world = two_markets(capped(usd_per_h=7.5, max_replicas=1))
    world.let_pass(1.0)
    assert [event.role for event in world.of(BudgetRefused)] == [ON_DEMAND]
    assert (world.of(BudgetReached), world.stood_in) == ([], [])
    world.no_spot = False
    world.let_pass(0.5)
    assert world.state.phase is RunPhase.TRAINING


def too_dear() -> World:
    """Beside a trainer at 4, a node on spot may cost 6 and one on demand 5, and there is money for 5.5."""
    world = two_markets(capped(usd_per_h=9.5, max_replicas=2), no_spot=False)
    assert world.most is not None
    world.most["rollout on spot"] = 6.0
    return world


def test_affordable_on_demand_is_bought_where_spot_is_too_dear() -> None:
    world = too_dear()
    world.let_pass(1.0)
    assert world.of(BudgetReached) == []
    assert (len(world.stood_in), world.serving_on_spot) == (1, [])
    assert world.steps > 0.9 * 3600
    world.lose(world.stood_in[0])
    world.let_pass(0.2)
    assert (len(world.stood_in), len(world.of(BudgetReached))) == (2, 0)
    assert world.most is not None
    world.most["rollout on spot"] = 1.0  # and then it is not
    world.let_pass(1.0)
    assert (fallback_nodes(world.state), len(world.serving_on_spot)) == ([], 2)


def test_where_neither_fits_the_budget_is_reached() -> None:
    world = too_dear()
    assert world.most is not None
    world.most[ON_DEMAND] = 6.0
    world.let_pass(0.2)
    assert world.state.phase is RunPhase.PAUSED


def test_run_parks_if_spot_is_too_dear_and_on_demand_unavailable() -> None:
    world = too_dear()
    world.refusing_rollouts = True
    world.let_pass(1.0, 5.0)
    assert (world.state.phase, world.of(BudgetReached)) == (RunPhase.PARKED, [])
    tries = [one for one in world.of(NodeRequested) if one.role is Role.ROLLOUT]
    assert len(tries) < 3600 / 15 + 5


def test_abandoned_fallback_has_a_successor_if_spot_is_too_dear() -> None:
    """Its price counts until it is gone, and no longer."""
    world = too_dear()
    world.let_pass(1.0)
    (node,) = world.stood_in
    while len(world.stood_in) == 1 and not world.of(BudgetReached):
        if node in world.machines and world.machines[node].exit_code is None:
            world.exit(node, exit_codes.FAILED)
        world.let_pass(2.0 / 3600, 2.0)
    world.let_pass(0.2)
    assert (world.state.phase, world.of(BudgetReached)) == (RunPhase.TRAINING, [])


@pytest.mark.parametrize("refused_after_s", [0.0, 30.0])
def test_pending_spot_request_does_not_block_on_demand(refused_after_s: float) -> None:
    """The cap has room for one of the two."""
    run = capped(usd_per_h=9.0, max_replicas=1)
    world = two_markets(
        run,
        no_spot=False,
        boot_s={Role.ROLLOUT: 900.0},
        refused_after_s=refused_after_s,
    )
    world.let_pass(0.5, 5.0)
    world.no_spot = True
    world.lose(world.up(Role.ROLLOUT)[0])
    world.let_pass(0.7, 2.0)
    assert (world.state.phase, len(world.stood_in)) == (RunPhase.TRAINING, 1)


def test_slowly_refusing_pools_do_not_block_on_demand() -> None:
    """The cap has room for one of the two, and one spot pool after the other is asked for a minute."""
    spot = [Pool("aws", "r", f"z{zone}", "m", "A:1", Market.SPOT) for zone in range(12)]
    pools = {kind: [Pool("aws", "r", "z0", "m", "A:1", kind[1])] for kind in USD}
    pools[Role.ROLLOUT, Market.SPOT] = spot
    offers = tuple(PoolOffer(kind[0], pool, USD[kind]) for kind, found in pools.items() for pool in found)
    world = two_markets(capped(usd_per_h=8.5, max_replicas=1), offers=offers, refused_after_s=60.0)
    world.let_pass(0.3, 5.0)
    assert len(world.stood_in) == 1


def test_parked_run_with_spot_too_dear_waits_for_on_demand() -> None:
    world = two_markets(capped(usd_per_h=10.5, max_replicas=2), no_spot=False)
    assert world.most is not None
    world.most["rollout on spot"] = 11.0
    world.let_pass(1.0)
    world.no_demand = True
    world.lose(world.stood_in[0])
    world.let_pass(1.0, 5.0)
    assert (world.state.phase, world.of(BudgetReached)) == (RunPhase.PARKED, [])
    world.no_demand = False
    world.let_pass(1.0, 5.0)
    assert world.state.phase is RunPhase.TRAINING


def test_unpriced_machine_is_priced_once_possible() -> None:
    """At the first look that finds the trainer's machine its cloud tells neither price nor pool."""
    pools = {kind: Pool("aws", "r", "z", "m", "A:1", kind[1]) for kind in USD}
    priceless: list[str] = []

    def sees(seen: Snapshot) -> Snapshot:
        assert seen.machines is not None
        there = {}
        for name, one in seen.machines.items():
            role = role_of(name)
            there[name] = replace(one, pool=pools[role, world.markets[name]])
            if role is Role.TRAINER and not priceless:
                priceless.append(name)
                there[name] = replace(one, price_usd_per_h=0.0, on_demand_usd_per_h=0.0, pool=None)
        offers = tuple(PoolOffer(kind[0], pool, USD[kind]) for kind, pool in pools.items())
        return replace(seen, machines=there, pools=offers)

    world = two_markets(spec(2), sees=sees)
    world.let_pass(1.0)
    (trainer,) = world.state.live(Role.TRAINER)
    assert (trainer.id, trainer.price_usd_per_h) == ("trainer-0-i1", 4.0)
    assert len(world.stood_in) == 1


def test_budget_allows_no_fallback_of_unknown_price() -> None:
    world = two_markets(capped(usd_per_h=100.0, max_replicas=2), shape=StepShape(60.0, 1200.0), no_spot=False)
    assert world.most is not None
    del world.most[ON_DEMAND]
    world.let_pass(0.2)
    world.no_spot = True
    world.lose("rollout-0-i1")  # the other tells what it would cost on demand, which is no bound on a third
    world.let_pass(1.0)
    (told,) = world.of(BudgetRefused)
    assert "the price of rollout on demand is unknown" in told.reason
    assert (world.of(BudgetReached), world.stood_in) == ([], [])


def test_without_prices_there_is_no_fallback() -> None:
    world = two_markets(spec(2))
    world.most = None
    world.let_pass(1.0)
    assert world.stood_in == []


ONE = 9.0  # USD an hour: a trainer and one node on demand, at the most that it may cost


def ranged(usd_per_h: float, low: int, high: int) -> RunSpec:
    run = replace(spec(high), budget=Budget(usd_per_h=usd_per_h))
    return replace(run, rollout=replace(run.rollout, replicas=Replicas(min=low, max=high)))


def until_spot_alone(world: World, within_s: float) -> None:
    ends_s = world.now_s + within_s
    while fallback_nodes(world.state) or not world.serving_on_spot:
        world.let_pass(20.0 / HOUR_S)
        assert world.now_s < ends_s, (world.state.live, world.state.kinds)


def test_a_day_without_spot_costs_next_to_nothing_for_asking() -> None:
    world = two_markets(ranged(ONE, 1, 2))
    world.let_pass(1.0)
    bought, steps, told = len(world.stood_in), world.steps, len(world.of(BudgetRefused))
    world.let_pass(24.0)
    assert len(world.stood_in) - bought <= 24 * HOUR_S / FALLBACK_MIN_S
    assert world.steps - steps > 0.98 * 24 * HOUR_S
    assert len(world.of(BudgetRefused)) - told <= 1
    assert world.state.phase is RunPhase.TRAINING


def test_nothing_is_returned_before_spot_comes_if_both_fit() -> None:
    world = two_markets(ranged(ONE + 2.0, 1, 1))
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
@example(cap=ONE, low=0, more=2, shape=StepShape(1.0, 100.0), away_h=1.0, again=False)  # two would be better
@example(cap=10.0, low=2, more=3, shape=None, away_h=5.0, again=True)  # it was refused a moment ago, and now comes
def test_returning_spot_is_found_under_any_cap(
    cap: float, low: int, more: int, shape: StepShape | None, away_h: float, again: bool
) -> None:
    world = two_markets(ranged(cap, low, low + more), shape=shape, no_spot=not again)
    world.let_pass(1.0)
    if again:
        world.no_spot = True
        for node in world.serving_on_spot:
            world.lose(node)
    world.let_pass(away_h)
    world.no_spot = False
    until_spot_alone(world, FALLBACK_MIN_S + 3 * HOUR_S)
    stood_in = len(world.stood_in)
    world.let_pass(2.0)
    assert len(world.stood_in) == stood_in


def test_larger_fleet_requests_spot_before_on_demand() -> None:
    """That spot was short once, hours ago, says nothing of the nodes that are asked for now."""
    base = spec(4)
    run = replace(base, rollout=replace(base.rollout, replicas=Replicas(min=1, max=4)))
    world = two_markets(run, no_spot=False, shape=StepShape(100.0, 20.0), launch_s=120.0)
    world.let_pass(0.2)
    for node in world.up(Role.ROLLOUT):
        world.lose(node)
    world.let_pass(6.0)
    assert len(world.up(Role.ROLLOUT)) == 1
    world.shape = StepShape(20.0, 400.0)
    world.let_pass(1.0)
    assert len(world.serving_on_spot) == 4
    assert world.stood_in == []


class OneSpot(World):
    """Spot has one machine for rollouts."""

    def refuses(self, launch: Launch) -> bool:
        there = [name for name in self.up(Role.ROLLOUT) if name != launch.node]
        taken = any(self.markets[name] is Market.SPOT for name in there)
        return super().refuses(launch) or (taken and launch.market is Market.SPOT)


def test_noise_of_measured_steps_buys_and_returns_no_node() -> None:
    """Next to one spot node a node on demand changes a step's price by less than a measurement is off."""
    base = spec(2)
    run = replace(base, rollout=replace(base.rollout, replicas=Replicas(min=1, max=2)))
    world = OneSpot(run, **on_two_markets(no_spot=False))
    for measured in range(16):
        world.shape = StepShape(10.0, 84.0 if measured % 2 else 78.0)
        world.let_pass(0.5)
    assert len(world.stood_in) <= 1
