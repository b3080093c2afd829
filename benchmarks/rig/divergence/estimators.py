"""What goes by the name of KL and is not TRL's: signed estimates, sums over the completion, other references.

The signed one is the mean log-ratio, k1 in http://joschu.net/blog/kl-approx.html: right on average, of either
sign, and mostly noise where the policies are close. The sum over a completion's tokens is what TRL's PPO logs as
`objective/kl`. TRL's own, a mean of exponentials, overflows half precision at a single token.
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
    healthy,
    magnitude,
    ramp,
    sigmoid,
    uniform,
)
from benchmarks.rig.divergence.texture import REWARD_AND_KL, lived_in, some_length, some_onset

SUMMED = "kl_sequence"
KL_AND_GRADIENTS = frozenset({"kl", "grad_norm"})

# Healthy


def signed(rng: Random, _: Setting, logging_steps: int) -> Made:
    """Within 0.3 of 0; negative for long, or all the time."""
    steps = some_length(rng, logging_steps)
    return Made(_signed(rng, lived_in(rng, healthy(rng, _small_and_signed(rng, steps)))), limited=False)


def summed(rng: Random, _: Setting, logging_steps: int) -> Made:
    """1 to 60 over the whole completion, and growing, as the reward does."""
    steps = some_length(rng, logging_steps)
    top, start = magnitude(rng, (3.0, 60.0)), uniform(rng, (0.0, 1.0))
    course = healthy(rng, start + usual_kl(rng, steps, top))
    course.kl_name = SUMMED
    return Made(lived_in(rng, course, frozenset({"reward", SUMMED}), batch_sigma=(0.02, 0.3)), limited=False)


def other_reference(rng: Random, _: Setting, logging_steps: int) -> Made:
    """0.5 to 5 nats from the start on: up or down by half, in its own time."""
    steps = some_length(rng, logging_steps)
    moved = sigmoid(steps, uniform(rng, (0.0, 0.8)) * steps, uniform(rng, (0.02, 0.3)) * steps)
    kl = uniform(rng, (0.5, 5.0)) * np.exp(np.log(uniform(rng, (0.5, 1.5))) * moved)
    return Made(lived_in(rng, healthy(rng, kl), batch_sigma=(0.02, 0.25)), limited=False)


def overflowing(rng: Random, _: Setting, logging_steps: int) -> Made:
    """The KL is infinite at some step in most points of a stretch; beta is 0 or next to it, and gradients are
    finite."""
    course = healthy(rng, usual_kl(rng, some_length(rng, logging_steps)))
    _overflow(rng, course, int(uniform(rng, (0.05, 0.6)) * course.steps), logging_steps)
    return Made(lived_in(rng, course, KL_AND_GRADIENTS), limited=False)


# Diverging


def signed_runs_away(rng: Random, _: Setting, logging_steps: int) -> Made:
    onset, over, steps = some_onset(rng, logging_steps, over=(3.0, 60.0))
    return _signed_breaks(rng, onset, over, steps, magnitude(rng, (3.0, 80.0)))


def signed_sinks(rng: Random, _: Setting, logging_steps: int) -> Made:
    """What the sampler made is what the policy no longer would: the estimate goes far below 0."""
    onset, over, steps = some_onset(rng, logging_steps, over=(3.0, 60.0))
    return _signed_breaks(rng, onset, over, steps, -magnitude(rng, (2.0, 50.0)))


def summed_runs_away(rng: Random, _: Setting, logging_steps: int) -> Made:
    """From tens to hundreds and thousands over the completion, and the reward goes."""
    onset, over, steps = some_onset(rng, logging_steps, over=(4.0, 60.0))
    course = healthy(rng, uniform(rng, (0.2, 1.0)) + usual_kl(rng, steps, magnitude(rng, (2.0, 40.0))))
    made = run_away(rng, course, onset, over, top=course.kl[onset] * magnitude(rng, (15.0, 200.0)))
    course = made.course
    course.kl_name = SUMMED
    course.reward *= 1 - uniform(rng, (0.5, 1.0)) * ramp(steps, onset + int(over / 2), over)
    return Made(lived_in(rng, course, frozenset({"reward", SUMMED})), onset, limited=False)


def other_reference_runs_away(rng: Random, _: Setting, logging_steps: int) -> Made:
    onset, over, steps = some_onset(rng, logging_steps)
    kl = uniform(rng, (0.5, 5.0)) * np.linspace(1, uniform(rng, (0.5, 1.5)), steps)
    made = run_away(rng, healthy(rng, kl), onset, over, top=kl[onset] * magnitude(rng, (8.0, 100.0)))
    return Made(lived_in(rng, made.course), onset, limited=False)


def overflowing_runs_away(rng: Random, _: Setting, logging_steps: int) -> Made:
    """The KL grows from the onset on, where it is a number."""
    onset, over, steps = some_onset(rng, logging_steps)
    course = run_away(rng, healthy(rng, usual_kl(rng, steps)), onset, over).course
    _overflow(rng, course, onset, logging_steps)
    return Made(lived_in(rng, course, KL_AND_GRADIENTS | {"reward"}), onset, limited=False)


def _overflow(rng: Random, course: Course, since: int, logging_steps: int) -> None:
    """At a point in a while until then, and from then on for long at a third to three quarters of them."""
    at = np.arange(course.steps)
    there = (at >= since) & (at < since + uniform(rng, (0.1, 0.4)) * course.steps)
    of_points = np.where(there, uniform(rng, (0.3, 0.75)), uniform(rng, (0.0, 0.02)))
    course.overflows = 1 - (1 - of_points) ** (1 / logging_steps)


def _small_and_signed(rng: Random, steps: int) -> Floats:
    share = np.arange(1, steps + 1) / steps
    kl = uniform(rng, (-0.12, 0.12)) * share + uniform(rng, (-0.04, 0.04)) * np.sin(
        uniform(rng, (2.0, 12.0)) * share
    )
    return np.asarray(kl)


def _signed(rng: Random, course: Course) -> Course:
    course.around = np.full(course.steps, magnitude(rng, (5e-4, 0.05)))
    return course


def _signed_breaks(rng: Random, onset: int, over: float, steps: int, top: float) -> Made:
    """The estimate goes to `top`, faster and faster; the reward goes with it, and often the gradients."""
    course = healthy(rng, _small_and_signed(rng, steps))
    gone = ramp(steps, onset, over)
    course.kl = course.kl + top * gone ** uniform(rng, (1.5, 4.0))
    course.reward *= 1 - uniform(rng, (0.5, 1.0)) * ramp(steps, onset + int(uniform(rng, (0.2, 0.8)) * over), over)
    if rng.random() < 0.6:
        course.grad_norm *= np.exp(np.log(magnitude(rng, (5.0, 100.0))) * gone)
    course.entropy *= np.exp(np.log(float(rng.choice([0.1, 1.0, 4.0]))) * gone)
    return Made(_signed(rng, lived_in(rng, course, REWARD_AND_KL)), onset, limited=False)


ESTIMATORS_HEALTHY = (signed, summed, other_reference, overflowing)
ESTIMATORS_DIVERGING = (
    signed_runs_away,
    signed_sinks,
    summed_runs_away,
    other_reference_runs_away,
    overflowing_runs_away,
)
