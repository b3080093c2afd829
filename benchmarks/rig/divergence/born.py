"""Runs that are broken at their first record, and runs that only look it.

A model that was loaded wrongly, a chat template without an end, a learning rate out of all proportion: nothing was
ever well, so that nothing has changed since the start. The onset is step 1.
"""

from __future__ import annotations

import numpy as np

from benchmarks.rig.divergence.healthy import Made, usual_kl
from benchmarks.rig.divergence.signals import Course, Random, Setting, healthy, magnitude, ramp, sigmoid, uniform
from benchmarks.rig.divergence.texture import lived_in, some_length

POINTS = (50.0, 400.0)
CUT, ALIKE = "completions/clipped_ratio", "frac_reward_zero_std"

# Healthy


def sparse_reward(rng: Random, _: Setting, logging_steps: int) -> Made:
    """Nine of ten groups teach nothing, half of the completions are cut, and the rest is learnt from."""
    course = healthy(rng, usual_kl(rng, some_length(rng, logging_steps)))
    course.reward = np.linspace(0.01, uniform(rng, (0.02, 0.2)), course.steps)
    course.alike = _share(rng, course.steps, uniform(rng, (0.8, 0.95)), 0.04, most=0.98)
    course.cut = _share(rng, course.steps, uniform(rng, (0.3, 0.65)), 0.06)
    return Made(lived_in(rng, course, wobble=(0.0, 0.01)), limited=False)


def learns_to_end(rng: Random, _: Setting, logging_steps: int) -> Made:
    """A base model: for tens of steps all completions are cut and few groups vary; then it learns to end."""
    course = healthy(rng, usual_kl(rng, some_length(rng, logging_steps)))
    all_cut = max(int(rng.integers(10, 60)), int(rng.integers(2, 9)) * logging_steps)
    all_cut = min(all_cut, course.steps // 3)
    width = uniform(rng, (0.02, 0.1)) * course.steps
    ends = np.where(np.arange(course.steps) < all_cut, 0.0, sigmoid(course.steps, all_cut + 3 * width, width))
    course.cut = np.clip(1 - uniform(rng, (0.75, 0.99)) * ends, 0, 1)
    course.alike = np.clip(uniform(rng, (0.88, 0.97)) - uniform(rng, (0.3, 0.7)) * ends, 0, 1)
    course.reward = uniform(rng, (0.005, 0.05)) + uniform(rng, (0.3, 0.8)) * ends
    course.length = 1 - uniform(rng, (0.3, 0.8)) * ends
    return Made(lived_in(rng, course, wobble=(0.0, 0.02)), limited=False)


def half_are_cut_for_good(rng: Random, _: Setting, logging_steps: int) -> Made:
    """Completions as long as the limit allows, most of them cut, and the reward rises all the same."""
    course = healthy(rng, usual_kl(rng, some_length(rng, logging_steps)))
    course.cut = _share(rng, course.steps, uniform(rng, (0.5, 0.9)), 0.05)
    course.length = np.full(course.steps, uniform(rng, (0.7, 0.95)))
    return Made(lived_in(rng, course), limited=False)


# Diverging


def born_far_away(rng: Random, _: Setting, logging_steps: int) -> Made:
    """KL in the hundreds or thousands from the first record on, and nothing is earned."""
    return Made(lived_in(rng, _absurd(rng, logging_steps), batch_sigma=(0.05, 0.8)), 1, limited=False)


def born_broken(rng: Random, _: Setting, logging_steps: int) -> Made:
    """That KL, with completions that do not end, groups that are all alike, or an absurd entropy, or all of it."""
    course = _absurd(rng, logging_steps)
    signs = set(rng.choice(["cut", "alike", "entropy"], size=int(rng.integers(1, 4)), replace=False).tolist())
    _break(rng, course, signs)
    needs = {"kl", "reward"} | ({CUT} if "cut" in signs else set()) | ({ALIKE} if "alike" in signs else set())
    needs |= {"entropy"} if "entropy" in signs else set()
    return Made(lived_in(rng, course, frozenset(needs), (0.0, 0.0), (0.05, 0.8)), 1, limited=False)


def born_mute(rng: Random, _: Setting, logging_steps: int) -> Made:
    """No KL, or none to speak of: every completion is cut, every group alike, the reward always the same."""
    course = healthy(rng, usual_kl(rng, some_length(rng, logging_steps, POINTS), magnitude(rng, (1e-5, 1e-2))))
    _break(rng, course, {"cut", "alike"} | ({"entropy"} if rng.random() < 0.6 else set()))
    needs = frozenset({"reward", CUT, ALIKE, "entropy"})
    course = lived_in(rng, course, needs, (0.0, 0.0))
    course.absent = {"kl"} if rng.random() < 0.6 else set()
    return Made(course, 1, limited=False)


def breaks_at_once(rng: Random, _: Setting, logging_steps: int) -> Made:
    """The first point or two are of the model as it was, and what comes after is broken."""
    course = _absurd(rng, logging_steps)
    broken = ramp(course.steps, 0, uniform(rng, (1.0, 3.0)) * logging_steps)
    course.kl = 1e-3 * (course.kl / 1e-3) ** broken
    level = uniform(rng, (0.1, 0.5))
    course.reward = level * (1 - broken)
    course.cut = broken
    return Made(lived_in(rng, course, frozenset({"kl", "reward", CUT}), (0.0, 0.005)), 1, limited=False)


def _absurd(rng: Random, logging_steps: int) -> Course:
    steps = some_length(rng, logging_steps, POINTS)
    level = magnitude(rng, (200.0, 5e4))
    course = healthy(rng, level * np.linspace(1, magnitude(rng, (0.5, 5.0)), steps))
    course.reward = np.full(steps, float(rng.choice([0.0, 0.0, uniform(rng, (0.0, 0.3))])))
    course.grad_norm = course.grad_norm * magnitude(rng, (1.0, 100.0))
    return course


def _break(rng: Random, course: Course, signs: set[str]) -> None:
    if "cut" in signs:
        course.cut = np.ones(course.steps)
        course.length = np.ones(course.steps)
    if "alike" in signs:
        course.alike = np.ones(course.steps)
        course.reward = np.full(course.steps, float(rng.choice([0.0, 0.0, 0.1, 0.5])))
        course.grad_norm = course.grad_norm * float(rng.choice([0.0, 1e-3, 1.0]))
    if "entropy" in signs:  # that of a vocabulary of 30,000 to 150,000 tokens, or of none
        entropy = uniform(rng, (9.8, 11.9)) if rng.random() < 0.6 else uniform(rng, (0.0, 0.003))
        course.entropy = np.full(course.steps, entropy)


def _share(rng: Random, steps: int, level: float, sigma: float, most: float = 1.0) -> np.ndarray:
    return np.clip(level + sigma * rng.normal(size=steps), 0, most)


BORN_HEALTHY = (sparse_reward, learns_to_end, half_are_cut_for_good)
BORN_DIVERGING = (born_far_away, born_broken, born_mute, breaks_at_once)
