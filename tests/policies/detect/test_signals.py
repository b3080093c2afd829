"""The statistics of one signal: what its past explains and what not, and since when it is said to have changed."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.detect.signals import (
    HUGE,
    PAST_POINTS,
    WINDOW_POINTS,
    Series,
    around,
    dated,
    explained,
    follow_series,
)


def followed(values: Sequence[float], gap: int = 1) -> Series:
    series = Series()
    for i, value in enumerate(values, start=1):
        series = follow_series(series, i * gap, value)
    return series


def risen(values: Sequence[float]) -> float:
    series = followed(values)
    return series.sustained(1.0) - explained(series, 1.0)


def onset(values: Sequence[float], by: float, gap: int = 1) -> int:
    return dated(followed(values, gap), 1.0, by).onset_step


def noisy(seed: int, points: int, sigma: float) -> list[float]:
    drawn = random.Random(seed)
    return [drawn.gauss(0.0, sigma) for _ in range(points)]


@pytest.mark.parametrize("points", [3, 8, 30, 300, 10_000])
def test_all_points_are_remembered_in_blocks_that_grow_with_their_age(points: int) -> None:
    series = followed(range(points))
    assert sum(series.sizes) == points
    assert list(series.sizes) == sorted(series.sizes, reverse=True)
    assert list(series.ends) == sorted(set(series.ends))
    assert len(series.sizes) <= 75
    for size, end in zip(series.sizes, series.ends, strict=True):
        assert size <= max(1, (points - end + size) / 3)


@pytest.mark.parametrize("wild", [1, 2, 4])
def test_up_to_four_wild_points_of_seven_change_nothing(wild: int) -> None:
    assert risen([*noisy(1, 60, 0.2), *[7.0] * wild]) < 1.0
    assert risen([*noisy(1, 60, 0.2), *[7.0] * 5]) > 6.0


def test_a_fall_is_a_rise_upside_down() -> None:
    values = [*noisy(3, 80, 0.1), *[2.5] * 8]
    up, down = followed(values), followed([-value for value in values])
    # The lower median of an even number is the upper one upside down: early medians differ.
    assert dated(up, 1.0, 2.5).onset_step == dated(down, -1.0, 2.5).onset_step


@pytest.mark.parametrize(
    "grown",
    [lambda n: n, math.sqrt, lambda n: 1 - math.exp(-n / 200), lambda n: math.log(1 + n / 10)],
    ids=["linear", "root", "saturating", "logarithmic"],
)
def test_concave_growth_is_explained_however_far_it_goes(grown: Callable[[int], float]) -> None:
    series = Series()
    for n, noise in enumerate(noisy(4, 1500, 0.1), start=1):
        series = follow_series(series, n, math.log(1e-5 * grown(n)) + noise)
        assert series.sustained(1.0) - explained(series, 1.0) < 1.0


def test_what_a_run_has_lived_with_is_its_past() -> None:
    calm = [*[-5.0] * 50, *[0.0] * 2 * PAST_POINTS]
    assert risen([*calm, *[1.5] * WINDOW_POINTS]) == pytest.approx(1.5, abs=0.1)


@pytest.mark.parametrize("doubling", [8, 30])
def test_a_ramp_is_dated_to_its_foot_however_long_it_took(doubling: int) -> None:
    ramp = [*noisy(5, 300, 0.1), *(n * math.log(2) / doubling for n in range(5 * doubling))]
    assert 300 - 3 * doubling <= onset(ramp, risen(ramp)) <= 300


@pytest.mark.parametrize("gap", [1, 10, 20])
@pytest.mark.parametrize("changed", [40, 137, 600])
def test_a_sudden_change_is_dated_to_the_point_before_it_or_little_earlier(changed: int, gap: int) -> None:
    values = [*noisy(7, changed, 0.2), *[3.0] * 7]
    assert (changed - 16) * gap <= onset(values, 3.0, gap) <= changed * gap


def test_what_swings_with_growing_amplitude_did_not_begin_at_the_last_trough() -> None:
    swings = [n / 40 * (1 + 1.2 * math.sin(n / 4)) for n in range(185)]
    assert onset([*noisy(8, 200, 0.1), *swings], 4.0) <= 290  # the trough before, of the same depth, is at 320


def test_what_was_long_ago_is_not_the_same_change() -> None:
    values = [*[3.0] * 50, *[0.0] * 30, *[3.0] * 20]
    assert 70 <= onset(values, 3.0) <= 80


def test_one_that_was_never_calm_began_with_the_run() -> None:
    assert onset([0.9] * 30, 0.5) == 0


def test_the_levels_around_a_change() -> None:
    before, after = around(followed([*[1.0] * 50, *[5.0] * 20]), 20)
    assert before < 2.0
    assert after > 4.0


def test_the_wobble_is_noise_without_trend() -> None:
    flat, steep = noisy(9, 400, 0.1), [n / 10 + noise for n, noise in enumerate(noisy(9, 400, 0.1))]
    assert followed(flat).wobble == pytest.approx(0.08, abs=0.02)
    assert followed(steep).wobble == pytest.approx(0.08, abs=0.02)
    flat[100::20] = [50.0] * 15
    assert followed(flat).wobble < 0.25


@given(st.lists(st.floats(allow_nan=False, allow_infinity=True), max_size=40), st.sampled_from([1.0, -1.0]))
@settings(max_examples=100, deadline=None)
def test_nothing_is_too_large_to_follow(values: list[float], sign: float) -> None:
    series = followed(values)
    assert math.isfinite(explained(series, sign))
    if len(values) >= WINDOW_POINTS:
        found = dated(series, sign, 1.0)
        assert math.isfinite(found.calm)
        assert 0 <= found.onset_step <= len(values)
    assert all(abs(level) <= HUGE for level in series.levels)
