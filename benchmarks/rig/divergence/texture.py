"""What real logs look like: rewards of every range that wander, KL of small batches, columns and rows with gaps,
runs of a few dozen points, restarts. `lived_in` gives any course that texture; the families here have little else.
"""

from __future__ import annotations

import numpy as np

from benchmarks.rig.divergence.diverging import run_away
from benchmarks.rig.divergence.healthy import Made, usual_kl
from benchmarks.rig.divergence.signals import (
    Course,
    Floats,
    Random,
    Setting,
    akin,
    healthy,
    magnitude,
    ramp,
    uniform,
)

NATS = (1e-3, 0.5)
WORTHS = (
    (0.0, 1.0),
    (0.0, 1.0),
    (0.0, 3.0),
    (-5.0, 10.0),
    (-1.0, 2.0),
    (0.0, 100.0),
)  # the least reward, the range
REWARD_AND_KL = frozenset({"reward", "kl"})
WITHOUT_REWARD = frozenset({"loss", "kl", "grad_norm"})
FEW = frozenset({"loss", "learning_rate", "grad_norm", "reward", "reward_std", "kl"})
OLDER = FEW | {"rewards/correct/mean", "completions/mean_length"}


def lived_in(
    rng: Random,
    course: Course,
    needs: frozenset[str] = REWARD_AND_KL,
    wobble: tuple[float, float] = (0.0, 0.04),
    batch_sigma: tuple[float, float] = (0.02, 0.4),
) -> Course:
    """Give the course the texture of a real log, in place, and return it. What a judge needs to see stays.

    Args:
        needs: columns that are logged whatever else is not.
        wobble: from which to draw sigma of the reward's wandering, as a share of its range.
        batch_sigma: from which to draw sigma of the KL's logarithm, as the batch is small.
    """
    course.reward = np.clip(course.reward + wandering(rng, course.steps, uniform(rng, wobble)), 0, 1)
    course.kl = course.kl * np.exp(magnitude(rng, batch_sigma) * rng.normal(size=course.steps))
    course.worth = WORTHS[int(rng.integers(len(WORTHS)))]
    kept = (None, None, None, OLDER, FEW, REWARD_AND_KL, WITHOUT_REWARD)[int(rng.integers(7))]
    course.only = kept if kept is None else kept | needs
    if kept is None:
        course.absent = course.absent | {
            name for name in ("entropy", "completions/clipped_ratio") if rng.random() < 0.3 and name not in needs
        }
    if rng.random() < 0.3:
        course.holes = uniform(rng, (0.003, 0.05))
    return course


def wandering(rng: Random, steps: int, sigma: float) -> Floats:
    """Noise of this sigma that goes on in its direction for a while."""
    return sigma * akin(rng.normal(size=steps), uniform(rng, (0.3, 0.93)))


def some_length(rng: Random, logging_steps: int, points: tuple[float, float] = (60.0, 600.0)) -> int:
    """Steps of a run of so many points, all powers of ten equally likely."""
    return int(magnitude(rng, points)) * logging_steps


def some_onset(
    rng: Random,
    logging_steps: int,
    before: tuple[float, float] = (20.0, 300.0),
    over: tuple[float, float] = (3.0, 50.0),
    after: int = 50,
) -> tuple[int, float, int]:
    """Return the onset, over how many steps it goes wrong, and the steps of the run, all drawn in points."""
    onset = int(magnitude(rng, before) * logging_steps) + int(rng.integers(1, logging_steps + 1))
    lasts = magnitude(rng, over) * logging_steps
    return onset, lasts, onset + int(lasts) + max(110, after * logging_steps)


def healthy_restarts(rng: Random) -> int:
    return int(rng.integers(1, 4)) if rng.random() < 0.15 else 0


# Healthy


