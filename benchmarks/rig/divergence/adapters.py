"""Adapters begin as the reference model itself: KL is 0 at the first points, and whatever it comes to is thousands
of times more. Where nothing else happens, that is no divergence.
"""

from __future__ import annotations

import numpy as np

from benchmarks.rig.divergence.diverging import run_away
from benchmarks.rig.divergence.healthy import Made
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
from benchmarks.rig.divergence.texture import healthy_restarts, lived_in, some_length, some_onset

NATS = (0.15, 0.8)  # what KL comes to without harm

# Healthy


def adapter_concave(rng: Random, _: Setting, logging_steps: int) -> Made:
    """Fast at first, slower and slower."""
    return _adapter(rng, logging_steps, _concave(rng, some_length(rng, logging_steps)))


def adapter_linear(rng: Random, _: Setting, logging_steps: int) -> Made:
    steps = some_length(rng, logging_steps)
    return _adapter(rng, logging_steps, np.arange(1, steps + 1) / steps)


def adapter_convex(rng: Random, _: Setting, logging_steps: int) -> Made:
    """Faster and faster, mildly."""
    steps = some_length(rng, logging_steps)
    return _adapter(rng, logging_steps, (np.arange(1, steps + 1) / steps) ** uniform(rng, (1.2, 2.2)))


def adapter_late(rng: Random, _: Setting, logging_steps: int) -> Made:
    """Next to nothing for a long time, while the learning rate warms up or the task resists; then as others."""
    steps = some_length(rng, logging_steps)
    late = sigmoid(steps, uniform(rng, (0.25, 0.8)) * steps, uniform(rng, (0.02, 0.08)) * steps)
    little = magnitude(rng, (1e-3, 0.03)) * np.arange(1, steps + 1) / steps
    return _adapter(rng, logging_steps, little + (1 - little) * late)


def adapter_in_stages(rng: Random, _: Setting, logging_steps: int) -> Made:
    """A stage of growth with each restart of the learning rate, or each epoch."""
    steps = some_length(rng, logging_steps)
    stages = int(rng.integers(2, 5))
    grown = np.zeros(steps)
    for stage in range(stages):
        pace = magnitude(rng, (2.0, 15.0)) * logging_steps
        since = np.maximum(0, np.arange(1, steps + 1) - int((stage + uniform(rng, (0.0, 0.4))) / stages * steps))
        grown += uniform(rng, (0.5, 1.5)) * (1 - np.exp(-since / pace))
    return _adapter(rng, logging_steps, grown / grown[-1])


def _adapter(rng: Random, logging_steps: int, shape: Floats) -> Made:
    course = _zero_at_first(rng, healthy(rng, uniform(rng, NATS) * shape + 1e-9), logging_steps)
    if rng.random() < 0.4:  # little is learnt
        course.reward = uniform(rng, (0.2, 0.8)) * np.linspace(1, 1 + uniform(rng, (-0.02, 0.15)), course.steps)
    return Made(lived_in(rng, course, batch_sigma=(0.02, 0.35)), restarts=healthy_restarts(rng), limited=False)


# Diverging


def adapter_runs_away(rng: Random, _: Setting, logging_steps: int) -> Made:
    """As the healthy ones for long; then to several nats, and the reward goes."""
    return _broken(rng, logging_steps, before=(30.0, 300.0), over=(5.0, 60.0))


def adapter_too_fast(rng: Random, _: Setting, logging_steps: int) -> Made:
    """Learning rates for adapters are high, and this one was too high from the start."""
    return _broken(rng, logging_steps, before=(4.0, 25.0), over=(4.0, 40.0))


def _broken(rng: Random, logging_steps: int, before: tuple[float, float], over: tuple[float, float]) -> Made:
    onset, lasts, steps = some_onset(rng, logging_steps, before, over)
    kl = uniform(rng, (0.05, 0.6)) * _concave(rng, steps) + 1e-9
    made = run_away(rng, healthy(rng, kl), onset, lasts, top=magnitude(rng, (4.0, 100.0)))
    course = _zero_at_first(rng, made.course, logging_steps)
    late = onset + int(uniform(rng, (0.3, 1.0)) * lasts)
    course.reward *= 1 - uniform(rng, (0.4, 1.0)) * ramp(steps, late, lasts / 2)
    return Made(lived_in(rng, course), onset, limited=False)


def _concave(rng: Random, steps: int) -> Floats:
    grown: Floats = 1 - np.exp(-uniform(rng, (1.0, 12.0)) * np.arange(1, steps + 1) / steps)
    return grown


def _zero_at_first(rng: Random, course: Course, logging_steps: int) -> Course:
    course.kl[: int(rng.integers(1, 4)) * logging_steps] = float(rng.choice([0.0, 1e-7]))
    return course


ADAPTERS_HEALTHY = (adapter_concave, adapter_linear, adapter_convex, adapter_late, adapter_in_stages)
ADAPTERS_DIVERGING = (adapter_runs_away, adapter_too_fast)
