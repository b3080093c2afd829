"""What machines have cost, in exact numbers and over time."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_orch.policies.fleet.budget import on_demand_usd, spent_usd
from grpo_orch.policies.ledger.rentals import Bill, ControllerRental, SpentAt, bill, rentals, spent_over_time
from grpo_orch.policies.model.events import Event, MachineBought, NodeMoved, NodeRequested, RunCreated
from grpo_orch.policies.model.fold import fold
from grpo_orch.policies.model.vocabulary import Market, NodePhase, Role, role_of
from tests.generators.views_world import requested

NODE = "rollout-0-i1"
TRAINER = "trainer-0-i1"
Entries = list[tuple[int, float, tuple[Event, ...]]]


def moved(phase: NodePhase, node: str = NODE) -> NodeMoved:
    return NodeMoved(node, phase, "")


def test_machine_is_paid_from_request_until_gone_unless_refused() -> None:
    seen: list[tuple[int, float, tuple[Event, ...]]] = [
        (1, 100.0, (requested(NODE), requested(TRAINER), requested("rollout-1-i1"), requested("rollout-2-i1"))),
        (2, 120.0, (moved(NodePhase.BOOTING), moved(NodePhase.BOOTING, TRAINER))),
        (2, 100.0, (MachineBought(NODE, Market.SPOT, "here", 1.0, 4.0),)),
        (2, 100.0, (MachineBought(TRAINER, Market.ON_DEMAND, "here", 8.0, 8.0),)),
        (3, 150.0, (moved(NodePhase.SERVING), moved(NodePhase.REFUSED, "rollout-1-i1"))),
        (4, 200.0, (moved(NodePhase.BOOTING), moved(NodePhase.TERMINATING, "rollout-2-i1"))),
        (5, 1900.0, (moved(NodePhase.TERMINATING), moved(NodePhase.GONE, "rollout-2-i1"))),
        (6, 1900.0, (moved(NodePhase.GONE),)),
    ]
    rented = rentals(seen, now_s=3700.0)
    assert [(one.node, one.from_s, one.until_s) for one in rented] == [
        (NODE, 100, 1900),
        ("rollout-2-i1", 100, 1900),
        (TRAINER, 100, 3700),
    ]
    assert bill(rented) == Bill(cost_usd=0.5 + 8.0, cost_all_on_demand_usd=2.0 + 8.0)


def test_spending_over_time_is_split_by_purpose() -> None:
    seen: Entries = [
        (1, 0.0, (requested(TRAINER), requested(NODE), requested("rollout-1-i1"))),
        (2, 60.0, (MachineBought(TRAINER, Market.ON_DEMAND, "here", 8.0, 8.0),)),
        (3, 60.0, (MachineBought(NODE, Market.SPOT, "here", 1.0, 4.0),)),
        (4, 60.0, (MachineBought("rollout-1-i1", Market.ON_DEMAND, "here", 4.0, 4.0),)),
        (5, 1800.0, (moved(NodePhase.GONE),)),
    ]
    steered = [ControllerRental(0.0, 900.0, 0.2), ControllerRental(2700.0, 9e9, 0.4)]
    assert spent_over_time(seen, 3600.0, steered) == [
        SpentAt(0.0),
        SpentAt(900.0, 2.0, 0.25, 1.0, 0.05),
        SpentAt(1800.0, 4.0, 0.5, 2.0, 0.05),
        SpentAt(2700.0, 6.0, 0.5, 3.0, 0.05),
        SpentAt(3600.0, 8.0, 0.5, 4.0, 0.15000000000000002),
    ]
    assert spent_over_time([], 3600.0) == []


MACHINES = st.lists(
    st.tuples(
        st.sampled_from(["trainer-0", "rollout-0", "rollout-1"]),
        st.sampled_from(Market),
        st.integers(0, 10**6),  # requested, s
        st.integers(0, 10**6),  # until it is gone, s
        st.floats(0.0, 100.0),
    ),
    max_size=12,
)


def journal_of(machines: list[tuple[str, Market, int, int, float]]) -> Entries:
    """Each machine is requested as dear as can be, seen a second later, and gone in the end."""
    told: list[tuple[float, Event]] = []
    for n, (slot, market, from_s, lasts_s, usd) in enumerate(machines):
        node = f"{slot}-i{n}"
        told += [
            (from_s, NodeRequested(node, role_of(slot), slot, n, market, "", max_usd_per_h=2 * usd)),
            (from_s, MachineBought(node, market, "here", usd, 3 * usd)),
            (from_s + lasts_s, moved(NodePhase.GONE, node)),
        ]
    ordered = sorted(told, key=lambda one: one[0])
    return [(number, time_s, (event,)) for number, (time_s, event) in enumerate(ordered, start=1)]


@given(MACHINES, st.integers(0, 2 * 10**6))
def test_spent_never_falls_and_is_the_integral_of_prices(
    machines: list[tuple[str, Market, int, int, float]], now_s: int
) -> None:
    history = [entry for entry in journal_of(machines) if entry[1] <= now_s]
    found = spent_over_time(history, float(now_s))
    for one, after in pairwise(found):
        assert one.time_s < after.time_s
        assert one.trainer_usd <= after.trainer_usd
        assert one.spot_usd <= after.spot_usd
        assert one.on_demand_usd <= after.on_demand_usd
    for at in found:
        there = [
            (slot, max(0, min(at.time_s, from_s + lasts_s) - from_s) * usd / 3600)
            for slot, _, from_s, lasts_s, usd in machines
        ]
        trainers = sum(usd for slot, usd in there if role_of(slot) is Role.TRAINER)
        assert at.trainer_usd == pytest.approx(trainers, abs=1e-6)
        assert at.usd == pytest.approx(sum(usd for _, usd in there), abs=1e-6)
    if found:
        assert found[-1].usd == pytest.approx(bill(rentals(history, float(now_s))).cost_usd, abs=1e-6)


def test_own_machine_is_free_at_any_listed_price() -> None:
    asked = NodeRequested(NODE, Role.ROLLOUT, "rollout-0", 1, Market.ON_DEMAND, "", max_usd_per_h=98.0)
    seen: Entries = [
        (1, 0.0, (RunCreated("digits", "digits-0a1b"), asked)),
        (2, 0.0, (moved(NodePhase.BOOTING), MachineBought(NODE, Market.ON_DEMAND, "kubernetes", 0.0, 0.0))),
    ]
    state = fold(seen)
    assert (spent_usd(state, 3600.0), on_demand_usd(state, 3600.0)) == (0.0, 0.0)
    assert bill(rentals(seen, 3600.0)) == Bill(0.0, 0.0)
    assert spent_usd(fold(seen[:1]), 3600.0) == bill(rentals(seen[:1], 3600.0)).cost_usd == 98.0
