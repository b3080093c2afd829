"""Healthy runs of every kind that is known to fool a detector.

Each family draws one run: its length, its KL, and what happens to it without harm.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from benchmarks.rig.divergence.signals import Course, Floats, Random, Setting, healthy, magnitude, ramp, uniform

NATS = (1e-3, 0.5)  # what KL reaches in healthy runs that start at 0
UNITS = (1e-5, 1.0)


@dataclass(frozen=True, slots=True)
class Made:
    """What a family made. `onset_step`: of the first bad update; `limit`: the user's, where it belongs to the run;
    `restarts`: how often the trainer was killed and made some steps again; `limited`: whether a user may have set
    a limit on its KL."""

    course: Course
    onset_step: int | None = None
    limit: float | None = None
    restarts: int = 0
    limited: bool = True


Family = Callable[[Random, Setting, int], Made]  # the last: how many steps are logged as one point


def some_steps(rng: Random, logging_steps: int, least_points: int = 60) -> int:
    return max(int(rng.integers(250, 1600)), least_points * logging_steps)


# How KL grows in healthy runs


def saturating_kl(steps: int, top: float, pace: float = 3.0) -> Floats:
    grown: Floats = top * (1 - np.exp(-pace * np.arange(1, steps + 1) / steps))
    return grown


def warming_kl(rng: Random, steps: int, top: float) -> Floats:
    """Nothing at first; a power of the step as the learning rate warms up; then level."""
    grown = (np.arange(steps) / uniform(rng, (30.0, 150.0))) ** uniform(rng, (1.5, 3.5))
    kl: Floats = top * grown / (1 + grown) + 1e-8
    return kl


def usual_kl(rng: Random, steps: int, top: float | None = None) -> Floats:
    top = magnitude(rng, NATS) if top is None else top
    shape = rng.integers(4)
    if shape == 0:
        return saturating_kl(steps, top, uniform(rng, (2.0, 12.0)))
    if shape == 1:
        return warming_kl(rng, steps, top)
    if shape == 2:
        logarithmic: Floats = top * np.log1p(np.arange(1, steps + 1) / 20) / np.log1p(steps / 20)
        return logarithmic
    power: Floats = top * (np.arange(1, steps + 1) / steps) ** uniform(rng, (0.5, 1.0))
    return power


# Healthy families


def grows_by_a_thousand(rng: Random, _: Setting, logging_steps: int) -> Made:
    steps = max(1100, some_steps(rng, logging_steps))
    top = magnitude(rng, NATS)
    linear_then_level = top * np.minimum(1.0, np.arange(1, steps + 1) / uniform(rng, (0.5, 1.0)) / steps)
    return Made(healthy(rng, saturating_kl(steps, top, 1.5) if rng.random() < 0.5 else linear_then_level))


def usual_growth(rng: Random, _: Setting, logging_steps: int) -> Made:
    return Made(healthy(rng, usual_kl(rng, some_steps(rng, logging_steps))))


def any_unit(rng: Random, _: Setting, logging_steps: int) -> Made:
    return Made(healthy(rng, usual_kl(rng, some_steps(rng, logging_steps), magnitude(rng, UNITS))))


def warm_up(rng: Random, _: Setting, logging_steps: int) -> Made:
    kl = warming_kl(rng, some_steps(rng, logging_steps), magnitude(rng, NATS))
    kl[: logging_steps if rng.random() < 0.5 else 1] = 0.0
    return Made(healthy(rng, kl))


def slow_drift(rng: Random, _: Setting, logging_steps: int) -> Made:
    steps = max(500, some_steps(rng, logging_steps))
    start = magnitude(rng, (1e-3, 0.05))
    return Made(healthy(rng, start * np.linspace(1, uniform(rng, (2.0, 10.0)), steps)))


def goes_far(rng: Random, _: Setting, logging_steps: int) -> Made:
    """To several nats over the whole run, as when KL costs next to nothing, and the reward rises all the way."""
    steps = max(600, some_steps(rng, logging_steps))
    return Made(healthy(rng, saturating_kl(steps, uniform(rng, (1.0, 5.0)), uniform(rng, (1.0, 4.0)))))


def level(rng: Random, _: Setting, logging_steps: int) -> Made:
    return Made(healthy(rng, saturating_kl(some_steps(rng, logging_steps), magnitude(rng, UNITS), 40.0)))


def long_and_quiet(rng: Random, _: Setting, logging_steps: int) -> Made:
    """Hardly any noise for thousands of steps, so that measured by it every little change is enormous."""
    steps = max(3000, some_steps(rng, logging_steps))
    course = healthy(rng, magnitude(rng, NATS) * (1 + 0.3 * ramp(steps, steps // 2, 200.0)))
    course.noisiness = 0.05
    return Made(course)


def reference_follows(rng: Random, _: Setting, logging_steps: int) -> Made:
    """The reference model is updated to the policy now and then: KL falls to next to nothing, and grows again."""
    kl = usual_kl(rng, some_steps(rng, logging_steps))
    every, kept = int(rng.integers(64, 400)), magnitude(rng, (0.005, 0.4))
    since = np.arange(len(kl)) % every
    late = np.arange(len(kl)) >= every
    return Made(healthy(rng, np.where(late, kl * (kept + (1 - kept) * (1 - np.exp(-3 * since / every))), kl)))


def offset_start(rng: Random, _: Setting, logging_steps: int) -> Made:
    steps = some_steps(rng, logging_steps)
    return Made(healthy(rng, uniform(rng, (1.0, 5.0)) * np.linspace(1, uniform(rng, (0.7, 1.5)), steps)))


def restarts(rng: Random, _: Setting, logging_steps: int) -> Made:
    return Made(healthy(rng, usual_kl(rng, some_steps(rng, logging_steps))), restarts=int(rng.integers(1, 5)))


def single_spikes(rng: Random, setting: Setting, logging_steps: int) -> Made:
    """The estimator is exponential in one token's log-ratio: now and then one token is all of KL."""
    course = healthy(rng, usual_kl(rng, some_steps(rng, logging_steps)))
    for at in np.flatnonzero(rng.random(course.steps) < uniform(rng, (0.001, 0.006))):
        spike(course, rng, setting, int(at))
    return Made(course)


