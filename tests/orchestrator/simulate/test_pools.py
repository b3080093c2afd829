"""The simulated world's pools: what a zone gives, refuses and takes, and who chooses among them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random

import pytest

from benchmarks.contest.contenders import steer
from benchmarks.contest.markets import MARKETS, market
from grpo_orch.orchestrator.clouds.protocol import CloudRefused, LaunchOrder
from grpo_orch.orchestrator.simulate.market_trace import MarketTrace, Zone
from grpo_orch.orchestrator.simulate.scenarios import run_scenario
from grpo_orch.orchestrator.simulate.simulated_cloud import BRISK, Physics, Prices, SimulatedCloud
from grpo_orch.orchestrator.simulate.store import Objects
from grpo_orch.policies.model.pools import Pool
from grpo_orch.policies.model.vocabulary import Market, Refusal, Role
from tests.stand_ins.world import spec

POOLED = [name for name in MARKETS if any(zone.region for zone in market(name, 0, 2))]
ON_DEMAND = Market.ON_DEMAND


def zone(name: str, *counts: int, price: float = 1.0, region: str = "r") -> Zone:
    return Zone(name, 300.0, counts, (price,), region=region)


def cloud(*trace: Zone) -> SimulatedCloud:
    random = Random(0)
    return SimulatedCloud(trace, BRISK, Prices(), Objects(random), random)


def order(node: str, pool: Pool | None = None, market: Market = Market.SPOT) -> LaunchOrder:
    return LaunchOrder(f"rollout-{node}-i1", Role.ROLLOUT, market, 1, {}, pool)


def why(of: SimulatedCloud, wanted: LaunchOrder) -> Refusal | None:
    try:
        of.launch(wanted)
    except CloudRefused as error:
        return error.refusal
    return None


def test_pinned_launch_is_refused_where_there_is_no_capacity() -> None:
    there, dear, full = zone("a", 1), zone("b", 2, price=1.5), zone("c", 0)
    found = cloud(there, dear, full)
    assert why(found, order("0", dear.pool)) is None
    assert found.nodes["rollout-0-i1"].zone == "b"
    assert found.truth()["rollout-0-i1"].price_usd_per_h == 0.0, "it is not there yet"
    found.pass_time(120.0)
    assert found.truth()["rollout-0-i1"].price_usd_per_h == pytest.approx(1.5 * 1.19)
    assert found.truth()["rollout-0-i1"].pool == dear.pool
    assert why(found, order("1", full.pool)) is Refusal.NO_CAPACITY
    assert [why(found, order(str(node), there.pool)) for node in (2, 3)] == [None, Refusal.NO_CAPACITY]


def test_unpinned_launch_goes_by_price_within_the_region() -> None:
    cheap, near, far = zone("a", 0, price=0.5), zone("b", 9), zone("z", 9, price=0.9, region="s")
    found = cloud(cheap, near, far)
    found.launch(order("0", near.pool))
    found.launch(order("1"))
    one = found.nodes["rollout-1-i1"]
    assert one.zone == "b"
    assert one.up_at_s > BRISK.launch_s * (1 - BRISK.spread) + 20.0, "the refusal of the first took its time"


def test_a_quota_is_its_regions_kinds_and_markets() -> None:
    zones = [replace(zone(name, 5), quota=2) for name in "ab"]
    other = replace(zones[0], machine="H100:1")
    found = cloud(*zones, other)
    assert [why(found, order(str(n), zones[n % 2].pool)) for n in range(3)] == [None, None, Refusal.QUOTA]
    assert why(found, order("9", other.pool)) is None
    found.terminate("rollout-0-i1")
    assert why(found, order("4", zones[1].pool)) is None


def test_held_capacity_is_counted_through_all_changes() -> None:
    trace = market("zone-out", 3, 4)
    found, random = cloud(*trace), Random(1)
    for node in range(300):
        found.pass_time(found.time_s + 400.0)
        pool = random.choice([one.pool for one in trace if one.market is Market.SPOT])
        why(found, order(str(node), pool))
        box = random.choice(list(found.nodes.values()))
        match random.randrange(4):
            case 0:
                found.terminate(box.node)
            case 1 if not box.gone:
                found.lose(box)
            case 2 if not box.gone:
                found.warn(box, random.choice((None, found.time_s + 120.0)))
        there = Counter(one.key for one in found.nodes.values() if one.uses_capacity)
        assert +found.held == there


def test_spot_machines_are_preempted_and_on_demand_are_not() -> None:
    spot, listed = zone("a", 3, 0), replace(zone("a", 3, 0), market=ON_DEMAND)
    found = cloud(spot, listed)
    found.launch(order("0", spot.pool))
    found.launch(order("1", listed.pool, ON_DEMAND))
    found.pass_time(301.0)
    found.pass_time(600.0 - 1)
    assert [box.gone for box in found.nodes.values()] == [True, False]
    assert why(found, order("2", listed.pool, ON_DEMAND)) is Refusal.NO_CAPACITY


def test_pool_prices_are_of_the_last_full_hour() -> None:
    moving = Zone("a", 300.0, (1,), tuple(1.0 + gap / 10 for gap in range(24)), region="r")
    found = cloud(moving)
    found.pass_time(3600.0 + 1500.0)
    [offer] = [one for one in found.pools() if one.role is Role.ROLLOUT]
    assert offer.usd_per_h == pytest.approx(1.19 * 2.2)
    assert cloud(replace(moving, region="")).pools() == ()


@pytest.mark.parametrize("name", POOLED)
def test_no_promise_breaks_where_there_is_a_choice(name: str) -> None:
    run_scenario(4, spec(2), trace=market(name, 4, 2))


def test_pool_memory_leaves_a_zone_that_preempts() -> None:
    """Without one, a machine is bought there again and again."""
    bad = replace(zone("a", 3, price=0.85), losses_per_h=4.0)
    trace: MarketTrace = (bad, zone("b", 3), replace(zone("b", 9), market=ON_DEMAND))
    ours, cheapest = (steer(name, spec(2), trace, Physics(), Prices(), 3.0, 0) for name in ("ours", "cheapest"))
    assert 2 * ours.bought <= cheapest.bought
    assert ours.steps > cheapest.steps
