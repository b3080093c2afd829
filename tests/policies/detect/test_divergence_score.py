"""The detector against labelled traces, and the measure that it is held against. `make bench-detect` has more."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from benchmarks.rig.divergence.diverging import DIVERGING, SAVE_STEPS
from benchmarks.rig.divergence.families import CAUSES
from benchmarks.rig.divergence.healthy import Family
from benchmarks.rig.divergence.recorded import as_trace
from benchmarks.rig.divergence.score import LINE_POINTS, Outcome, Score, by_family, judge, judge_by_line, score
from benchmarks.rig.divergence.signals import Setting, points
from benchmarks.rig.divergence.traces import LOGGING_STEPS, Trace, trace, traces
from policies.detect.divergence import Point
from tests.generators.recorded import Label

SETTING = Setting(seed=1)
EACH_HEALTHY, EACH_DIVERGING = 2, len(LOGGING_STEPS) // 2  # traces a family
EVERY_HEALTHY = [family for cause in CAUSES.values() for family in cause.healthy]
EVERY_DIVERGING = [family for cause in CAUSES.values() for family in cause.diverging]
EVERY_FAMILY = [family for cause in CAUSES.values() for family in cause.families]


# They share what takes long: the judging.
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("divergence score")]


@pytest.fixture(scope="module")
def outcomes() -> list[Outcome]:
    made = traces(SETTING, EACH_HEALTHY, EACH_DIVERGING, healthy=EVERY_HEALTHY, diverging=EVERY_DIVERGING)
    return [judge(one) for one in made]


@pytest.fixture(scope="module")
def total(outcomes: list[Outcome]) -> Score:
    return score(outcomes)


def test_hardly_a_divergence_is_missed(outcomes: list[Outcome], total: Score) -> None:
    """Of every family some are caught; of all, at most one in a hundred is missed."""
    found = by_family([one for one in outcomes if one.trace.onset_step is not None])
    assert found.keys() == {family.__name__ for family in EVERY_DIVERGING}
    assert [family for family, ones in found.items() if not any(one.caught for one in ones)] == []
    assert total.missed <= total.diverging_runs // 100


def test_healthy_runs_are_left_alone(total: Score) -> None:
    """The aim; what there is of them are tasks that become harder at once, and adapters that begin at nothing."""
    assert total.healthy_points > 40_000
    assert total.false_trips_per_1000 <= 0.1


def test_divergence_is_told_within_a_dozen_points(outcomes: list[Outcome]) -> None:
    """The aim is eight. Five of seven points are what it takes not to be taken in by spikes. Of one prompt a step
    no dozen points say anything: there it takes as long as the change itself."""
    slow = {family.__name__ for family in CAUSES["one prompt a step"].diverging}
    usual = score([one for one in outcomes if one.trace.family not in slow]).delay_points_median
    of_one_prompt = score([one for one in outcomes if one.trace.family in slow]).delay_points_median
    assert usual is not None
    assert usual <= 12
    assert of_one_prompt is not None
    assert of_one_prompt <= 70


def test_the_target_is_from_before_the_onset_and_not_from_the_stone_age(total: Score) -> None:
    assert total.target_before_onset_share is not None
    assert total.target_before_onset_share >= 0.99
    assert total.without_target == 0
    assert total.good_steps_thrown_away_median is not None
    assert total.good_steps_thrown_away_median <= 3 * SAVE_STEPS


def test_no_two_families_have_one_name() -> None:
    assert len({family.__name__ for family in EVERY_FAMILY}) == len(EVERY_FAMILY)


@pytest.mark.parametrize("family", EVERY_FAMILY)
def test_a_trace_is_always_the_same_and_in_order(family: Family) -> None:
    one, again = trace(family, SETTING, 3), trace(family, SETTING, 3)
    assert one == again
    assert one != trace(family, SETTING, 9)
    every, steps = one.logging_steps, {point.step for point in one.points}
    assert steps == set(range(every, max(steps) + 1, every))
    assert all(value is None or np.isfinite(value) for point in one.points for value in point.values.values())
    assert (one.onset_step is not None) == (family in EVERY_DIVERGING)
    least_after = 100 if family in DIVERGING else 20 * every
    assert one.onset_step is None or one.onset_step + least_after < max(steps)


def outcome(
    onset_step: int | None, trip_step: int | None, told_onset_step: int | None, kept: tuple[int, ...] | None = None
) -> Outcome:
    told = tuple(Point(step, {}) for step in range(10, 310, 10))
    kept = tuple(range(SAVE_STEPS, trip_step or 301, SAVE_STEPS)) if kept is None else kept
    return Outcome(Trace("made", told, onset_step, 10, None), trip_step, told_onset_step, kept)


@pytest.mark.parametrize(
    ("made", "target", "is_good"),
    [
        (outcome(101, 200, 101), 100, True),
        (outcome(100, 200, 100), 75, True),  # the update of step 100 is in the checkpoint of step 100
        (outcome(100, 200, 101), 100, False),
        (outcome(126, 200, 90), 75, True),
        (outcome(20, 200, 26), 25, False),
        (outcome(20, 200, 1), 0, True),
        (outcome(101, 200, 101, kept=(75, 125, 150)), 75, True),
        (outcome(101, 200, 101, kept=(125, 150)), 0, False),  # it was saved, and retention has taken it
    ],
)
def test_a_target_is_good_where_no_bad_update_is_in_it(made: Outcome, target: int, is_good: bool) -> None:
    assert (made.target_step, made.target_is_good) == (target, is_good)


def test_the_score_counts_what_it_says() -> None:
    caught, early, missed = outcome(101, 150, 90), outcome(101, 80, 60), outcome(101, None, None)
    false, quiet = outcome(None, 200, 190), outcome(None, None, None)
    assert score([caught, early, missed, false, quiet]) == Score(
        healthy_runs=2,
        diverging_runs=3,
        missed=1,
        false_trips=2,
        healthy_tripped=1,
        healthy_steps=100 + 80 + 100 + 200 + 300,
        healthy_points=10 + 8 + 10 + 20 + 30,
        delay_points_median=5,  # 110 to 150
        delay_points_p90=5,
        target_before_onset_share=1.0,
        steps_thrown_away_median=75,
        good_steps_thrown_away_median=25,
        without_target=0,
    )
    assert score([outcome(101, 150, 90, kept=(125,))]).without_target == 1
    assert score([early]).false_trips_per_1000 == pytest.approx(1000 / 8)


def test_nine_of_ten_delays_are_no_longer_than_the_ninth_decile() -> None:
    caught = [outcome(101, 100 + 10 * delay, 90) for delay in range(1, 21)]
    assert score(caught).delay_points_p90 == 18


def test_a_line_trips_after_five_points_in_a_row_and_dates_from_the_first() -> None:
    told = tuple(
        Point(step, {"kl": kl}) for step, kl in enumerate([0.0, 2.0, 2.0, 0.5, None, 2.0, 3.0, 2.0, 2.0], 1)
    )
    made = Trace("made", told, 5, 1, None)
    found = judge_by_line(made, 1.0)
    assert LINE_POINTS == 5
    assert (found.trip_step, found.told_onset_step) == (9, 5)
    assert judge_by_line(made, 2.5).missed


def test_points_are_logged_as_trl_logs_them() -> None:
    nan = np.nan
    metrics = {
        "loss": np.array([1.0, 3.0, 5.0, nan, nan, nan, 7.0]),
        "kl": np.array([1.0, 3.0, np.inf, 3.0, 1.0, 1.0, 7.0]),
        "grad_norm": np.array([1.0, 3.0, 5.0, nan, nan, nan, 7.0]),
        "reward": np.zeros(7),
    }
    assert points(metrics, 2, absent=("reward",)) == (
        Point(2, {"loss": 2.0, "kl": 2.0, "grad_norm": 3.0}),
        Point(4, {"loss": 5.0, "kl": None, "grad_norm": None}),
        Point(6, {"loss": None, "kl": 1.0, "grad_norm": None}),
    )


def test_a_recorded_run_is_a_trace() -> None:
    label = Label(True, 15, 10, cause="", why="It broke.", settings={})
    told = (Point(10, {"kl": 0.5, "loss": None}), Point(20, {"kl": None}))
    rows: list[dict[str, Any]] = [{"step": 10, "kl": 0.5, "loss": None}, {"step": 20, "kl": np.nan}]
    assert as_trace("one", label, rows) == Trace("one", told, 15, 10, None)
