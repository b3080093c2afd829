"""A score of the true task beside a reward that is tricked, and beside one that is not."""

from __future__ import annotations

import numpy as np

from benchmarks.rig.divergence.healthy import Made, usual_kl
from benchmarks.rig.divergence.signals import WITNESS, Course, Random, Setting, healthy, ramp, uniform
from benchmarks.rig.divergence.texture import REWARD_AND_KL, lived_in, some_length, some_onset, wandering

NEEDS = REWARD_AND_KL | {WITNESS}

# Healthy


def witness_that_wanders(rng: Random, _: Setting, logging_steps: int) -> Made:
    """The reward rises, and with some of it the witness: its prompts are harder and easier for a while."""
    course = healthy(rng, usual_kl(rng, some_length(rng, logging_steps)))
    some = uniform(rng, (0.0, 0.8))
    wander = wandering(rng, course.steps, uniform(rng, (0.0, 0.04)))
    course.witness = np.clip(0.3 + some * (course.reward - course.reward[0]) + wander, 0, 1)
    return Made(lived_in(rng, course, NEEDS), limited=False)


def witness_that_dips(rng: Random, _: Setting, logging_steps: int) -> Made:
    """While the form is learnt the answers are worse, for some points."""
    course = healthy(rng, usual_kl(rng, some_length(rng, logging_steps, (120.0, 600.0))))
    first = int(uniform(rng, (0.2, 0.6)) * course.steps)
    worse = slice(first, first + int(rng.integers(4, 15)) * logging_steps)
    course.reward = 0.2 + 0.3 * course.reward + 0.4 * ramp(course.steps, first, 5.0 * logging_steps)
    course.witness = 0.2 + 0.4 * course.reward
    course.witness[worse] *= uniform(rng, (0.2, 0.6))
    return Made(lived_in(rng, course, NEEDS), limited=False)


def witness_of_harder_tasks(rng: Random, _: Setting, logging_steps: int) -> Made:
    """Both fall where the task becomes harder, and are partly earned again."""
    course = healthy(rng, usual_kl(rng, some_length(rng, logging_steps, (120.0, 600.0))))
    since = np.maximum(0, np.arange(course.steps) - int(uniform(rng, (0.3, 0.7)) * course.steps))
    regained = uniform(rng, (0.4, 0.9)) * (1 - np.exp(-since * 6 / course.steps))
    course.reward = np.maximum(course.reward, 0.4) * (1 - uniform(rng, (0.2, 0.4)) * (since > 0) * (1 - regained))
    course.witness = 0.8 * course.reward
    return Made(lived_in(rng, course, NEEDS), limited=False)


# Diverging


def tricked(rng: Random, _: Setting, logging_steps: int) -> Made:
    """Something pays that is not the task: the reward rises, the true score falls to next to nothing."""
    onset, over, steps = some_onset(rng, logging_steps, before=(10.0, 200.0), over=(3.0, 60.0), after=80)
    return _tricked(rng, onset, over, steps, lost=(0.7, 1.0), won=(0.2, 0.5))


def tricked_in_the_end(rng: Random, _: Setting, logging_steps: int) -> Made:
    """Both rise until what still can be won is won by tricks: slowly, and the true score is half lost."""
    onset, over, steps = some_onset(rng, logging_steps, before=(40.0, 300.0), over=(40.0, 120.0), after=80)
    return _tricked(rng, onset, over, steps, lost=(0.6, 0.9), won=(0.15, 0.3))


def _tricked(
    rng: Random, onset: int, over: float, steps: int, lost: tuple[float, float], won: tuple[float, float]
) -> Made:
    course: Course = healthy(rng, usual_kl(rng, steps))
    course.reward = 0.2 + 0.3 * course.reward
    course.witness = np.clip(course.reward + uniform(rng, (-0.1, 0.2)), 0, 1)
    trick = ramp(steps, onset, over)
    course.reward = course.reward + uniform(rng, won) * trick
    course.witness = course.witness * (1 - uniform(rng, lost) * trick)
    course.kl = course.kl + uniform(rng, (0.0, 3.0)) * trick
    if rng.random() < 0.3:
        course.absent = {"kl"}
    return Made(lived_in(rng, course, NEEDS), onset, limited=False)


WITNESSES_HEALTHY = (witness_that_wanders, witness_that_dips, witness_of_harder_tasks)
WITNESSES_DIVERGING = (tricked, tricked_in_the_end)
