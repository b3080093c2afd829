"""Labelled traces of GRPO runs, healthy and diverging, from a seed.

They are made from what is known of such runs, and know nothing of the detector that is measured with them. A value
that is logged at step s was measured before that step's update: the weights that a bad update of step s has made
show from step s + 1 on, except for the gradient itself. The label is the step of the first bad update, so that the
newest untainted checkpoint is the newest of an earlier step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from zlib import crc32

import numpy as np

from benchmarks.rig.divergence.diverging import DIVERGING
from benchmarks.rig.divergence.healthy import HEALTHY, Family, Made
from benchmarks.rig.divergence.signals import Random, Setting, log, uniform
from grpo_orch.policies.detect.divergence import Point

LOGGING_STEPS = (1, 10, 1, 20, 1, 5)  # in turns


@dataclass(frozen=True, slots=True)
class Trace:
    """One run as logged, of a family or recorded, in which case `family` is its name. `onset_step`: of the first
    bad update, None for a healthy run; `limit`: the user's."""

    family: str
    points: tuple[Point, ...]
    onset_step: int | None
    logging_steps: int
    limit: float | None


def traces(
    setting: Setting,
    healthy_each: int,
    diverging_each: int,
    healthy: Sequence[Family] = HEALTHY,
    diverging: Sequence[Family] = DIVERGING,
) -> list[Trace]:
    """Return so many traces of each family."""
    wanted = [(family, healthy_each) for family in healthy] + [(family, diverging_each) for family in diverging]
    return [trace(family, setting, turn) for family, each in wanted for turn in range(each)]


def trace(family: Family, setting: Setting, turn: int) -> Trace:
    """Return the family's trace of that turn: always the same, whatever other families there are."""
    rng = np.random.default_rng([setting.seed, crc32(family.__name__.encode()), turn])
    logging_steps = LOGGING_STEPS[turn % len(LOGGING_STEPS)]
    made = family(rng, setting, logging_steps)
    limit = made.limit
    if made.limited and limit is None and rng.random() >= 0.5:
        limit = _limit(made, rng, setting)
    points = log(made.course, rng, setting, logging_steps)
    for _ in range(made.restarts):
        points = _made_again(points, rng)
    return Trace(family.__name__, points, made.onset_step, logging_steps, limit)


def _limit(made: Made, rng: Random, setting: Setting) -> float:
    """What a user who knows such runs would set: above all that a healthy one reaches with its noise."""
    usual = made.course.kl[: made.onset_step]
    highest = float(np.nanquantile(usual, 0.95)) * float(np.exp(3 * setting.kl_sigma[1]))
    return max(0.02, (highest - float(usual[0])) * uniform(rng, (1.2, 4.0)))


def _made_again(told: tuple[Point, ...], rng: Random) -> tuple[Point, ...]:
    """The points as they come from a trainer that was restarted a few steps back."""
    at = int(rng.integers(len(told) // 4, len(told)))
    return told[:at] + told[max(0, at - int(rng.integers(1, 10))) : at] + told[at:]
