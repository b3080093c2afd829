"""Nodes on demand in place of spot: those that make a step cheapest, after a wait no dearer than they are."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from policies.control.fleet.stand_ins import WAIT_MIN_S, stand_ins, wait_s
from policies.fleet.how_many import StepShape

usd = st.floats(0.5, 50.0)
seconds = st.floats(1.0, 2000.0)


def step_usd(shape: StepShape, beside: float, price: float, spot: int, spot_usd: float, extra: int) -> float:
    return (beside + spot * spot_usd + extra * price) * shape.seconds(spot + extra)


@given(seconds, seconds, usd, usd, st.floats(0.1, 1.0), st.integers(0, 8), st.integers(1, 8))
def test_no_other_number_makes_a_step_cheaper(
    a: float, b: float, beside: float, price: float, share: float, spot: int, high: int
) -> None:
    shape, spot_usd = StepShape(a, b), share * price
    found = stand_ins(shape, beside, price, spot, spot_usd, 0, high)
    choices = [extra for extra in range(high - spot + 1) if spot + extra] or [0]
    costs = {extra: step_usd(shape, beside, price, spot, spot_usd, extra) for extra in choices}
    assert costs[found] <= min(costs.values()) * (1 + 1e-9)


@given(seconds, seconds, usd, usd, st.floats(0.1, 1.0), st.integers(0, 7))
def test_one_more_on_spot_never_asks_for_more_on_demand(
    a: float, b: float, beside: float, price: float, share: float, spot: int
) -> None:
    """So what is bought by all that is there is never at once returned for what has held."""
    counts = [stand_ins(StepShape(a, b), beside, price, k, share * price, 0, 8) for k in (spot, spot + 1)]
    assert counts[1] <= counts[0]


@given(usd, usd, st.integers(1, 8), st.floats(60.0, 3600.0), st.floats(0.0, 1e5))
def test_the_wait_and_a_start_cost_at_most_twice_the_best(
    beside: float, price: float, nodes: int, boot_s: float, outage_s: float
) -> None:
    start_usd = nodes * price * boot_s
    waits_s = wait_s(nodes, price, beside, boot_s)
    paid = beside * min(outage_s, waits_s) + (start_usd if outage_s > waits_s else 0.0)
    best = min(beside * outage_s, start_usd)
    assert paid <= 2 * best * (1 + 1e-9) + beside * WAIT_MIN_S
