"""A prompt a step, with rewards of right or wrong: single points say next to nothing, and often no KL is logged.

What goes wrong here goes wrong over dozens of points. Beside it stand runs in which the same signals move as far
and nothing is lost, or which lose as much to harder prompts alone.
"""

from __future__ import annotations

import numpy as np

from benchmarks.rig.divergence.healthy import Made, usual_kl
from benchmarks.rig.divergence.signals import Course, Floats, Random, Setting, healthy, magnitude, ramp, uniform
from benchmarks.rig.divergence.texture import healthy_restarts, some_length, some_onset

POINTS = (80.0, 500.0)
ANSWERS = (4, 8, 8, 16)
APART = (0.5, 3.0)
BEFORE, OVER = (60.0, 250.0), (30.0, 120.0)  # points

# Healthy


def one_prompt(rng: Random, _: Setting, logging_steps: int) -> Made:
    course = _of_one_prompt(rng, healthy(rng, usual_kl(rng, some_length(rng, logging_steps, POINTS))))
    return Made(course, restarts=healthy_restarts(rng), limited=False)


def one_prompt_longer(rng: Random, _: Setting, logging_steps: int) -> Made:
    """It learns to think: answers become two to five times as long, and the reward rises, or stays."""
    course = healthy(rng, usual_kl(rng, some_length(rng, logging_steps, POINTS)))
    course.length = uniform(rng, (0.05, 0.15)) * _growing(rng, course.steps, (2.0, 5.0))
    return Made(_of_one_prompt(rng, _as_it_was(rng, course)), limited=False)


def one_prompt_bolder(rng: Random, _: Setting, logging_steps: int) -> Made:
    """A bonus for entropy, or none against its fall: four times as much, or a quarter, and nothing is lost."""
    course = healthy(rng, usual_kl(rng, some_length(rng, logging_steps, POINTS)))
    grown = _growing(rng, course.steps, (2.0, 4.5))
    course.entropy = magnitude(rng, (0.1, 1.0)) * (grown if rng.random() < 0.5 else 1 / grown)
    return Made(_of_one_prompt(rng, _as_it_was(rng, course)), limited=False)


def one_prompt_harder(rng: Random, _: Setting, logging_steps: int) -> Made:
    """Prompts that are sorted by difficulty: the reward falls by up to half, answers are longer and less sure."""
    course = healthy(rng, usual_kl(rng, some_length(rng, logging_steps, POINTS)))
    hard = np.arange(1, course.steps + 1) / course.steps
    course.reward = uniform(rng, (0.5, 0.9)) * (1 - uniform(rng, (0.2, 0.5)) * hard)
    course.length = course.length * (1 + uniform(rng, (0.0, 0.8)) * hard)
    course.entropy = course.entropy * (1 + uniform(rng, (0.0, 0.6)) * hard)
    return Made(_of_one_prompt(rng, course), limited=False)


def one_prompt_in_epochs(rng: Random, _: Setting, logging_steps: int) -> Made:
    """The same prompts in the same order each time, easy ones together: the reward goes up and down with them."""
    course = healthy(rng, usual_kl(rng, some_length(rng, logging_steps, POINTS)))
    epoch = uniform(rng, (30.0, 200.0)) * logging_steps
    turn = np.sin(2 * np.pi * np.arange(course.steps) / epoch)
    course.reward = np.clip(course.reward * (1 + uniform(rng, (0.1, 0.5)) * turn), 0.0, 1.0)
    course.length = course.length * (1 - uniform(rng, (0.0, 0.3)) * turn)
    course.entropy = course.entropy * (1 - uniform(rng, (0.0, 0.3)) * turn)
    return Made(_of_one_prompt(rng, course), limited=False)


# Diverging


def one_prompt_goes_wild(rng: Random, _: Setting, logging_steps: int) -> Made:
    """Text without sense, little by little: entropy climbs to several times what it was, and the reward goes."""
    course, gone, onset = _losing(rng, logging_steps)
    course.entropy = course.entropy * np.exp(np.log(magnitude(rng, (4.0, 20.0))) * gone)
    course.length = course.length * np.exp(np.log(magnitude(rng, (0.7, 2.5))) * gone)
    return Made(_of_one_prompt(rng, course, frozenset({"entropy"})), onset, limited=False)


def one_prompt_without_end(rng: Random, _: Setting, logging_steps: int) -> Made:
    """Answers become longer and longer until most are cut."""
    course, gone, onset = _losing(rng, logging_steps)
    course.length = uniform(rng, (0.05, 0.2)) * np.exp(np.log(magnitude(rng, (4.0, 10.0))) * gone)
    course.cut = np.clip(0.02 + uniform(rng, (0.3, 0.95)) * gone**2 + 0.03 * rng.normal(size=course.steps), 0, 1)
    return Made(_of_one_prompt(rng, course), onset, limited=False)


def one_prompt_one_answer(rng: Random, _: Setting, logging_steps: int) -> Made:
    """Less and less entropy, until all answers are one, and wrong."""
    course, gone, onset = _losing(rng, logging_steps)
    course.entropy = course.entropy * np.exp(np.log(magnitude(rng, (0.02, 0.2))) * gone)
    return Made(_of_one_prompt(rng, course, frozenset({"entropy"})), onset, limited=False)


def _losing(rng: Random, logging_steps: int) -> tuple[Course, Floats, int]:
    """A run whose reward goes for good over dozens of points, how far it is gone, and since when."""
    onset, over, steps = some_onset(rng, logging_steps, BEFORE, OVER, after=100)
    course = healthy(rng, usual_kl(rng, steps, magnitude(rng, (1e-3, 0.3))))
    gone = ramp(steps, onset, over)
    course.reward = np.maximum(course.reward, uniform(rng, (0.4, 0.7))) * (1 - uniform(rng, (0.7, 1.0)) * gone)
    course.kl = course.kl * np.exp(np.log(magnitude(rng, (3.0, 30.0))) * gone)
    return course, gone, onset


def _growing(rng: Random, steps: int, times: tuple[float, float]) -> Floats:
    """From 1 to so many times, over a part of the run."""
    grown: Floats = np.exp(
        np.log(uniform(rng, times))
        * ramp(steps, int(uniform(rng, (0.1, 0.6)) * steps), uniform(rng, (0.1, 0.4)) * steps)
    )
    return grown


def _as_it_was(rng: Random, course: Course) -> Course:
    """The same, half of the time with a reward that learns nothing."""
    if rng.random() < 0.5:
        course.reward = np.full(course.steps, uniform(rng, (0.15, 0.8)))
    return course


def _of_one_prompt(rng: Random, course: Course, needs: frozenset[str] = frozenset()) -> Course:
    """Log it as such trainers do: mostly without a KL, some without entropy."""
    course.one_prompt = (int(rng.choice(ANSWERS)), uniform(rng, APART))
    course.absent = {name for name, share in (("kl", 0.7), ("entropy", 0.2)) if rng.random() < share} - needs
    return course


ONE_PROMPT_HEALTHY = (
    one_prompt,
    one_prompt_longer,
    one_prompt_bolder,
    one_prompt_harder,
    one_prompt_in_epochs,
)
ONE_PROMPT_DIVERGING = (one_prompt_goes_wild, one_prompt_without_end, one_prompt_one_answer)
