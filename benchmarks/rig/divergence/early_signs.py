"""A weak sign in the first points, and hundreds of healthy steps after it.

What then goes wrong, if anything does, has its onset there, and not at the start.
"""

from __future__ import annotations

import numpy as np

from benchmarks.rig.divergence.diverging import run_away
from benchmarks.rig.divergence.healthy import Made, usual_kl
from benchmarks.rig.divergence.signals import Course, Floats, Random, Setting, healthy, magnitude, ramp, uniform
from benchmarks.rig.divergence.texture import lived_in, some_length, some_onset

LATE = (80.0, 400.0)  # points to the onset
NATS = (0.01, 0.8)

# Healthy


def passing_sign(rng: Random, _: Setting, logging_steps: int) -> Made:
    course = healthy(rng, _growing(rng, some_length(rng, logging_steps)))
    _sign(rng, course, logging_steps)
    return Made(lived_in(rng, course), limited=False)


def lasting_sign(rng: Random, _: Setting, logging_steps: int) -> Made:
    course = healthy(rng, _growing(rng, some_length(rng, logging_steps)))
    _moves_early(rng, course, logging_steps)
    return Made(lived_in(rng, course), limited=False)


# Diverging


def passing_sign_then_runaway(rng: Random, _: Setting, logging_steps: int) -> Made:
    onset, over, steps = some_onset(rng, logging_steps, LATE)
    made = run_away(rng, healthy(rng, _growing(rng, steps)), onset, over)
    _sign(rng, made.course, logging_steps)
    return Made(lived_in(rng, made.course), onset, limited=False)


def lasting_sign_then_runaway(rng: Random, _: Setting, logging_steps: int) -> Made:
    onset, over, steps = some_onset(rng, logging_steps, LATE)
    made = run_away(rng, healthy(rng, _growing(rng, steps)), onset, over)
    _moves_early(rng, made.course, logging_steps)
    return Made(lived_in(rng, made.course), onset, limited=False)


def lasting_sign_then_collapse(rng: Random, _: Setting, logging_steps: int) -> Made:
    """The reward goes for good, with the entropy or the lengths, and KL rises with them."""
    onset, over, steps = some_onset(rng, logging_steps, LATE, over=(2.0, 30.0), after=80)
    course = healthy(rng, 0.2 * _growing(rng, steps))
    _moves_early(rng, course, logging_steps)
    gone = ramp(steps, onset, over)
    course.reward = np.maximum(course.reward, uniform(rng, (0.3, 0.6))) * (1 - uniform(rng, (0.9, 1.0)) * gone)
    course.kl *= np.exp(np.log(magnitude(rng, (10.0, 100.0))) * gone)
    course.entropy *= np.exp(np.log(float(rng.choice([0.02, 4.0]))) * gone)
    return Made(lived_in(rng, course), onset, limited=False)


def _growing(rng: Random, steps: int) -> Floats:
    """KL that grows as usual, or evenly all the time."""
    top = magnitude(rng, NATS)
    evenly: Floats = top * np.arange(1, steps + 1) / steps
    return evenly if rng.random() < 0.4 else usual_kl(rng, steps, top)


def _sign(rng: Random, course: Course, logging_steps: int) -> None:
    """For some of the first points, KL, the gradients, the reward or the entropy are off."""
    first, lasts = int(rng.integers(1, 8)) * logging_steps, int(rng.integers(2, 7)) * logging_steps
    during = slice(first, first + lasts)
    kind = int(rng.integers(4))
    if kind == 0:
        course.kl[during] *= magnitude(rng, (4.0, 30.0))
    elif kind == 1:
        course.grad_norm[during] *= magnitude(rng, (4.0, 30.0))
    elif kind == 2:
        course.reward[during] *= uniform(rng, (0.2, 0.6))
    else:
        course.entropy[during] *= uniform(rng, (1.3, 2.0))
        course.kl[during] *= uniform(rng, (2.0, 5.0))


def _moves_early(rng: Random, course: Course, logging_steps: int) -> None:
    """Within the first points some of the metrics find another level, and stay there."""
    moved = ramp(course.steps, int(rng.integers(2, 15)) * logging_steps, uniform(rng, (2.0, 10.0)) * logging_steps)
    for kind in rng.choice(5, size=int(rng.integers(1, 4)), replace=False):
        if kind == 0:
            course.entropy *= np.exp(np.log(uniform(rng, (0.25, 1.6))) * moved)
        elif kind == 1:
            course.length = np.clip(course.length * np.exp(np.log(uniform(rng, (0.4, 2.2))) * moved), 0, 0.9)
        elif kind == 2:
            course.grad_norm *= np.exp(np.log(uniform(rng, (0.3, 5.0))) * moved)
        elif kind == 3:
            course.kl *= np.exp(np.log(uniform(rng, (2.0, 6.0))) * moved)
        else:
            course.reward *= 1 - uniform(rng, (0.1, 0.35)) * moved


EARLY_HEALTHY = (passing_sign, lasting_sign)
EARLY_DIVERGING = (passing_sign_then_runaway, lasting_sign_then_runaway, lasting_sign_then_collapse)
