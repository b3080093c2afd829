"""What is lost little by little, in rewards whose single points say nothing."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from grpo_orch.policies.detect.divergence import Health, Point
from grpo_orch.policies.detect.signals import Series, follow_series, noise_of_mean
from tests.policies.detect.runs import ONSET, Metric, after, level, run, trip, verdicts

OVER, STEPS = 80, 400


def one_prompt(right: Callable[[int], float], seed: int = 1, steps: int = STEPS) -> list[float]:
    """Eight answers to one prompt a step: for most prompts nearly all are right, or nearly none."""
    drawn = random.Random(seed)
    easy = [drawn.random() < right(step) for step in range(1, steps + 1)]
    return [sum(drawn.random() < (0.95 if one else 0.05) for _ in range(8)) / 8 for one in easy]


def test_what_wanders_for_long_is_more_often_far_off() -> None:
    drawn, value = random.Random(1), 0.0
    even, wandering = Series(), Series()
    for step in range(1, 401):
        value = 0.95 * value + drawn.gauss(0.0, 1.0)
        wandering = follow_series(wandering, step, value)
        even = follow_series(even, step, drawn.gauss(0.0, 1.0))
    assert 0.6 / 4 < noise_of_mean(even, 16) < 1.4 / 4
    assert noise_of_mean(even, 64) == pytest.approx(noise_of_mean(even, 16) / 2)
    assert noise_of_mean(wandering, 64) > 2 * wandering.wobble / 8


def losing(step: int) -> float:
    return 0.65 - 0.5 * min(1.0, max(0, step - ONSET) / OVER)


def steady(_: int) -> float:
    return 0.5


def logged(right: Callable[[int], float], **others: Metric | None) -> list[Point]:
    told = one_prompt(right)
    metrics: dict[str, Metric | None] = {"kl": None, "loss": None, "reward": lambda step: told[step - 1]}
    return run(STEPS, 1, **metrics | others)


def climbing(times: float) -> Metric:
    calm = level(0.4, 0.1)
    return lambda step: (calm(step) or 0.0) * times ** min(1.0, max(0, step - ONSET) / OVER)


@pytest.mark.parametrize(
    "written",
    [{"entropy": climbing(12.0)}, {"completions__mean_length": climbing(6.0)}, {"entropy": climbing(1 / 12)}],
    ids=["wild", "without end", "one answer"],
)
def test_a_reward_that_slides_while_other_things_are_written_trips(written: dict[str, Metric]) -> None:
    found = trip(logged(losing, **written))
    assert ONSET < (found.tripped_step or 0) <= ONSET + OVER + 60
    assert ONSET - 60 <= (found.onset_step or 0) <= ONSET + 5
    assert len(found.evidence) == 3  # the last is the hint at harder tasks
    assert found.evidence[0].startswith("reward 0.")


@pytest.mark.parametrize(
    ("right", "written"),
    [(steady, {"entropy": climbing(12.0)}), (losing, {}), (losing, {"grad_norm": climbing(6.0)})],
    ids=["nothing is lost", "nothing else is written", "gradients alone"],
)
def test_neither_of_both_alone_trips(right: Callable[[int], float], written: dict[str, Metric]) -> None:
    assert Health.TRIPPED not in {one.health for one in verdicts(logged(right, **written)[: ONSET + 110])}


def test_a_sliding_reward_lowers_the_bar_of_the_kl_to_a_third() -> None:
    kl = after(ONSET, level(0.05, 0.05), lambda step: 0.05 + 0.5 * min(1.0, (step - ONSET) / 60))
    assert trip(logged(losing, kl=kl)).evidence[1].startswith("reward 0.")
    assert Health.TRIPPED not in {one.health for one in verdicts(logged(steady, kl=kl))}


def short(*, slides: bool, seed: int) -> list[Point]:
    """40 points of many answers each; the reward and the length of answers go down from the 15th to the 30th."""
    drawn, points = random.Random(seed), []
    for at in range(40):
        gone = min(1.0, max(0, at - 15) / 15) if slides else 0.0
        learnt = 0.3 + 0.5 * (1 - math.exp(-at / 6))
        reward = learnt * (1 - gone) + 0.1 * gone + drawn.gauss(0.0, 0.06)
        length = 200 * 8.0**-gone * drawn.lognormvariate(0.0, 0.05)
        points.append(Point(at * 10 + 10, {"reward": reward, "kl": 0.01, "completions/mean_length": length}))
    return points


def test_a_slow_slide_is_seen_in_a_log_of_40_points() -> None:
    found = [verdicts(short(slides=True, seed=seed))[-1] for seed in range(20)]
    assert sum(one.health is Health.TRIPPED for one in found) >= 15
    assert all((one.onset_step or 0) >= 100 for one in found if one.health is Health.TRIPPED)
    assert not [
        seed for seed in range(20) if verdicts(short(slides=False, seed=seed))[-1].health is Health.TRIPPED
    ]
