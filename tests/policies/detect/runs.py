"""Runs in numbers for the detector: a calm one, and what is changed in it from a step on."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable

from grpo_orch.policies.detect.divergence import Detector, Health, Point, Verdict, follow

Metric = Callable[[int], float | None]

ONSET = 200
STEPS = 320


def level(value: float, sigma: float = 0.15, seed: int = 0) -> Metric:
    """Log-normal noise around a level; one step always has the same noise."""
    return lambda step: value * math.exp(random.Random(f"{seed} {step}").gauss(0.0, sigma))


def after(onset: int, before: Metric, then: Metric) -> Metric:
    """The one up to the step, the other from the next step on: what the update of that step did."""
    return lambda step: then(step) if step > onset else before(step)


def between(first: int, last: int, usual: Metric, then: Metric) -> Metric:
    return lambda step: then(step) if first <= step <= last else usual(step)


def growing(value: float, doubling_steps: float, onset: int = ONSET) -> Metric:
    noise = level(value)
    return lambda step: (noise(step) or 0.0) * 2 ** (max(0, step - onset) / doubling_steps)


def rising(to: float, over: float, start: float = 0.05, onset: int = ONSET) -> Metric:
    """From `start` to so much more, evenly over these steps."""
    return after(onset, level(start, 0.05), lambda step: start + to * min(1.0, (step - onset) / over))


def sigmoid(low: float, by: float, middle: int = ONSET, width: float = 8.0) -> Metric:
    return lambda step: low + by / (1 + math.exp((middle - step) / width))


def reward(value: float, gain: float = 0.0, sigma: float = 0.05) -> Metric:
    """Noise around a level, which is higher by `gain` from 20 steps after the onset on."""
    return lambda step: (
        value + gain * min(1.0, max(0, step - ONSET) / 20) + random.Random(f"r{step}").gauss(0.0, sigma)
    )


def learnt(step: int) -> float:
    return 0.2 + 0.5 * min(1.0, step / 100) + random.Random(f"l{step}").gauss(0.0, 0.03)


def always(value: float | None) -> Metric:
    return lambda _: value


CALM: dict[str, Metric] = {
    "kl": level(0.08),
    "loss": level(0.003),
    "grad_norm": level(0.4, 0.4, seed=1),
    "reward": lambda step: 0.5 + random.Random(step).gauss(0.0, 0.05),
    "entropy": level(0.6, seed=2),
    "completions/mean_length": level(220.0, seed=3),
    "completions/clipped_ratio": always(0.05),
}
LOST = after(ONSET, always(0.6), always(0.02))  # a reward
NULLS = after(ONSET, level(0.08), always(None))


def run(steps: int = STEPS, gap: int = 1, **changed: Metric | None) -> list[Point]:
    """A calm run except for these metrics; None: not logged. `__` stands for a slash."""
    metrics = {**CALM, **{name.replace("__", "/"): metric for name, metric in changed.items()}}
    return [
        Point(step, {name: metric(step) for name, metric in metrics.items() if metric is not None})
        for step in range(gap, steps + 1, gap)
    ]


def verdicts(points: Iterable[Point], limit: float | None = None) -> list[Verdict]:
    detector, found = Detector(), []
    for point in points:
        detector = follow(detector, point, limit)
        found.append(detector.verdict)
    return found


def ends(points: Iterable[Point]) -> Health:
    return verdicts(points)[-1].health


def trip(points: Iterable[Point], limit: float | None = None) -> Verdict:
    last = verdicts(points, limit)[-1]
    assert last.health is Health.TRIPPED
    return last
