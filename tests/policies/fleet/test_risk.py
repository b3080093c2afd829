"""Whether another is bought for a machine at risk: what a pool's history says, and what a node less costs."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.fleet.how_many import HourlyPrices, StepShape, usd_a_step
from policies.fleet.risk import LOSSES_AN_HOUR, Risk, risk_of, saved_s, short_usd_per_h
from policies.model.pool_record import AT_RISK_S, PoolRecord, risked, under_risk
from policies.model.pools import Pool
from policies.model.vocabulary import Market

NOW_S = 1e9
HALF_LIFE_H = 24.0
RECORD = PoolRecord(Pool("aws", "r", "ra", "g6.xlarge", "L4:1", Market.SPOT))
SHAPE, PRICES = StepShape(60.0, 600.0), HourlyPrices(4.0, 1.2)


def share(record: PoolRecord | None, at_s: float = NOW_S) -> float:
    return risk_of(record, (), at_s, HALF_LIFE_H).share(AT_RISK_S)


def after(lost: int, lived: int, returned: int = 0, at_s: float = NOW_S) -> PoolRecord:
    found = RECORD
    for _ in range(lost):
        found = risked(found, at_s - 300.0, at_s, taken=True)
    for _ in range(lived):
        found = risked(found, at_s - 5 * AT_RISK_S, at_s, taken=False)
    for _ in range(returned):
        found = risked(found, at_s - 300.0, at_s, taken=False)
    return found


@given(st.floats(1e-3, 30.0), st.floats(10.0, 3600.0), st.floats(10.0, 3600.0))
def test_the_time_saved_is_the_mean_over_when_the_loss_may_be(
    losses_an_hour: float, start_s: float, within_s: float
) -> None:
    parts, rate = 4000, losses_an_hour / 3600
    moments = [(part + 0.5) * within_s / parts for part in range(parts)]
    mean = sum(min(at_s, start_s) * rate * math.exp(-rate * at_s) for at_s in moments) * within_s / parts
    assert saved_s(losses_an_hour, start_s, within_s) == pytest.approx(mean, rel=1e-2, abs=1e-6)


def test_where_nothing_is_lost_nothing_is_saved() -> None:
    assert saved_s(0.0, 300.0, AT_RISK_S) == 0.0


@given(st.integers(1, 8), st.integers(0, 8), st.floats(0.0, 300.0), st.floats(1.0, 3000.0))
def test_being_short_costs_what_the_steps_made_meanwhile_cost_more(
    nodes: int, short: int, fixed_s: float, shared_s: float
) -> None:
    """An hour with the others, against as many steps with all."""
    shape, left = StepShape(fixed_s, shared_s), max(0, nodes - short)
    found = short_usd_per_h(shape, PRICES, nodes, short)
    if left == 0:
        assert found == PRICES.beside_usd_per_h
        return
    steps = 3600 / shape.seconds(left)
    more = steps * (usd_a_step(shape, PRICES, left) - usd_a_step(shape, PRICES, nodes))
    assert found == pytest.approx(more, abs=1e-9)


def test_without_a_measured_step_only_a_fleet_that_is_gone_is_known_to_cost() -> None:
    assert short_usd_per_h(None, PRICES, 2, 1) == 0.0
    assert short_usd_per_h(None, PRICES, 2, 2) == PRICES.beside_usd_per_h


def test_most_live_on_until_a_pool_shows_otherwise_and_that_is_forgotten() -> None:
    assert share(None) == share(RECORD) == pytest.approx(1 - math.exp(-LOSSES_AN_HOUR / 2))
    assert share(None) < 0.1
    assert share(after(1, 0)) > 0.5
    assert share(after(4, 1)) > 0.7
    assert share(after(0, 5)) < 0.03
    assert share(after(4, 1), NOW_S + 24 * HALF_LIFE_H * 3600) == pytest.approx(share(None), abs=1e-3)
    assert share(after(1, 0), NOW_S + HALF_LIFE_H * 3600) < share(after(1, 0))


@pytest.mark.parametrize("lost", [0, 2])
def test_one_that_was_returned_soon_shows_only_so_much_that_it_lived_until_then(lost: int) -> None:
    before, returned, lived = share(after(lost, 0)), share(after(lost, 0, returned=1)), share(after(lost, 1))
    assert lived < returned < before


def test_a_loss_long_after_the_word_is_none_that_was_foretold() -> None:
    late = under_risk(NOW_S, NOW_S + AT_RISK_S, taken=True)
    assert not late.taken
    assert late == under_risk(NOW_S, NOW_S + 9 * AT_RISK_S, taken=False)
    assert under_risk(NOW_S, NOW_S + AT_RISK_S - 1, taken=True).taken


def test_machines_that_live_count_as_far_as_they_have_come() -> None:
    there = [under_risk(NOW_S - AT_RISK_S / 2, NOW_S, taken=False)] * 2
    found = risk_of(after(1, 0), there, NOW_S, HALF_LIFE_H)
    assert (found.told, found.taken) == (3, 1)
    assert found.losses_an_hour < risk_of(after(1, 0), (), NOW_S, HALF_LIFE_H).losses_an_hour


def test_a_pool_remembers_the_newest_words_alone() -> None:
    assert len(after(40, 0).at_risk) == 32
    assert Risk(0.0).share(AT_RISK_S) == 0.0
    assert share(replace(after(32, 0), at_risk=())) == share(None)
