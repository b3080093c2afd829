"""The detector on five families of synthetic runs; `make bench-detect` judges all of them, and the recorded runs.

Each proves what the recordings and the truth table do not: spikes in a row are no divergence; a reward that swings
with its prompts is no loss; a ramp over hundreds of steps is noticed; a weak early sign is not the onset; and a
reward of 0 or 1 that is lost over dozens of steps is noticed, mostly without KL.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from benchmarks.rig.divergence.diverging import SAVE_STEPS, slow_ramp
from benchmarks.rig.divergence.early_signs import lasting_sign_then_runaway
from benchmarks.rig.divergence.healthy import Family, clusters_of_spikes
from benchmarks.rig.divergence.one_prompt import one_prompt_goes_wild, one_prompt_in_epochs
from benchmarks.rig.divergence.score import Outcome, Score, judge, score
from benchmarks.rig.divergence.signals import Setting
from benchmarks.rig.divergence.traces import LOGGING_STEPS, Trace, trace
from grpo_orch.policies.detect.divergence import Point

SETTING = Setting(seed=1)
EACH = 2 * len(LOGGING_STEPS)  # traces of a family
HEALTHY = (clusters_of_spikes, one_prompt_in_epochs)


@dataclass(frozen=True, slots=True)
class AtMost:
    """Of a family's traces: those missed, points to the trip in the median, targets after the onset."""

    missed: int
    points: float
    bad_targets: int


DIVERGING: dict[Family, AtMost] = {
    slow_ramp: AtMost(missed=0, points=30, bad_targets=1),
    lasting_sign_then_runaway: AtMost(missed=0, points=12, bad_targets=0),
    one_prompt_goes_wild: AtMost(missed=1, points=70, bad_targets=1),
}


def outcomes(family: Family) -> list[Outcome]:
    return [judge(trace(family, SETTING, turn)) for turn in range(EACH)]


@pytest.mark.parametrize("family", HEALTHY)
def test_healthy_family_does_not_trip(family: Family) -> None:
    told = score(outcomes(family))
    assert told.healthy_points > 3000
    assert told.false_trips == 0


@pytest.mark.parametrize("family", DIVERGING)
def test_diverging_family_is_caught_in_time_and_dated(family: Family) -> None:
    found, limit = outcomes(family), DIVERGING[family]
    told = score(found)
    assert (told.false_trips, told.without_target) == (0, 0)
    assert told.missed <= limit.missed
    assert told.delay_points_median is not None
    assert told.delay_points_median <= limit.points
    assert sum(one.caught and not one.target_is_good for one in found) <= limit.bad_targets
    assert told.good_steps_thrown_away_median is not None
    assert told.good_steps_thrown_away_median <= 3 * SAVE_STEPS


def test_trace_follows_from_its_seed() -> None:
    for family in (*HEALTHY, *DIVERGING):
        one = trace(family, SETTING, 3)
        assert one == trace(family, SETTING, 3)
        assert one != trace(family, SETTING, 9)
        assert (one.onset_step is not None) == (family in DIVERGING)


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
        (outcome(20, 200, 1), 0, True),
        (outcome(101, 200, 101, kept=(125, 150)), 0, False),  # it was saved, and retention has taken it
    ],
)
def test_target_is_good_where_no_bad_update_is_in_it(made: Outcome, target: int, is_good: bool) -> None:
    assert (made.target_step, made.target_is_good) == (target, is_good)


def test_score_has_its_defined_value() -> None:
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
    assert score([outcome(101, 100 + 10 * delay, 90) for delay in range(1, 21)]).delay_points_p90 == 18
