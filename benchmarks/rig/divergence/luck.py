"""Whether a reward pays for KL: a few per cent within its own wobble do not, a sure gain does."""

from __future__ import annotations

import numpy as np

from benchmarks.rig.divergence.healthy import Made, saturating_kl, usual_kl
from benchmarks.rig.divergence.signals import (
    Floats,
    Random,
    Setting,
    healthy,
    magnitude,
    ramp,
    sigmoid,
    uniform,
)
from benchmarks.rig.divergence.texture import REWARD_AND_KL, lived_in, some_length, some_onset, wandering

# Healthy


def sure_gain_far_away(rng: Random, _: Setting, logging_steps: int) -> Made:
    """1 to 4 nats, and the reward has clearly grown with them, sooner or later."""
    steps = some_length(rng, logging_steps)
    top, middle = uniform(rng, (1.0, 4.0)), uniform(rng, (0.15, 0.7)) * steps
    learnt = sigmoid(steps, middle, uniform(rng, (0.03, 0.15)) * steps)
    with_it = top * (0.05 + 0.95 * learnt) * np.minimum(1, np.arange(1, steps + 1) / (0.05 * steps))
    kl: Floats = with_it if rng.random() < 0.5 else saturating_kl(steps, top, uniform(rng, (1.0, 6.0)))
    course = healthy(rng, kl)
    low = uniform(rng, (0.05, 0.35))
    course.reward = low + (uniform(rng, (low + 0.3, 0.97)) - low) * learnt
    return Made(lived_in(rng, course, REWARD_AND_KL, (0.0, 0.05), (0.02, 0.25)), limited=False)


def luck_and_little_kl(rng: Random, _: Setting, logging_steps: int) -> Made:
    """The reward wanders by some per cent and gains nothing, or hardly; KL grows as it does."""
    steps = some_length(rng, logging_steps)
    course = healthy(rng, usual_kl(rng, steps, magnitude(rng, (1e-3, 0.5))))
    level = uniform(rng, (0.2, 0.85))
    course.reward = level * np.linspace(1, 1 + uniform(rng, (-0.02, 0.06)), steps)
    return Made(lived_in(rng, course, wobble=(0.02, 0.06)), limited=False)


# Diverging


def luck_while_kl_runs(rng: Random, _: Setting, logging_steps: int) -> Made:
    """The reward is a few per cent above its start, within its wobble, just as KL runs away; it may fall late."""
    onset, over, steps = some_onset(rng, logging_steps, before=(6.0, 300.0), over=(4.0, 150.0))
    course = healthy(rng, usual_kl(rng, steps, magnitude(rng, (1e-3, 0.3))))
    course.kl = _runs(rng, course.kl, onset, over)
    level = uniform(rng, (0.2, 0.8))
    lucky = 1 + uniform(rng, (0.01, 0.08)) * ramp(steps, max(0, onset - int(over)), 2 * over)
    course.reward = level * lucky
    if rng.random() < 0.6:
        late = onset + int(uniform(rng, (0.7, 1.5)) * over)
        course.reward = course.reward * (1 - uniform(rng, (0.3, 1.0)) * ramp(steps, late, over))
    if rng.random() < 0.6:
        course.grad_norm *= np.exp(np.log(magnitude(rng, (3.0, 100.0))) * ramp(steps, onset + int(over / 2), over))
    return Made(lived_in(rng, course, wobble=(0.015, 0.08)), onset, limited=False)


def old_gain_no_longer_pays(rng: Random, _: Setting, logging_steps: int) -> Made:
    """What could be learnt was learnt long ago, surely, at little KL; then KL runs away for nothing."""
    onset, over, steps = some_onset(rng, logging_steps, before=(80.0, 300.0), over=(4.0, 60.0))
    course = healthy(rng, usual_kl(rng, steps, magnitude(rng, (0.01, 0.5))))
    course.kl = _runs(rng, course.kl, onset, over)
    low = uniform(rng, (0.1, 0.5))
    learnt = sigmoid(steps, uniform(rng, (0.1, 0.4)) * onset, 0.06 * onset)
    course.reward = low + uniform(rng, (0.1, 0.4)) * learnt
    if rng.random() < 0.6:
        course.reward *= 1 - uniform(rng, (0.2, 0.9)) * ramp(steps, onset + int(over / 2), over)
    return Made(lived_in(rng, course, wobble=(0.01, 0.04)), onset, limited=False)


def swinging_luck(rng: Random, _: Setting, logging_steps: int) -> Made:
    """KL runs away in swings, and the reward swings against them, now above its start and now below."""
    onset, over, steps = some_onset(rng, logging_steps, over=(20.0, 100.0))
    course = healthy(rng, usual_kl(rng, steps, magnitude(rng, (1e-3, 0.3))))
    since = np.maximum(0, np.arange(steps) - onset) / logging_steps
    swing = np.sin(2 * np.pi * since / uniform(rng, (8.0, 40.0))) * np.minimum(1, since / 10)
    course.kl = _runs(rng, course.kl, onset, over) * np.exp(uniform(rng, (0.3, 1.0)) * swing)
    level = uniform(rng, (0.25, 0.75))
    course.reward = level * (1 - uniform(rng, (0.05, 0.25)) * swing) + wandering(rng, steps, 0.02)
    return Made(lived_in(rng, course), onset, limited=False)


def _runs(rng: Random, kl: Floats, onset: int, over: float) -> Floats:
    """KL that grows from the onset to many nats, evenly in its logarithm or as a power of the step."""
    top = magnitude(rng, (4.0, 1000.0))
    risen = ramp(len(kl), onset, over)
    if rng.random() < 0.6:
        away: Floats = kl * np.exp(np.log(top / kl[onset]) * risen)
    else:
        away = kl + top * risen ** uniform(rng, (1.0, 3.0))
    return away


LUCK_HEALTHY = (sure_gain_far_away, luck_and_little_kl)
LUCK_DIVERGING = (luck_while_kl_runs, old_gain_no_longer_pays, swinging_luck)
