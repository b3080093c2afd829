"""A zone that refuses is followed by the next one at once; what no zone can help is paced."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from grpo_orch.policies.control.decide import decide
from grpo_orch.policies.model.breaker import MachineKind
from grpo_orch.policies.model.events import BuyingStopped, MachineBought, NodeMoved, NodeRequested, PitfallFound
from grpo_orch.policies.model.pools import Pool, PoolOffer
from grpo_orch.policies.model.reports import with_report
from grpo_orch.policies.model.spec import Budget, RunSpec
from grpo_orch.policies.model.vocabulary import (
    Market,
    NodePhase,
    Refusal,
    Role,
    kind_of,
    role_of,
    slot_and_incarnation,
)
from tests.stand_ins.world import World, spec

ZONES = tuple("abcdefghijkl")
SPOT_PRICE_MAX_FACTOR = {"trainer on demand": 9.0, "rollout on spot": 9.0}


def pool(zone: str, market: Market = Market.SPOT) -> Pool:
    return Pool("aws", "r", f"r{zone}", "g6.xlarge", "L4:1", market)


# Each zone a hundredth dearer than the one before.
OFFERS = (
    PoolOffer(Role.TRAINER, pool("a", Market.ON_DEMAND), 3.0),
    *(PoolOffer(Role.ROLLOUT, pool(zone), 1.0 + place / 100) for place, zone in enumerate(ZONES)),
)


def zones(run: RunSpec | None = None, has: str = "", **world: object) -> World:
    """One whose rollout nodes come in these zones alone; other launches of theirs are refused."""
    usual = {"proved": True, "max_steps": 10**6, "offers": OFFERS, "most": SPOT_PRICE_MAX_FACTOR, "dt_s": 0.25}
    made = {**usual, "has": frozenset(f"r{zone}" for zone in has), **world}
    return World(run or spec(), **made)  # type: ignore[arg-type]  # World's own fields


def asked(world: World) -> list[tuple[str, str]]:
    """Slot and zone of each request for a rollout node."""
    requests = [event for event in world.of(NodeRequested) if event.role is Role.ROLLOUT]
    return [(event.slot, event.pool.zone) for event in requests if event.pool is not None]


def has_rollouts(world: World) -> bool:
    return bool(world.up(Role.ROLLOUT))


@pytest.mark.parametrize("late_s", [0.0, 20.0])
def test_zone_with_capacity_is_found_within_twelve_launches(
    late_s: float,
) -> None:
    """With launches that take 20 s, the first zones have rested before the last was asked: each is asked once."""
    world = zones(has="l", refused_after_s=late_s)
    began_s = None
    while len(world.up(Role.ROLLOUT)) < 2:
        world.tick()
        began_s = world.now_s if began_s is None and asked(world) else began_s
        world.advance(0.25)
        assert began_s is None or world.now_s - began_s <= 12 * (late_s + 0.5) + 1, asked(world)
    assert Counter(asked(world)).most_common(1)[0][1] == 1
    assert world.of(BuyingStopped) == []


def test_resting_zones_pace_slots_and_first_rested_is_asked() -> None:
    world = zones()
    world.wait(60.0, 0.25)
    in_a_minute = len(asked(world))
    assert {zone for _, zone in asked(world)} == {f"r{zone}" for zone in ZONES}
    assert in_a_minute <= 2 * 12 + 8
    assert len(world.of(BuyingStopped)) == 1
    world.has = frozenset({"rc"})
    world.until(has_rollouts)


@pytest.mark.parametrize("refusal", [Refusal.CREDENTIALS, Refusal.UNKNOWN])
def test_failure_common_to_zones_is_not_tried_in_each(refusal: Refusal) -> None:
    """Ten minutes: no more requests than where there is one zone."""
    world, one_zone = (zones(refusal=refusal, offers=offers) for offers in (OFFERS, OFFERS[:2]))
    for world_of in (world, one_zone):
        world_of.wait(600.0, 0.25)
    assert 3 <= len(asked(world)) == len(asked(one_zone))


def test_refused_credentials_are_tried_15_times_in_six_hours() -> None:
    world = zones(refusal=Refusal.CREDENTIALS)
    world.let_pass(6.0)
    requests = Counter(slot for slot, _ in asked(world))
    assert sum(requests.values()) >= 5
    assert max(requests.values()) <= 15


def test_request_has_its_pool_reason_and_price_limit() -> None:
    world = zones(spec(1), has="b")
    world.until(has_rollouts)
    requests = {event.node: event for event in world.of(NodeRequested)}
    first, second = requests["rollout-0-i1"], requests["rollout-0-i2"]
    assert (first.pool, first.max_usd_per_h) == (pool("a"), 1.0)
    assert "in aws/r/ra g6.xlarge L4:1 spot at 1.00 USD/h: 0.07 losses an hour, never tried" in first.reason
    assert (second.pool, second.max_usd_per_h) == (pool("b"), 1.01)


def test_budget_counts_the_chosen_pool_and_not_the_dearest() -> None:
    """The trainer at 3 and two nodes at 1 fit under 6 an hour; at the dearest price of their kind none would."""
    limited = replace(spec(), budget=Budget(usd_per_h=6.0))
    world = zones(limited, has="abcdefghijkl")
    world.wait(10.0, 0.25)
    assert len(world.up(Role.ROLLOUT)) == 2
    assert {slot_and_incarnation(node)[0] for node in world.up(Role.ROLLOUT)} == {"rollout-0", "rollout-1"}


def test_next_affordable_pool_replaces_one_over_budget() -> None:
    """The zone that is cheapest rests after a refusal, and those left cost more than the cap an hour allows."""
    dear = (
        PoolOffer(Role.TRAINER, pool("a", Market.ON_DEMAND), 9.0),
        PoolOffer(Role.TRAINER, pool("b", Market.ON_DEMAND), 3.0, rank=1),
        PoolOffer(Role.ROLLOUT, pool("a"), 5.0),
        PoolOffer(Role.ROLLOUT, pool("b"), 1.0, rank=1),
    )
    run = replace(spec(1), budget=Budget(usd_per_h=4.5))
    world = zones(run, has="b", offers=dear, max_steps=10)
    world.run(10**4)
    requests = {event.node: event for event in world.of(NodeRequested)}
    assert requests["trainer-0-i1"].pool == pool("b", Market.ON_DEMAND)
    assert requests["rollout-0-i1"].pool == pool("b")
    assert (
        requests["rollout-0-i1"].max_usd_per_h == 1.0
    )  # its pool's own price counts, not the dearest of its kind
    assert world.steps == 10


def test_unaffordable_pools_report_the_best_ones_price() -> None:
    run = replace(spec(1), budget=Budget(usd_per_h=2.0))
    world = zones(run, has="a")
    world.run(10)
    assert world.of(NodeRequested) == []
    assert "3.00 USD an hour exceed `budget.usd_per_h`, 2.00" in world.state.reason


def test_cloud_without_offers_is_reported_once_and_still_used() -> None:
    world = zones(spec(1), has="", offers=())
    snapshot = replace(world.snapshot(), prices=None, prices_trouble="KeyError: 'zone'")
    told = decide(world.state, snapshot, world.spec)
    [noticed] = [event for event in told.events if isinstance(event, PitfallFound)]
    assert "KeyError" in noticed.advice
    assert "the cloud chooses where to buy" in noticed.advice
    assert any(isinstance(event, NodeRequested) for event in told.events)
    seen = replace(world.state, reports=with_report({}, noticed, 0.0))
    assert not any(isinstance(event, PitfallFound) for event in decide(seen, snapshot, world.spec).events)
    capped = decide(world.state, snapshot, replace(world.spec, budget=Budget(usd=100.0)))
    [noticed] = [event for event in capped.events if isinstance(event, PitfallFound)]
    assert "nothing is bought, because the run has a budget" in noticed.advice
    assert not any(isinstance(event, NodeRequested) for event in capped.events)


def test_trainer_goes_where_nodes_are_on_their_market() -> None:
    def offered(role: Role, region: str, market: Market, usd: float) -> PoolOffer:
        return PoolOffer(role, Pool("aws", region, f"{region}a", "g6.xlarge", "L4:1", market), usd)

    dear = offered(Role.TRAINER, "s", Market.ON_DEMAND, 3.1)
    both = [offered(Role.ROLLOUT, region, Market.ON_DEMAND, 3.0) for region in "rs"]
    spot = offered(Role.ROLLOUT, "s", Market.SPOT, 1.0)
    offers = (offered(Role.TRAINER, "r", Market.ON_DEMAND, 3.0), dear, *both)

    def first(world: World) -> NodeRequested:
        world.tick()
        found: NodeRequested = world.of(NodeRequested)[0]
        return found

    assert first(zones(offers=(*offers, spot))).pool == dear.pool
    assert first(zones(offers=offers)).pool == offers[0].pool  # where spot is nowhere, the cheaper one


def calls_of_burst(nodes: int) -> int:
    """Calls of functions in a tick that asks for so many nodes at once, with a choice of twelve zones."""
    world = zones(spec(nodes), has="a")
    world.until(lambda it: bool(it.up(Role.TRAINER)))
    calls = 0

    def count(frame: Any, event: str, arg: Any) -> None:  # noqa: ARG001  # sys.setprofile's own signature
        nonlocal calls
        calls += event == "call"

    looked = world.snapshot()
    served = {kind_of(Role.ROLLOUT, Market.SPOT): MachineKind(served=1)}  # else three are tried before the others
    state = replace(world.state, kinds={**world.state.kinds, **served})
    sys.setprofile(count)
    try:
        decision = decide(state, looked, world.spec)
    finally:
        sys.setprofile(None)
    assert sum(isinstance(event, NodeRequested) for event in decision.events) == nodes
    return calls


def test_each_of_a_burst_of_requests_costs_the_same() -> None:
    """Four times as many take four times the work, and not sixteen times."""
    assert calls_of_burst(400) < 5 * calls_of_burst(100)


def test_nodes_join_the_machines_whose_pool_was_not_journalled() -> None:
    """Private addresses do not reach another region, however cheap. Nothing is bought before the cloud was heard,
    and what those machines cost stays as it was journalled."""
    world = zones(spec(2), offers=(), has="a")
    world.until(lambda it: len(it.up(Role.ROLLOUT)) == 2)
    bought = MachineBought("trainer-0-i1", Market.ON_DEMAND, "aws/r", 3.0, 3.0)
    world.journal((bought,))
    known = world.state.nodes["trainer-0-i1"].arrived_at_s

    there = {Role.TRAINER: pool("a", Market.ON_DEMAND), Role.ROLLOUT: pool("a")}
    for name, machine in world.machines.items():
        seen = replace(machine, price_usd_per_h=5.0, on_demand_usd_per_h=5.0)
        world.machines[name] = replace(seen, pool=there[role_of(name)])
    del world.machines["rollout-0-i1"]
    world.journal((NodeMoved("rollout-0-i1", NodePhase.GONE, "taken back"),))
    far = [replace(one, pool=replace(one.pool, region="far"), usd_per_h=0.1) for one in OFFERS]
    world.offers = (*OFFERS, *far)
    world.take_over()
    world.now_s += 60.0
    unheard = replace(world.snapshot(), machines=None)
    assert not any(isinstance(one, NodeRequested) for one in decide(world.state, unheard, world.spec).events)
    world.wait(5.0, 0.25)
    [second] = [one for one in world.of(NodeRequested) if one.incarnation == 2]
    assert second.pool is not None
    assert second.pool.region == "r"
    trainer = world.state.nodes["trainer-0-i1"]
    assert (trainer.pool, trainer.price_usd_per_h) == (there[Role.TRAINER], 3.0)
    assert trainer.arrived_at_s == known, "it has been there since then"
    assert len(world.of(MachineBought)) == 3, "each is told once, the trainer a second time"
