"""Intervals against published values, and against what happens when all outcomes are gone through."""

from __future__ import annotations

from math import comb

import pytest

from grpo_orch.policies.evaluation import intervals


@pytest.mark.parametrize(
    ("count", "of", "low", "high"),
    # Newcombe, Statistics in Medicine 17 (1998), pages 857-872, table I: the score method.
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_a_share_has_the_published_interval(count: int, of: int, low: float, high: float) -> None:
    found = intervals.share(count, of)
    assert (found.low, found.high) == pytest.approx((low, high), abs=5e-5)
    assert found.value == count / of


@pytest.mark.parametrize("of", [1, 29, 500, 100_000])
def test_of_none_and_of_all_the_interval_holds_the_share(of: int) -> None:
    none, every = intervals.share(0, of), intervals.share(of, of)
    assert (none.low, none.value, every.value, every.high) == (0.0, 0.0, 1.0, 1.0)
    assert none.high == pytest.approx(1 - every.low)
    apart = intervals.shares_apart([False] * of, [True] * of)
    assert apart.low < apart.value == apart.high == 1.0


@pytest.mark.parametrize(
    "cells",  # probabilities: both, gained, lost, neither
    [(0.3, 0.2, 0.1, 0.4), (0.05, 0.1, 0.05, 0.8), (0.6, 0.15, 0.15, 0.1), (0.25, 0.25, 0.25, 0.25)],
)
def test_difference_interval_covers_at_its_stated_rate(cells: tuple[float, ...]) -> None:
    size, covered = 24, 0.0
    both, gained, lost, neither = cells
    for a in range(size + 1):
        for b in range(size + 1 - a):
            for c in range(size + 1 - a - b):
                d = size - a - b - c
                after = [True] * (a + b) + [False] * (c + d)
                before = [True] * a + [False] * b + [True] * c + [False] * d
                found = intervals.shares_apart(before, after)
                assert found.value == pytest.approx((b - c) / size)
                if found.low <= gained - lost <= found.high:
                    ways = comb(size, a) * comb(size - a, b) * comb(size - a - b, c)
                    covered += ways * both**a * gained**b * lost**c * neither**d
    assert 0.94 < covered < 0.99


def test_shared_samples_narrow_the_difference_interval() -> None:
    before = [True] * 50 + [False] * 50
    after = [True] * 60 + [False] * 40
    found = intervals.shares_apart(before, after)
    assert found.low > 0
    assert intervals.share(50, 100).high > intervals.share(60, 100).low


def test_means_are_paired_too() -> None:
    before = [0.0, 1.0, 2.0, 3.0]
    after = [0.5, 1.5, 2.5, 3.6]
    alone, apart = intervals.mean(before), intervals.means_apart(before, after)
    assert alone is not None
    assert (alone.value, alone.low) == pytest.approx((1.5, 1.5 - 1.959964 * (5 / 3 / 4) ** 0.5))
    assert apart is not None
    assert apart.low > 0.4
    assert intervals.mean([2.0]) == intervals.Estimate(2.0, 2.0, 2.0)


def test_values_that_are_missing_are_in_no_mean() -> None:
    assert intervals.mean([None, None]) is None
    assert intervals.mean([None, 1.0, 2.0]) == intervals.mean([1.0, 2.0])
    assert intervals.means_apart([None, 1.0, 2.0], [5.0, None, 4.0]) == intervals.Estimate(2.0, 2.0, 2.0)
    assert intervals.means_apart([None], [1.0]) is None