def clusters_of_spikes(rng: Random, setting: Setting, logging_steps: int) -> Made:
    course = healthy(rng, usual_kl(rng, some_steps(rng, logging_steps)))
    for _number in range(int(rng.integers(1, 4))):
        first, apart = int(rng.integers(20, course.steps - 30)), int(rng.integers(1, 5))
        for turn in range(int(rng.integers(2, 4))):
            spike(course, rng, setting, first + turn * apart)
    return Made(course)


def spike(course: Course, rng: Random, setting: Setting, at: int) -> None:
    course.kl[at] *= magnitude(rng, setting.spike)
    course.grad_norm[at] *= uniform(rng, (1.0, 6.0))


def humps(rng: Random, _: Setting, logging_steps: int) -> Made:
    """KL rises up to fourfold, and comes back by itself; the reward is unaffected."""
    course = healthy(rng, usual_kl(rng, some_steps(rng, logging_steps), magnitude(rng, (1e-3, 0.2))))
    for _number in range(int(rng.integers(1, 4))):
        middle, width = uniform(rng, (0.2, 0.9)) * course.steps, uniform(rng, (4.0, 15.0))
        hump = np.exp(-0.5 * ((np.arange(course.steps) - middle) / width) ** 2)
        course.kl *= np.exp(np.log(uniform(rng, (2.0, 4.0))) * hump)
        course.grad_norm *= 1 + hump
    return Made(course)


def heavy_tails(rng: Random, setting: Setting, logging_steps: int) -> Made:
    course = healthy(rng, usual_kl(rng, some_steps(rng, logging_steps), magnitude(rng, (1e-3, 0.1))))
    wild = np.clip(rng.standard_t(setting.freedom - 1, size=course.steps), -8, 8)
    course.kl *= np.exp(0.35 * wild)
    course.grad_norm *= np.exp(0.25 * np.clip(rng.standard_t(setting.freedom - 1, size=course.steps), -8, 8))
    return Made(course)


def lone_nans(rng: Random, _: Setting, logging_steps: int) -> Made:
    """A step here and there logs NaN, and nothing else changes."""
    course = healthy(rng, usual_kl(rng, some_steps(rng, logging_steps)))
    course.lost = np.where(np.arange(course.steps) % 7 == 3, uniform(rng, (0.01, 0.2)), 0.0)
    return Made(course)


def gradients_overflow(rng: Random, _: Setting, logging_steps: int) -> Made:
    """Half precision looks for its loss scale: a row of infinite gradients at the start, and one now and then."""
    course = healthy(rng, usual_kl(rng, some_steps(rng, logging_steps)))
    course.grad_norm[: int(rng.integers(2, 9))] = np.inf
    course.grad_norm[rng.random(course.steps) < 0.002] = np.inf
    return Made(course)


