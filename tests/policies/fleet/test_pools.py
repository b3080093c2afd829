"""Where machines are bought: what is cheapest after losses and refusals, and what rests."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from grpo_orch.policies.fleet.market import REST_MAX_S, Placement, choose, rates_of, rest_s
from grpo_orch.policies.model.events import Event, MachineBought, NodeMoved, NodeRequested
from grpo_orch.policies.model.fold import PREEMPTION_NOTICE, fold
from grpo_orch.policies.model.pools import Pool, PoolOffer, PoolRecord, with_launch, with_refusal, with_stay
from grpo_orch.policies.model.vocabulary import Market, NodePhase, Refusal, Role

HOUR_S = 3600.0
NOW_S = 1e9
LONG_AGO_S = NOW_S - 1e4 * HOUR_S
counts = st.integers(0, 8)
usd = st.floats(0.1, 50.0)


def pool(zone: str) -> Pool:
    return Pool("aws", "r", f"r{zone}", "g6.xlarge", "L4:1", Market.SPOT)


def offer(zone: str, usd_per_h: float, **more: float) -> PoolOffer:
    return replace(PoolOffer(Role.ROLLOUT, pool(zone), usd_per_h), **more)  # type: ignore[arg-type]


def record(zone: str, refusals: int, losses: int, at_s: float) -> PoolRecord:
    """So many launches that were refused and machines that were taken, and one of each that was not."""
    found = with_stay(with_launch(PoolRecord(pool(zone)), at_s), at_s - 2 * HOUR_S, at_s, preempted=False)
    for _ in range(refusals):
        found = with_refusal(found, at_s, at_s)
    for _ in range(losses):
        found = with_stay(found, at_s - HOUR_S, at_s, preempted=True)
    return found


@given(usd, usd, counts, counts, counts, counts)
def test_dominated_pool_is_not_chosen(
    price: float, dearer: float, refusals: int, more: int, losses: int, lost: int
) -> None:
    at_s = NOW_S - 2 * REST_MAX_S  # none rests any more
    good, bad = record("a", refusals, losses, at_s), record("b", refusals + more + 1, losses + lost, at_s)
    bad = replace(bad, stays=tuple(replace(one, preempted=True) for one in bad.stays))
    offers = [offer("b", price + dearer), offer("a", price)]
    chosen = choose(offers, {str(one.pool): one for one in (good, bad)}, Placement(), NOW_S, 0.2)
    assert chosen is not None
    assert chosen.offer.pool == pool("a")


@given(st.integers(1, 20))
def test_a_rest_grows_with_each_refusal_and_ends(times: int) -> None:
    found, before_s = PoolRecord(pool("a")), 0.0
    for _ in range(times):
        found = with_refusal(found, NOW_S, NOW_S)
        now_s = rest_s(found, NOW_S)
        assert before_s < now_s or now_s == REST_MAX_S
        before_s = now_s
    assert rest_s(found, NOW_S + before_s) == 0.0
    assert rest_s(with_launch(found, NOW_S), NOW_S) == 0.0


@given(counts, counts)
def test_old_observations_are_forgotten(refusals: int, losses: int) -> None:
    forgotten = rates_of(pool("a"), record("a", refusals, losses, LONG_AGO_S), 0.0, NOW_S)
    never = rates_of(pool("a"), None, 0.0, NOW_S)
    assert abs(forgotten.losses_per_h - never.losses_per_h) < 1e-9
    assert abs(forgotten.success - never.success) < 1e-9


def bought(zone: str, landed: str, *moves: NodeMoved) -> list[tuple[int, float, tuple[Event, ...]]]:
    node = "rollout-0-i1"
    asked = NodeRequested(node, Role.ROLLOUT, "rollout-0", 1, Market.SPOT, "first", 1.0, pool(zone))
    there = MachineBought(node, Market.SPOT, "", 1.0, 3.0, pool(landed))
    events: list[tuple[Event, ...]] = [(asked,), (NodeMoved(node, NodePhase.BOOTING, "there"), there)]
    events += [(move,) for move in moves]
    return [(number, HOUR_S * number, one) for number, one in enumerate(events, 1)]


def test_a_fleet_spreads_over_zones_that_cost_little_more() -> None:
    nodes = list(fold(bought("a", "a")).nodes.values())
    for dearer, zone in ((1.1, "b"), (1.5, "a")):
        chosen = choose([offer("a", 1.0), offer("b", dearer)], {}, Placement(nodes, HOUR_S), HOUR_S, 0.2)
        assert chosen is not None
        assert chosen.offer.pool == pool(zone)


def test_longest_resting_pool_is_asked_if_all_rest() -> None:
    first, last = (
        with_refusal(PoolRecord(pool(zone)), at_s, at_s) for zone, at_s in (("a", NOW_S - 30), ("b", NOW_S))
    )
    records = {str(one.pool): one for one in (first, last)}
    chosen = choose([offer("a", 9.0), offer("b", 1.0)], records, Placement(), NOW_S, 0.2)
    assert chosen is not None
    assert chosen.offer.pool == pool("a")
    assert chosen.sentence == (
        "in aws/r/ra g6.xlarge L4:1 spot at 9.00 USD/h: 0.07 losses an hour, 0 of 1 launches succeeded, "
        "chosen although it rests for 30 s, because all pools do"
    )


def test_an_order_is_kept() -> None:
    chosen = choose([offer("a", 1.0, rank=1), offer("b", 9.0)], {}, Placement(), NOW_S, 0.2)
    assert chosen is not None
    assert chosen.offer.pool == pool("b")


def test_machine_landing_elsewhere_counts_as_refused() -> None:
    pools = fold(bought("a", "b")).pools
    assert [one.succeeded for one in pools[str(pool("a"))].launches] == [False]
    assert [one.succeeded for one in pools[str(pool("b"))].launches] == [True]


def test_a_zone_that_was_left_to_the_cloud_refuses_nothing() -> None:
    asked = replace(pool("a"), zone="")
    node = "rollout-0-i1"
    requested = NodeRequested(node, Role.ROLLOUT, "rollout-0", 1, Market.SPOT, "first", 1.0, asked)
    there = MachineBought(node, Market.SPOT, "", 1.0, 3.0, pool("a"))
    state = fold([(1, 1.0, (requested, NodeMoved(node, NodePhase.BOOTING, "there"), there))])
    assert state.nodes[node].pool == asked
    assert [[one.succeeded for one in found.launches] for found in state.pools.values()] == [[True]]


def test_loss_is_counted_once_and_a_return_is_none() -> None:
    node, gone = "rollout-0-i1", NodePhase.GONE
    notice = NodeMoved(node, NodePhase.DRAINING, PREEMPTION_NOTICE)
    ending = NodeMoved(node, NodePhase.TERMINATING, "drained")
    for moves, taken in (
        ((NodeMoved(node, gone, "preempted"),), [True]),
        ((notice, NodeMoved(node, gone, "taken")), [True]),
        ((notice, ending, NodeMoved(node, gone, "terminated")), [True]),
        ((ending, NodeMoved(node, gone, "terminated")), [False]),
    ):
        stays = fold(bought("a", "a", *moves)).pools[str(pool("a"))].stays
        assert [one.preempted for one in stays] == taken


def test_refused_credentials_do_not_count_for_a_pool() -> None:
    asked = bought("a", "a")[:1]
    for refusal, count in ((Refusal.CREDENTIALS, 0), (Refusal.NO_CAPACITY, 1)):
        move = NodeMoved("rollout-0-i1", NodePhase.REFUSED, "no", refusal)
        assert len(fold([*asked, (2, HOUR_S, (move,))]).pools) == count


def test_parallel_refusals_of_a_pool_count_as_one() -> None:
    found = PoolRecord(pool("a"))
    for seconds in range(5):
        found = with_refusal(found, NOW_S - 60, NOW_S + seconds)
    assert found.refused_in_a_row == 1
    assert [one.succeeded for one in found.launches] == [False] * 5
    assert with_refusal(found, NOW_S + 5, NOW_S + 9).refused_in_a_row == 2


def test_full_quota_holds_for_region_until_it_gives_a_machine() -> None:
    over = NodeMoved("rollout-0-i1", NodePhase.REFUSED, "no", Refusal.QUOTA)
    asked, offers = bought("a", "a")[:1], [offer("a", 1.0), offer("b", 1.1)]
    refusals = [*asked, (2, HOUR_S, (over,))]
    chosen = choose(offers, fold(refusals).pools, Placement(), HOUR_S + 1, 0.2)
    assert chosen is not None
    assert chosen.rest_left_s == 59.0
    again = [(3 + number, 2 * HOUR_S, events) for number, _, events in bought("b", "b")]
    chosen = choose(offers, fold([*refusals, *again]).pools, Placement(), HOUR_S + 1, 0.2)
    assert chosen is not None
    assert chosen.rest_left_s == 0.0
