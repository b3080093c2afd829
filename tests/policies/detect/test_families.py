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
from benchmarks.rig.divergence.score import Outcome, judge, score
from benchmarks.rig.divergence.signals import Setting
from benchmarks.rig.divergence.traces import LOGGING_STEPS, trace

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
