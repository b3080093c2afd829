"""The statistics of one signal: what shifts it and what does not, and since when it is said to have shifted."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.detect.signals import (
    BRIEF_POINTS,
    HUGE,
    LONG_POINTS,
    Series,
    Shift,
    fall,
    follow_series,
    rise,
    shift,
)

FACTOR_OF_E = 1.0


def followed(values: Sequence[float], gap: int = 1) -> Series:
    series = Series()
    for i, value in enumerate(values, start=1):
        series = follow_series(series, i * gap, value)
    return series


def risen(values: Sequence[float], points: int = BRIEF_POINTS, gap: int = 1) -> Shift | None:
    return shift(followed(values, gap), 1.0, points, FACTOR_OF_E)


def noisy(seed: int, points: int, sigma: float) -> list[float]:
    drawn = random.Random(seed)
    return [drawn.gauss(0.0, sigma) for _ in range(points)]


@pytest.mark.parametrize("points", [3, 8, 30, 300, 10_000])
def test_all_points_are_remembered_in_blocks_that_grow_with_their_age(points: int) -> None:
    series = followed(range(points))
    # The median of the last points belongs to the one in their middle; while the window grows, to every other.
    assert sum(series.sizes) == (points - BRIEF_POINTS // 2 if points >= BRIEF_POINTS else (points + 1) // 2)
    assert list(series.sizes) == sorted(series.sizes, reverse=True)
    assert list(series.ends) == sorted(set(series.ends))
    assert len(series.sizes) <= 75
    for size, end in zip(series.sizes, series.ends, strict=True):
        assert size <= max(1, (points - end + size) / 3)


def test_a_block_is_the_mean_of_its_medians_and_a_median_is_of_the_point_in_its_middle() -> None:
    series = followed([*range(1, 41)])
    assert series.levels[-1] == series.ends[-1] == 37
    for size, end, level in zip(series.sizes[3:], series.ends[3:], series.levels[3:], strict=True):
        assert level == pytest.approx(end - (size - 1) / 2)


@pytest.mark.parametrize("wild", [1, 2, 3])
def test_up_to_three_wild_points_in_a_row_shift_nothing(wild: int) -> None:
    for points in (BRIEF_POINTS, LONG_POINTS):
        assert risen([*noisy(1, 60, 0.2), *[7.0] * wild], points) is None


def test_what_stays_shifts_it_once_all_but_two_of_the_points_say_so() -> None:
    calm = noisy(2, 60, 0.2)
    for points in (BRIEF_POINTS, LONG_POINTS):
        assert risen([*calm, *[3.0] * (points - 3)], points) is None
        found = risen([*calm, *[3.0] * (points - 2)], points)
        assert found is not None
        assert found.by == pytest.approx(3.0, abs=0.4)
        assert found.calm == pytest.approx(0.0, abs=0.2)


def test_a_fall_is_a_rise_upside_down() -> None:
    values = [*noisy(3, 80, 0.1), *[2.5] * 8]
    up = shift(followed(values), 1.0, BRIEF_POINTS, FACTOR_OF_E)
    down = shift(followed([-value for value in values]), -1.0, BRIEF_POINTS, FACTOR_OF_E)
    assert up is not None
    assert down is not None
    assert (up.by, up.calm, up.onset_step) == (down.by, -down.calm, down.onset_step)


@pytest.mark.parametrize(
    "grown",
    [lambda n: n, math.sqrt, lambda n: 1 - math.exp(-n / 200), lambda n: math.log(1 + n / 10)],
    ids=["linear", "root", "saturating", "logarithmic"],
)
@pytest.mark.parametrize("gap", [1, 20])
def test_concave_growth_is_no_shift_however_far_it_goes(grown: object, gap: int) -> None:
    assert callable(grown)
    series = Series()
    for n, noise in enumerate(noisy(4, 1500, 0.1), start=1):
        series = follow_series(series, n * gap, math.log(1e-5 * grown(n)) + noise)
        assert shift(series, 1.0, BRIEF_POINTS, FACTOR_OF_E) is None


@pytest.mark.parametrize("doubling", [8, 30, 100])
def test_growth_that_does_not_slow_down_is_a_shift(doubling: int) -> None:
    calm = noisy(5, 300, 0.1)
    found = risen([*calm, *(n * math.log(2) / doubling for n in range(4 * doubling))])
    assert found is not None
    assert 300 - 2 * doubling <= found.onset_step <= 300


def test_the_scale_of_a_signal_does_not_matter() -> None:
    values = [*noisy(6, 100, 0.2), *(n / 10 for n in range(40))]
    one, other = risen(values), risen([value - 11.5 for value in values])
    assert one is not None
    assert other is not None
    assert one.by == pytest.approx(other.by, abs=1e-3)
    assert one.onset_step == other.onset_step


def test_levels_under_the_floor_are_at_the_floor() -> None:
    series = followed([*[-12.0] * 50, *[-4.0] * 9])
    floored = shift(series, 1.0, LONG_POINTS, FACTOR_OF_E, floor=-5.5)
    assert floored is not None
    assert floored.by == pytest.approx(1.5, abs=0.2)
    assert shift(series, 1.0, LONG_POINTS, FACTOR_OF_E, floor=-4.5) is None


def test_a_start_far_under_the_floor_is_not_what_calm_was() -> None:
    found = shift(followed([*[-13.8] * 8, *[-4.0] * 300, *[0.0] * 7]), 1.0, BRIEF_POINTS, FACTOR_OF_E, floor=-5.3)
    assert found is not None
    assert found.calm == -4.0
    assert found.onset_step > 280


def test_a_bump_in_the_beginning_is_forgotten() -> None:
    bump = [*[0.0] * 20, *[3.0] * 20]
    assert risen([*bump, *[0.0] * 60, *[3.0] * 7]) is None
    assert risen([*bump, *[0.0] * 1200, *[3.0] * 7]) is not None


@pytest.mark.parametrize("gap", [1, 10, 20])
@pytest.mark.parametrize("changed", [40, 137, 600])
def test_a_sudden_change_is_dated_to_the_point_before_it_or_little_earlier(changed: int, gap: int) -> None:
    found = risen([*noisy(7, changed, 0.2), *[3.0] * 7], gap=gap)
    assert found is not None
    assert (changed - 12) * gap <= found.onset_step < (changed + 1) * gap
    assert found.onset_step <= found.calm_step <= changed * gap


def test_what_swings_with_growing_amplitude_did_not_begin_at_the_last_trough() -> None:
    swings = [n / 40 * (1 + 1.2 * math.sin(n / 4)) for n in range(185)]
    found = risen([*noisy(8, 200, 0.1), *swings])
    assert found is not None
    assert found.onset_step <= 250  # the trough before, of the same depth, is at 320


def test_a_rise_and_a_fall_in_the_signals_own_unit() -> None:
    up = rise(followed([*[0.2] * 40, *[0.9] * 9]), 0.5, LONG_POINTS)
    assert (round(up.by, 3), up.calm) == (0.4, 0.5)
    down = fall(followed([*[8.0] * 40, *[2.0] * 9]), 8.0, 7.0, LONG_POINTS)
    assert (down.by, down.calm) == (6.0, 7.0)
    assert 30 <= up.onset_step == down.onset_step <= up.calm_step == down.calm_step <= 40


def test_one_that_was_never_calm_began_with_the_run() -> None:
    assert rise(followed([0.9] * 30), 0.5, LONG_POINTS).onset_step == 0


def test_the_best_level_must_be_sustained_and_fades() -> None:
    series = followed([*[1.0] * 30, *[9.0] * 3, *[1.0] * 10])
    assert series.best == 1.0
    series = followed([*[1.0] * 30, *[9.0] * 12, *[1.0] * 10])
    assert 8.5 < series.best < 9.0
    assert followed([*[9.0] * 12, *[1.0] * 2000]).best < 1.2


def test_wild_points_hardly_count_in_the_wobble() -> None:
    calm, wild = noisy(9, 200, 0.1), noisy(9, 200, 0.1)
    wild[100::20] = [50.0] * 5
    assert followed(calm).wobble == pytest.approx(0.08, abs=0.04)
    assert followed(wild).wobble < 3 * followed(calm).wobble


@given(st.lists(st.floats(allow_nan=False, allow_infinity=True), max_size=40), st.sampled_from([1.0, -1.0]))
@settings(max_examples=100, deadline=None)
def test_nothing_is_too_large_to_follow(values: list[float], sign: float) -> None:
    series = followed(values)
    found = shift(series, sign, BRIEF_POINTS, FACTOR_OF_E)
    assert found is None or (math.isfinite(found.by) and 0 <= found.onset_step <= len(values))
    assert all(abs(level) <= HUGE for level in series.levels)