def reward_dips(rng: Random, _: Setting, logging_steps: int) -> Made:
    course = healthy(rng, usual_kl(rng, some_steps(rng, logging_steps)))
    for _number in range(int(rng.integers(1, 4))):
        first, lasts = int(rng.integers(30, course.steps - 40)), int(rng.integers(5, 31))
        course.reward[first : first + lasts] *= uniform(rng, (0.3, 0.7))
    return Made(course)


def harder_data(rng: Random, _: Setting, logging_steps: int) -> Made:
    """A curriculum moves on: the reward halves for good, answers get longer, and training goes on well."""
    course = healthy(rng, usual_kl(rng, some_steps(rng, logging_steps)))
    harder = ramp(course.steps, int(uniform(rng, (0.3, 0.7)) * course.steps), uniform(rng, (1.0, 5.0)))
    course.reward *= 1 - uniform(rng, (0.3, 0.55)) * harder
    course.length *= 1 + uniform(rng, (0.1, 0.6)) * harder
    course.kl *= 1 + uniform(rng, (0.0, 0.6)) * harder
    return Made(course)


def no_kl(rng: Random, _: Setting, logging_steps: int) -> Made:
    course = healthy(rng, usual_kl(rng, some_steps(rng, logging_steps)))
    course.absent = {"kl"} if rng.random() < 0.7 else {"kl", "entropy", "completions/clipped_ratio"}
    return Made(course)


def little_is_logged(rng: Random, _: Setting, logging_steps: int) -> Made:
    """An older TRL, or a log of the essentials."""
    course = healthy(rng, usual_kl(rng, some_steps(rng, logging_steps)))
    course.absent = {"entropy", "frac_reward_zero_std", "clip_ratio/region_mean", "num_tokens"}
    course.absent |= {"sampling/sampling_logp_difference/mean", "sampling/sampling_logp_difference/max"}
    if rng.random() < 0.5:
        course.absent |= {"grad_norm", "completions/clipped_ratio"}
    return Made(course)


def solved(rng: Random, _: Setting, logging_steps: int) -> Made:
    """All is solved: most steps teach nothing, and their gradient is as good as none."""
    course = healthy(rng, usual_kl(rng, some_steps(rng, logging_steps)))
    done = ramp(course.steps, int(uniform(rng, (0.2, 0.5)) * course.steps), 100.0)
    course.reward += (0.995 - course.reward) * done
    course.grad_norm *= np.where(rng.random(course.steps) < 0.8 * done, uniform(rng, (0.0, 0.05)), 1.0)
    course.entropy *= 1 - 0.7 * done
    return Made(course)


def rare_reward(rng: Random, _: Setting, logging_steps: int) -> Made:
    """A hard task: hardly any completion earns anything, and steps in which none does teach nothing."""
    course = healthy(rng, usual_kl(rng, some_steps(rng, logging_steps)))
    course.reward = np.linspace(0.002, uniform(rng, (0.005, 0.05)), course.steps)
    course.grad_norm *= np.where(rng.random(course.steps) < 0.4, 0.0, 1.0)
    return Made(course)


def entropy_falls(rng: Random, _: Setting, logging_steps: int) -> Made:
    """As it does where a run learns well: to a tenth, most of it in the first quarter."""
    course = healthy(rng, usual_kl(rng, some_steps(rng, logging_steps)))
    pace = uniform(rng, (4.0, 20.0)) * np.arange(course.steps) / course.steps
    course.entropy *= np.exp(np.log(uniform(rng, (0.08, 0.3))) * (1 - np.exp(-pace)))
    return Made(course)


def answers_grow(rng: Random, _: Setting, logging_steps: int) -> Made:
    """To several times their length, some of them cut off, as the reward rises."""
    course = healthy(rng, usual_kl(rng, some_steps(rng, logging_steps)))
    grown = ramp(course.steps, int(0.1 * course.steps), 0.8 * course.steps)
    course.length = uniform(rng, (0.08, 0.2)) + (uniform(rng, (0.4, 0.65)) - 0.08) * grown
    return Made(course)


HEALTHY: tuple[Family, ...] = (
    grows_by_a_thousand,
    usual_growth,
    any_unit,
    warm_up,
    slow_drift,
    goes_far,
    level,
    long_and_quiet,
    offset_start,
    reference_follows,
    restarts,
    single_spikes,
    clusters_of_spikes,
    humps,
    heavy_tails,
    lone_nans,
    gradients_overflow,
    reward_dips,
    harder_data,
    no_kl,
    little_is_logged,
    solved,
    rare_reward,
    entropy_falls,
    answers_grow,
)
