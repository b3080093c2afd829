"""The objective, and what follows from it in any market: the cheapest fleet, no oscillation, never over a cap."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_orch.policies.control.decide import decide
from grpo_orch.policies.costs.steps import HourlyPrices, StepShape, step_usd
from grpo_orch.policies.fleet.explain import explain
from grpo_orch.policies.fleet.market import offers
from grpo_orch.policies.fleet.objective import NOISE_SHARE, Candidate, compare, compare_sizes
from grpo_orch.policies.fleet.plan import IDLE_MIN_S, plan
from grpo_orch.policies.fleet.reconcile import release_order
from grpo_orch.policies.model.breaker import BACK_OFF_MAX_EXTRA_S
from grpo_orch.policies.model.events import NodeRequested
from grpo_orch.policies.model.pools import Pool, PoolOffer
from grpo_orch.policies.model.spec import Budget, Replicas, RunSpec
from grpo_orch.policies.model.state import Node
from grpo_orch.policies.model.vocabulary import Market, NodePhase, Role, RunPhase, kind_of
from grpo_orch.policies.tick.snapshot import Snapshot
from tests.budget import examples
from tests.stand_ins.world import World, capped, fallback_nodes, parked, priced, spec, two_markets

usd = st.floats(0.5, 50.0)
seconds = st.floats(1.0, 2000.0)
shapes = st.builds(StepShape, seconds, seconds)
HOUR_S = 3600.0


# The objective.


@given(shapes, usd, usd, st.integers(1, 8), st.integers(1, 8))
def test_over_a_long_horizon_the_cheapest_size_wins(
    shape: StepShape, beside: float, price: float, now: int, high: int
) -> None:
    prices = HourlyPrices(beside, price)
    now = min(now, high)
    found = compare_sizes(shape, prices, Market.SPOT, now, (1, high), 0.0, horizon_s=1e9)
    least = min(step_usd(shape, prices, count) for count in range(1, high + 1))
    assert step_usd(shape, prices, found.best.spot) * (1 - NOISE_SHARE) <= least * (1 + 1e-6)


@given(shapes, usd, usd, st.integers(1, 8), st.floats(0.0, 1e5), st.floats(1.0, 900.0))
def test_a_change_of_size_pays_for_its_starts(
    shape: StepShape, beside: float, price: float, now: int, horizon_s: float, start_s: float
) -> None:
    found = compare_sizes(shape, HourlyPrices(beside, price), Market.SPOT, now, (1, 8), start_s, horizon_s)
    present = next(one for one in found.candidates if one.spot == now)
    saved_usd = present.step_usd - found.best.step_usd
    if found.best.spot != now:
        assert found.best.change_usd >= abs(found.best.spot - now) * price * start_s / HOUR_S
        assert found.best.loss_usd(found.worth_usd, horizon_s) < present.loss_usd(found.worth_usd, horizon_s)
        assert saved_usd > 0


@given(usd, usd, st.integers(1, 8), st.floats(60.0, 3600.0), st.floats(0.0, 1e5))
def test_waiting_and_then_starting_costs_at_most_twice_the_best(
    beside: float, price: float, nodes: int, boot_s: float, outage_s: float
) -> None:
    """Whenever spot comes back: the horizon is how long it has been away."""
    start_usd = nodes * price * boot_s / HOUR_S
    wait = Candidate("wait", beside)
    start = Candidate("start", beside + nodes * price, 100.0, start_usd)
    starts_s = start_usd / beside * HOUR_S
    for horizon_s, best in ((0.99 * starts_s, wait), (1.01 * starts_s, start)):
        assert compare("shortage", [wait, start], horizon_s).best is best
    paid = beside * min(outage_s, starts_s) / HOUR_S + (start_usd if outage_s > starts_s else 0.0)
    assert paid <= 2 * min(beside * outage_s / HOUR_S, start_usd) * (1 + 1e-9)


def test_present_plan_wins_among_equals() -> None:
    found = compare("size", [Candidate("present", 1.0, 100.0), Candidate("other", 1.0, 100.0)], HOUR_S)
    assert (found.best.name, found.difference_usd) == ("present", 0.0)


def test_the_sentence_has_the_numbers_of_the_alternatives() -> None:
    prices = HourlyPrices(3.96, 1.19)
    found = compare_sizes(StepShape(60.0, 120.0), prices, Market.SPOT, 3, (1, 4), 300.0, 3e4)
    assert found.sentence == "3 on spot at 1.19 USD/h: 0.209 USD a step; 2 on spot: 0.211 USD a step"


# What is released first.


def test_nodes_leave_in_a_fixed_order() -> None:
    def node(name: str, phase: NodePhase, usd_per_h: float = 1.0, at_s: float = 0.0, risk: bool = False) -> Node:
        made = Node(name, Role.ROLLOUT, name, 1, Market.SPOT, phase, at_s, at_s)
        return replace(made, price_usd_per_h=usd_per_h, rebalance_recommended=risk)

    nodes = [
        node("requested", NodePhase.REQUESTED),
        node("booting", NodePhase.BOOTING),
        node("at risk", NodePhase.SERVING, risk=True),
        node("expensive", NodePhase.SERVING, 2.0),
        node("new", NodePhase.SERVING, at_s=9.0),
        node("old", NodePhase.SERVING),
    ]
    mixed = [*nodes[3:], *nodes[:3]]
    assert sorted(mixed, key=release_order) == nodes


# Random markets and histories.

markets = st.fixed_dictionaries(
    {
        "trainer": st.floats(1.0, 20.0),
        "spot": st.floats(0.2, 8.0),
        "on_demand": st.floats(1.0, 8.0),
        "shape": st.none() | shapes,
        "low": st.integers(0, 2),
        "more": st.integers(1, 3),
        "no_spot": st.booleans(),
        "boot_s": st.floats(5.0, 600.0),
    }
)


def world_of(market: dict[str, object], budget: Budget | None = None) -> World:
    low, more = int(str(market["low"])), int(str(market["more"]))
    run: RunSpec = replace(spec(low + more), budget=budget or Budget())
    run = replace(run, rollout=replace(run.rollout, replicas=Replicas(min=low, max=low + more)))
    paid = {
        (Role.TRAINER, Market.ON_DEMAND): market["trainer"],
        (Role.ROLLOUT, Market.SPOT): market["spot"],
        (Role.ROLLOUT, Market.ON_DEMAND): market["on_demand"],
    }
    most = {
        "trainer on demand": market["trainer"],
        "rollout on spot": market["spot"],
        "rollout on demand": market["on_demand"],
    }
    boot_s = {Role.ROLLOUT: market["boot_s"]}
    return two_markets(run, paid=paid, most=most, shape=market["shape"], no_spot=market["no_spot"], boot_s=boot_s)


def requests(world: World) -> int:
    return len([event for event in world.of(NodeRequested) if event.role is Role.ROLLOUT])


@settings(max_examples=examples(12), deadline=None, derandomize=True)
@given(markets)
def test_a_constant_market_buys_each_node_once(market: dict[str, object]) -> None:
    """With spot, and without any: what is bought stays."""
    world = world_of(market)
    world.let_pass(3.0, 20.0)
    bought, up = requests(world), set(world.up(Role.ROLLOUT))
    asked_on_spot = world.no_spot
    world.let_pass(9.0, 20.0)
    assert set(world.up(Role.ROLLOUT)) <= up
    assert asked_on_spot or requests(world) == bought


@settings(max_examples=examples(12), deadline=None, derandomize=True)
@given(markets, st.lists(st.sampled_from(["lose", "spot", "all", "wait", "away", "daemon"]), max_size=12))
def test_no_history_passes_a_cap_an_hour(market: dict[str, object], acts: list[str]) -> None:
    """`World.tick` fails where the machines that are journalled cost more."""
    cap = 1.5 * float(str(market["trainer"])) + 2 * float(str(market["spot"]))
    world = world_of(market, Budget(usd_per_h=cap))
    for act in acts:
        match act:
            case "lose" if world.machines:
                world.lose(sorted(world.machines)[0])
            case "spot":
                world.no_spot = not world.no_spot
            case "all":
                world.refusing_rollouts = not world.refusing_rollouts
            case "away":
                world.away = not world.away
            case "daemon":
                world.take_over()
        world.let_pass(0.3, 20.0)


@settings(max_examples=examples(8), deadline=None, derandomize=True)
@given(markets, st.floats(0.5, 6.0))
def test_returning_capacity_is_used_and_without_it_nothing_held(market: dict[str, object], away_h: float) -> None:
    world = world_of(market)
    world.let_pass(1.0, 20.0)
    world.dry_up()
    boot_s = float(str(market["boot_s"]))
    world.let_pass(away_h + 2 * IDLE_MIN_S / HOUR_S, 20.0)
    assert world.is_at(RunPhase.PARKED)
    assert not world.machines
    world.refusing_rollouts, world.no_spot = False, False
    world.let_pass((BACK_OFF_MAX_EXTRA_S + boot_s + 120.0) / HOUR_S, 5.0)
    assert world.is_at(RunPhase.TRAINING)
    assert world.up(Role.ROLLOUT)


@settings(max_examples=examples(12), deadline=None, derandomize=True)
@given(markets, st.floats(0.1, 4.0))
def test_the_same_look_gives_the_same_plan_and_explains_it(market: dict[str, object], hours: float) -> None:
    world = world_of(market)
    world.let_pass(hours, 20.0)
    seen: Snapshot = world.snapshot()
    first, again = (plan(offers(world.state, seen, world.spec), world.state, seen, world.spec) for _ in range(2))
    assert first == again
    assert decide(world.state, seen, world.spec) == decide(world.state, seen, world.spec)
    told = explain(world.state, seen, world.spec)
    assert told.comparisons == first.comparisons
    for compared in told.comparisons:
        losses = [one.loss_usd(compared.worth_usd, compared.horizon_s) for one in compared.candidates]
        assert losses == sorted(losses)
        assert compared.difference_usd >= 0


def test_more_money_buys_no_fewer_nodes() -> None:
    bought = []
    for cap in (9.5, 10.5, 13.0, 30.0):
        world = two_markets(replace(spec(4), budget=Budget(usd_per_h=cap)), no_spot=False)
        world.let_pass(0.5)
        bought.append(len(world.up(Role.ROLLOUT)))
    assert bought == sorted(bought)
    assert bought[-1] == 4


@pytest.mark.parametrize("no_spot", [True, False])
def test_pending_requests_are_explained(no_spot: bool) -> None:
    world = two_markets(spec(2), no_spot=no_spot)
    world.let_pass(0.02, 2.0)
    told = explain(world.state, world.snapshot(), world.spec)
    kinds = {kind_of(offer.role, offer.market): offer for offer in told.offers}
    assert set(kinds) == {"trainer on demand", "rollout on spot", "rollout on demand"}
    assert (kinds["rollout on spot"].status != "open") is no_spot
    assert no_spot is bool(kinds["rollout on spot"].reason)
    assert fallback_nodes(world.state) == []


def test_unknown_values_are_explained_as_unknown() -> None:
    """No step of an hour, no node of 1 USD, no market that is too expensive at a price that nobody knows."""
    unmeasured = two_markets(spec(2))
    unmeasured.let_pass(0.2)
    [compared] = explain(unmeasured.state, unmeasured.snapshot(), unmeasured.spec).comparisons
    assert compared.sentence == "1 on demand rather than 2 on demand: no steps are measured yet"
    unpriced = priced(capped(10**4), max_steps=10**6)
    unpriced.let_pass(0.1)
    unpriced.most = None
    told = explain(unpriced.state, unpriced.snapshot(), unpriced.spec)
    assert {offer.status for offer in told.offers} == {"unknown"}


def test_parked_run_explains_its_wait() -> None:
    dry = parked()
    told = explain(dry.state, dry.snapshot(), dry.spec)
    assert told.plan.startswith("parked: one rollout node is requested periodically, on spot")


def test_market_is_open_at_the_price_that_fits_under_the_cap() -> None:
    dear, cheap = (Pool("aws", "r", zone, "g", "L4:1", Market.SPOT) for zone in ("a", "b"))
    offered = [PoolOffer(Role.ROLLOUT, dear, 2.0), PoolOffer(Role.ROLLOUT, cheap, 1.2, rank=1)]
    offered.append(PoolOffer(Role.TRAINER, replace(dear, market=Market.ON_DEMAND), 4.0))
    # The cap has room for the trainer at 4 USD and a node of each price.
    run = replace(spec(2), budget=Budget(usd_per_h=7.3))
    run = replace(run, rollout=replace(run.rollout, resources={"use_spot": True}))
    world = two_markets(run, no_spot=False, offers=tuple(offered))
    world.until(lambda it: bool(it.state.live(Role.ROLLOUT)))
    one_less = {name: node for name, node in world.state.nodes.items() if node.pool != cheap}
    assert len(one_less) == 2
    market = offers(replace(world.state, nodes=one_less), world.snapshot(), run)
    offer = market.offer(Role.ROLLOUT, Market.SPOT)
    assert (offer.status, offer.usd_per_h, offer.place) == ("open", 1.2, str(cheap))