def short_run(rng: Random, _: Setting, logging_steps: int) -> Made:
    """30 to 100 points, from the first of them on."""
    steps = some_length(rng, logging_steps, (30.0, 100.0))
    course = lived_in(rng, healthy(rng, usual_kl(rng, steps)), wobble=(0.0, 0.08))
    return Made(course, restarts=healthy_restarts(rng), limited=False)


def textured(rng: Random, _: Setting, logging_steps: int) -> Made:
    course = lived_in(rng, healthy(rng, usual_kl(rng, some_length(rng, logging_steps))), wobble=(0.0, 0.1))
    return Made(course, restarts=healthy_restarts(rng), limited=False)


def small_batch(rng: Random, _: Setting, logging_steps: int) -> Made:
    """A few completions a step: KL and reward are hardly more than noise."""
    course = healthy(rng, usual_kl(rng, some_length(rng, logging_steps)))
    return Made(lived_in(rng, course, wobble=(0.05, 0.15), batch_sigma=(0.4, 1.1)), limited=False)


def hardly_any_columns(rng: Random, _: Setting, logging_steps: int) -> Made:
    course = lived_in(rng, healthy(rng, usual_kl(rng, some_length(rng, logging_steps))))
    course.only = REWARD_AND_KL if rng.random() < 0.5 else WITHOUT_REWARD
    course.holes = uniform(rng, (0.0, 0.1))
    return Made(course, limited=False)


def learns_nothing(rng: Random, _: Setting, logging_steps: int) -> Made:
    """The reward stays where it was; the policy moves a little, and no harm is done."""
    course = healthy(rng, usual_kl(rng, some_length(rng, logging_steps), magnitude(rng, (1e-3, 0.3))))
    course.reward = np.full(course.steps, uniform(rng, (0.05, 0.8)))
    return Made(lived_in(rng, course, wobble=(0.01, 0.06)), limited=False)


# Diverging


def short_runaway(rng: Random, _: Setting, logging_steps: int) -> Made:
    onset = int(rng.integers(10, 45)) * logging_steps
    over = magnitude(rng, (2.0, 15.0)) * logging_steps
    steps = onset + int(over) + int(rng.integers(25, 45)) * logging_steps
    made = run_away(rng, healthy(rng, usual_kl(rng, steps)), onset, over)
    return Made(lived_in(rng, made.course), onset, limited=False)


def small_batch_runaway(rng: Random, _: Setting, logging_steps: int) -> Made:
    onset, over, steps = some_onset(rng, logging_steps)
    made = run_away(rng, healthy(rng, usual_kl(rng, steps)), onset, over)
    course = lived_in(rng, made.course, wobble=(0.05, 0.12), batch_sigma=(0.3, 0.7))
    return Made(course, onset, limited=False)


def runaway_in_few_columns(rng: Random, _: Setting, logging_steps: int) -> Made:
    """With loss and gradient at hand, both explode; with the reward alone, it falls or stays."""
    onset, over, steps = some_onset(rng, logging_steps)
    made = run_away(rng, healthy(rng, usual_kl(rng, steps)), onset, over)
    course = lived_in(rng, made.course)
    course.only = REWARD_AND_KL if rng.random() < 0.5 else WITHOUT_REWARD
    course.holes = uniform(rng, (0.0, 0.1))
    if "grad_norm" in course.only:
        course.grad_norm *= np.exp(np.log(magnitude(rng, (5.0, 100.0))) * ramp(steps, onset - 1, over))
    return Made(course, onset, limited=False)


def restarted_runaway(rng: Random, _: Setting, logging_steps: int) -> Made:
    onset, over, steps = some_onset(rng, logging_steps)
    made = run_away(rng, healthy(rng, usual_kl(rng, steps)), onset, over)
    return Made(lived_in(rng, made.course), onset, restarts=int(rng.integers(1, 4)), limited=False)


TEXTURE_HEALTHY = (short_run, textured, small_batch, hardly_any_columns, learns_nothing)
TEXTURE_DIVERGING = (short_runaway, small_batch_runaway, runaway_in_few_columns, restarted_runaway)
