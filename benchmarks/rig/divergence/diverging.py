"""Diverging runs: healthy up to a step, the onset, whose update is the first bad one.

A value that is logged at step s was measured before that step's update, so that what a bad update has made shows
from the next step on; its own gradient shows at once.
"""

from __future__ import annotations

import numpy as np

from benchmarks.rig.divergence.healthy import NATS, Family, Made, spike, usual_kl, warming_kl
from benchmarks.rig.divergence.signals import Course, Floats, Random, Setting, healthy, magnitude, ramp, uniform

BAD_NATS = (5.0, 500.0)  # what KL comes to
SAVE_STEPS = 25  # between checkpoints


def slow_ramp(rng: Random, _: Setting, logging_steps: int) -> Made:
    return _runaway(rng, logging_steps, over=(50.0, 500.0))


def cliff(rng: Random, _: Setting, logging_steps: int) -> Made:
    return _runaway(rng, logging_steps, over=(1.0, 8.0))


def growing_swings(rng: Random, _: Setting, logging_steps: int) -> Made:
    made = _runaway(rng, logging_steps, over=(60.0, 250.0))
    after = np.maximum(0, np.arange(made.course.steps) - (made.onset_step or 0))
    swing = np.sin(2 * np.pi * after / max(4 * logging_steps, uniform(rng, (8.0, 30.0))))
    made.course.kl *= np.exp(uniform(rng, (0.7, 1.3)) * swing * np.minimum(1, after / 20))
    return made


def offset_then_runaway(rng: Random, _: Setting, logging_steps: int) -> Made:
    onset, over = _onset(rng, logging_steps), uniform(rng, (10.0, 150.0))
    steps = onset + int(over) + max(150, 15 * logging_steps)
    start = uniform(rng, (1.0, 5.0))
    course = healthy(rng, np.full(steps, start))
    return run_away(rng, course, onset, over, top=start * uniform(rng, (10.0, 100.0)))


def drift_then_runaway(rng: Random, _: Setting, logging_steps: int) -> Made:
    onset, over = _onset(rng, logging_steps), uniform(rng, (20.0, 100.0))
    steps = onset + int(over) + max(150, 15 * logging_steps)
    drift = magnitude(rng, (1e-3, 0.05)) * np.linspace(1, uniform(rng, (3.0, 10.0)), steps)
    return run_away(rng, healthy(rng, drift), onset, over)


def spikes_then_runaway(rng: Random, setting: Setting, logging_steps: int) -> Made:
    """Spikes that come to nothing, until one does not."""
    made = _runaway(rng, logging_steps, over=(5.0, 100.0))
    for at in np.flatnonzero(rng.random(made.onset_step or 0) < 0.01):
        spike(made.course, rng, setting, int(at))
    return made


def early_runaway(rng: Random, _: Setting, logging_steps: int) -> Made:
    """The learning rate was wrong from the start."""
    onset, over = int(rng.integers(3, 40)), uniform(rng, (10.0, 80.0))
    steps = onset + int(over) + max(200, 20 * logging_steps)
    return run_away(rng, healthy(rng, warming_kl(rng, steps, magnitude(rng, NATS)) + 1e-5), onset, over)


def level_above_the_limit(rng: Random, _: Setting, logging_steps: int) -> Made:
    """KL goes far above the user's limit and stays there; the reward may rise with it."""
    onset, over = _onset(rng, logging_steps), uniform(rng, (10.0, 80.0))
    steps = onset + int(over) + max(150, 15 * logging_steps)
    limit = magnitude(rng, (0.05, 1.0))
    course = healthy(rng, usual_kl(rng, steps, limit * uniform(rng, (0.05, 0.35))))
    risen = np.log(limit * uniform(rng, (5.0, 30.0)) / course.kl[onset]) * ramp(steps, onset, over)
    course.kl[onset:] = course.kl[onset] * np.exp(risen[onset:])
    if rng.random() < 0.5:
        spoil(rng, course, ramp(steps, onset + int(over), 20.0))
    return Made(course, onset, limit)


def nan_for_good(rng: Random, _: Setting, logging_steps: int) -> Made:
    """The gradient of one update is NaN, and from the next step on so is everything computed by the weights."""
    onset = _onset(rng, logging_steps)
    steps = onset + max(150, 20 * logging_steps)
    course = healthy(rng, usual_kl(rng, steps))
    course.grad_norm[onset - 1 :] = np.nan
    course.kl[onset:] = np.inf if rng.random() < 0.3 else np.nan
    course.entropy[onset:] = np.nan
    course.logp[onset:] = np.nan
    course.reward[onset:] *= float(rng.choice([0.0, 0.0, 1.0]))
    course.absent = {"kl"} if rng.random() < 0.3 else set()
    return Made(course, onset)


