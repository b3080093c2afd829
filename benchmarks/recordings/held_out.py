"""Runs that no detector was made with: drawn from a seed, each recorded and labelled before any detector saw it.

Tasks, sizes, seeds, batches, losses and rates are drawn; what is done to a run is its cause. The rule of the
labels was written with them. A run diverged if a person would throw its later policy away for an earlier one, told
by the score of the true task, the reward, KL, entropy and the completions. Its onset is the first step that
settings make bad (a reward that breaks; a rate above 4e-4, for adapters 4e-3; from the start where the first step
has it, or where a reward can be tricked from the first step on). A run that was meant to diverge and did not, or
the other way round, is labelled by what is seen.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from benchmarks.recordings.regime import Lesson, Regime, Reward, Sampler

SEED = 20261122
TASKS = ("sort", "reverse", "close", "count")
LOSSES = ("dapo", "grpo", "dr_grpo", "bnpo")
SIZES = range(4, 8)
EASY, HARD = range(2, 5), range(7, 10)
FAR = 1e-4  # beta: next to no penalty


def _stories(draw: random.Random) -> list[tuple[str, bool, Mapping[str, Any], Mapping[str, Any]]]:
    """Cause, whether it is meant to diverge, what is done to the run, and its own settings; both kinds in turn."""

    def rate(least: float, most: float) -> float:
        return float(f"{least * (most / least) ** draw.random():.2g}")

    def at(first: int, last: int) -> int:
        return draw.randrange(first, last)

    def hacked() -> dict[str, float]:
        return {"learning_rate": rate(2e-4, 5e-4), "beta": draw.choice((FAR, 1e-3))}

    usual = {"learning_rate": rate(5e-5, 2e-4), "beta": draw.choice((0.0, 0.01, 0.04))}
    lesson, other = draw.sample(TASKS, 2)
    return [
        ("hacked", True, {"reward": Reward("digits"), "witness": True}, hacked()),
        ("usual", False, {"witness": True}, usual),
        ("rate rises", True, {"rate_doubles": (at(40, 70), at(8, 14))}, {"learning_rate": 1e-4, "beta": 0.01}),
        (
            "form learnt",
            False,
            {"reward": Reward("lenient"), "witness": True},
            {"learning_rate": 2e-4, "beta": FAR},
        ),
        (
            "reward breaks",
            True,
            {"reward": Reward(breaks_at=at(50, 90), broken="inverted"), "witness": True},
            hacked(),
        ),
        (
            "curriculum",
            False,
            {"lessons": (Lesson(0.45, lesson, EASY), Lesson(0.56, lesson, HARD)), "witness": True},
            {"learning_rate": rate(1e-4, 3e-4)},
        ),
        ("rate too high", True, {}, {"learning_rate": rate(2e-3, 8e-3), "beta": 1e-3}),
        ("lora", False, {"lora_rank": 4}, {"learning_rate": rate(5e-4, 2e-3), "beta": FAR}),
        ("hacked", True, {"reward": Reward("brief"), "witness": True}, hacked()),
        ("no penalty", False, {"reward": Reward("signed")}, {"learning_rate": rate(1e-4, 2e-4), "beta": FAR}),
        ("reward breaks", True, {"reward": Reward(breaks_at=at(50, 90), broken="random")}, hacked()),
        ("noise", False, {}, {"per_device_train_batch_size": 8, "num_generations": 4, "learning_rate": 5e-5}),
        ("entropy bonus", True, {}, {"entropy_coef": 0.3, "learning_rate": rate(3e-4, 6e-4), "beta": FAR}),
        ("length", False, {"reward": Reward("terse"), "witness": True}, {"learning_rate": rate(1e-4, 2e-4)}),
        (
            "lora rate rises",
            True,
            {"lora_rank": 4, "rate_doubles": (at(30, 60), at(8, 14))},
            {"learning_rate": 2e-3},
        ),
        ("task changes", False, {"lessons": (Lesson(0.5, lesson, SIZES), Lesson(0.51, other, SIZES))}, usual),
        ("hacked", True, {"reward": Reward("digits")}, hacked()),
        ("mastery", False, {"lessons": (Lesson(1.0, "close", EASY),)}, {"learning_rate": 2e-4, "beta": 1e-3}),
        ("stale", True, {"sampler": Sampler(stale_steps=at(25, 45))}, {"learning_rate": rate(8e-4, 2e-3)}),
        ("units", False, {"reward": Reward(scale=50.0, shift=-25.0)}, usual),
        ("wrong answers", True, {"reward": Reward(breaks_at=at(50, 80), broken="shuffled")}, {"beta": 0.05}),
        ("warm-up", False, {}, {"learning_rate": 3e-4, "lr_scheduler_type": "linear", "warmup_steps": 40}),
        ("slow ramp", True, {"rate_doubles": (0, at(22, 30))}, {"learning_rate": 4e-5, "beta": FAR}),
        ("iterations", False, {}, {"num_iterations": 2, "epsilon_high": 0.28, "learning_rate": 1e-4}),
        ("collapse", True, {"reward": Reward("exact")}, {"learning_rate": rate(2e-3, 4e-3), "temperature": 0.6}),
        ("sparse", False, {"reward": Reward("exact"), "lessons": (Lesson(1.0, lesson, HARD),)}, usual),
        ("born broken", True, {}, {"learning_rate": rate(0.05, 0.3), "beta": 0.01}),
        ("cool sampler", False, {"sampler": Sampler(temperature=0.9)}, {"learning_rate": 1e-4}),
    ]


def _draw() -> list[Regime]:
    draw = random.Random(SEED)
    drawn = []
    for number, (cause, diverges, done, grpo) in enumerate(_stories(draw), start=1):
        settings: dict[str, Any] = {
            "per_device_train_batch_size": draw.choice((16, 32)),
            "num_generations": draw.choice((4, 8)),
            "max_completion_length": 16,
            "logging_steps": draw.choice((1, 1, 1, 2)),
            "loss_type": draw.choice(LOSSES),
        }
        regime: dict[str, Any] = {"task": "+".join(draw.sample(TASKS, 2)), "steps": draw.randrange(120, 170)}
        regime["model"] = draw.choice(("small", "middle"))
        drawn.append(
            Regime(
                name=f"{number:02}-{cause.replace(' ', '-')}",
                cause=cause,
                why="Drawn.",
                diverges=diverges,
                grpo=settings | dict(grpo),
                seed=draw.randrange(100, 1000),
                **(regime | dict(done)),
            )
        )
    return drawn


HELD_OUT = _draw()
