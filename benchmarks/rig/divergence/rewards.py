"""Rewards that collapse and stay down although KL hardly shows it, and rewards that fall without harm."""

from __future__ import annotations

import numpy as np

from benchmarks.rig.divergence.healthy import Made, usual_kl
from benchmarks.rig.divergence.signals import Random, Setting, healthy, magnitude, ramp, uniform
from benchmarks.rig.divergence.texture import lived_in, some_length, some_onset

# Healthy


def deep_dips(rng: Random, _: Setting, logging_steps: int) -> Made:
    """A few points of next to no reward, and all is as before: a bad batch, or a grader that is down."""
    course = healthy(rng, usual_kl(rng, some_length(rng, logging_steps, (80.0, 600.0))))
    course.reward = np.maximum(course.reward, uniform(rng, (0.2, 0.6)))
    for _number in range(int(rng.integers(1, 4))):
        first = int(uniform(rng, (0.15, 0.85)) * course.steps)
        course.reward[first : first + int(rng.integers(1, 6)) * logging_steps] *= uniform(rng, (0.0, 0.4))
    return Made(lived_in(rng, course), limited=False)


def huge_wobble(rng: Random, _: Setting, logging_steps: int) -> Made:
    """The reward is anywhere, for points in a row: prompts of all difficulties, a few of them a step."""
    course = healthy(rng, usual_kl(rng, some_length(rng, logging_steps)))
    course.reward = 0.4 + 0.4 * course.reward
    return Made(lived_in(rng, course, wobble=(0.1, 0.22)), limited=False)


def like_evaluations(rng: Random, _: Setting, logging_steps: int) -> Made:
    """Every so often a point is of other prompts, with another reward."""
    course = healthy(rng, usual_kl(rng, some_length(rng, logging_steps)))
    every = int(rng.integers(4, 20)) * logging_steps
    others = np.arange(course.steps) % every < logging_steps * int(rng.integers(1, 4))
    course.reward = np.where(others, course.reward * uniform(rng, (0.0, 0.7)), course.reward)
    return Made(lived_in(rng, course), limited=False)


def harder_and_harder(rng: Random, _: Setting, logging_steps: int) -> Made:
    """A curriculum of several steps: at each the reward falls by a third to a half, and is partly earned again."""
    course = healthy(rng, usual_kl(rng, some_length(rng, logging_steps, (120.0, 600.0))))
    course.reward = np.maximum(course.reward, uniform(rng, (0.3, 0.7)))
    stages = int(rng.integers(2, 5))
    for stage in range(1, stages):
        since = np.maximum(0, np.arange(course.steps) - int(stage / stages * course.steps))
        lost = uniform(rng, (0.3, 0.5)) * (since > 0)
        regained = uniform(rng, (0.3, 0.9)) * (1 - np.exp(-since * stages * 2 / course.steps))
        course.reward = course.reward * (1 - lost * (1 - regained))
        course.length = np.minimum(0.8, course.length * (1 + uniform(rng, (0.0, 0.3)) * (since > 0)))
    return Made(lived_in(rng, course), limited=False)


# Diverging


def collapse_at_little_kl(rng: Random, _: Setting, logging_steps: int) -> Made:
    """The reward goes within some points, for good; KL rises tenfold with it, and stays small."""
    onset, over, steps = some_onset(rng, logging_steps, before=(25.0, 300.0), over=(1.0, 30.0), after=80)
    before = magnitude(rng, (3e-4, 3e-3))
    course = healthy(rng, usual_kl(rng, steps, before) + before / 5)
    course.reward = np.maximum(course.reward, uniform(rng, (0.25, 0.6)))
    course.reward *= 1 - uniform(rng, (0.85, 1.0)) * ramp(steps, onset, over)
    top = before * magnitude(rng, (8.0, 40.0))
    course.kl *= np.exp(
        np.log(np.maximum(top / course.kl, 1.0)) * ramp(steps, onset, over * uniform(rng, (0.7, 3.0)))
    )
    if rng.random() < 0.5:
        course.grad_norm *= np.exp(np.log(magnitude(rng, (3.0, 50.0))) * ramp(steps, onset - 1, over))
    if rng.random() < 0.5:
        course.length += (float(rng.choice([0.02, 1.0])) - course.length) * ramp(steps, onset, over)
    return Made(lived_in(rng, course), onset, limited=False)


def decay_at_little_kl(rng: Random, _: Setting, logging_steps: int) -> Made:
    """The same over a hundred points and more."""
    onset, over, steps = some_onset(rng, logging_steps, before=(40.0, 300.0), over=(40.0, 150.0), after=80)
    before = magnitude(rng, (3e-4, 3e-3))
    course = healthy(rng, usual_kl(rng, steps, before) + before / 5)
    course.reward = np.maximum(course.reward, uniform(rng, (0.3, 0.6)))
    course.reward *= 1 - uniform(rng, (0.9, 1.0)) * ramp(steps, onset, over)
    top = before * magnitude(rng, (10.0, 40.0))
    course.kl *= np.exp(np.log(np.maximum(top / course.kl, 1.0)) * ramp(steps, onset, over))
    course.entropy *= np.exp(np.log(float(rng.choice([0.1, 1.0, 3.0]))) * ramp(steps, onset, over))
    return Made(lived_in(rng, course), onset, limited=False)


REWARDS_HEALTHY = (deep_dips, huge_wobble, like_evaluations, harder_and_harder)
REWARDS_DIVERGING = (collapse_at_little_kl, decay_at_little_kl)