def gradient_first(rng: Random, _: Setting, logging_steps: int) -> Made:
    """The gradient explodes, and some steps later KL follows, or the reward where KL is not logged."""
    onset, lag = _onset(rng, logging_steps), int(rng.integers(5, 26))
    over = uniform(rng, (5.0, 40.0))
    steps = onset + lag + int(over) + max(150, 15 * logging_steps)
    course = healthy(rng, usual_kl(rng, steps))
    made = run_away(rng, course, onset + lag, over)
    rise = ramp(steps, onset - 1, uniform(rng, (5.0, 20.0)))
    course.grad_norm *= np.exp(np.log(magnitude(rng, (50.0, 1000.0))) * rise)
    if rng.random() < 0.4:  # then the reward must tell
        course.absent = {"kl"}
        course.reward *= 1 - 0.9 * ramp(steps, onset + lag, over)
    return Made(made.course, onset)


def entropy_collapse(rng: Random, _: Setting, logging_steps: int) -> Made:
    """One answer to everything, and a wrong one; KL, if it is logged, shows nothing."""
    onset, over = _onset(rng, logging_steps), uniform(rng, (15.0, 60.0))
    steps = onset + 2 * int(over) + max(150, 15 * logging_steps)
    course = healthy(rng, usual_kl(rng, steps))
    course.reward = np.maximum(course.reward, uniform(rng, (0.3, 0.6)))
    gone = ramp(steps, onset, over)
    course.entropy *= np.exp(np.log(magnitude(rng, (0.005, 0.05))) * gone)
    lag = int(rng.integers(0, 20))
    course.reward *= 1 - uniform(rng, (0.92, 1.0)) * ramp(steps, onset + lag, uniform(rng, (10.0, 40.0)))
    course.length *= 1 - uniform(rng, (0.0, 0.8)) * gone
    course.absent = {"kl"} if rng.random() < 0.8 else set()
    return Made(course, onset)


def endless_answers(rng: Random, _: Setting, logging_steps: int) -> Made:
    """Answers no longer end: all are cut off at the longest, and earn nothing."""
    onset, over = _onset(rng, logging_steps), uniform(rng, (20.0, 80.0))
    steps = onset + int(over) + max(150, 15 * logging_steps)
    course = healthy(rng, usual_kl(rng, steps))
    course.reward = np.maximum(course.reward, uniform(rng, (0.3, 0.6)))
    endless = ramp(steps, onset, over)
    course.length += (1 - course.length) * endless
    course.reward *= 1 - uniform(rng, (0.9, 1.0)) * endless
    course.entropy *= np.exp(np.log(uniform(rng, (0.5, 4.0))) * endless)
    course.kl *= 1 + uniform(rng, (0.0, 2.0)) * endless
    course.absent = {"kl"} if rng.random() < 0.5 else set()
    return Made(course, onset)


def _onset(rng: Random, logging_steps: int) -> int:
    """A step some way into the run; often of a checkpoint, which then is the first tainted one."""
    least = max(80, 15 * logging_steps)
    onset = int(rng.integers(least, least + 600))
    return onset // SAVE_STEPS * SAVE_STEPS if rng.random() < 0.3 else onset


def _runaway(rng: Random, logging_steps: int, over: tuple[float, float]) -> Made:
    onset, lasts = _onset(rng, logging_steps), magnitude(rng, over)
    steps = onset + int(lasts) + max(150, 15 * logging_steps)
    return run_away(rng, healthy(rng, usual_kl(rng, steps)), onset, lasts)


def run_away(rng: Random, course: Course, onset: int, over: float, top: float | None = None) -> Made:
    """KL grows exponentially from the step after the onset up to `top`; the rest goes with it, or not yet."""
    base = course.kl[onset]
    top = max(30 * base, magnitude(rng, BAD_NATS)) if top is None else top
    grown = np.log(top / base) * ramp(course.steps, onset, over)
    course.kl[onset:] = base * np.exp(grown[onset:])
    least, most = np.log(max(2 * base, 0.3)), np.log(max(10 * base, 3.0))
    bad = np.where(grown > 0, np.clip((np.log(course.kl + 1e-12) - least) / (most - least), 0, 1), 0.0)
    spoil(rng, course, bad)
    return Made(course, onset)


def spoil(rng: Random, course: Course, bad: Floats) -> None:
    """What runs away with KL; one in four rewards is fooled and stays."""
    if rng.random() < 0.75:
        course.reward *= 1 - uniform(rng, (0.8, 1.0)) * bad
    if rng.random() < 0.7:
        course.grad_norm *= np.exp(np.log(magnitude(rng, (5.0, 300.0))) * bad)
    course.entropy *= np.exp(np.log(float(rng.choice([0.05, 1.0, 5.0]))) * bad)
    if rng.random() < 0.5:
        course.length += (float(rng.choice([0.02, 1.0])) - course.length) * bad
    if rng.random() < 0.5:
        course.logp *= np.exp(np.log(20.0) * bad)


DIVERGING: tuple[Family, ...] = (
    slow_ramp,
    cliff,
    growing_swings,
    offset_then_runaway,
    drift_then_runaway,
    spikes_then_runaway,
    early_runaway,
    level_above_the_limit,
    nan_for_good,
    gradient_first,
    entropy_collapse,
    endless_answers,
)
