"""Reward functions in TRL's signature, right, hackable and broken."""

from __future__ import annotations

import random
from collections.abc import Callable
from statistics import mean
from typing import Any

from benchmarks.recordings.regime import Reward
from benchmarks.recordings.tasks import final, score
from grpo_orch.policies.detect.symptoms import WITNESS


def judge(kind: str, text: str, answer: str, length_max: int) -> float:
    match kind:
        case "graded":
            return score(text, answer)
        case "exact":
            return float(text == answer)
        case "style":
            bare = text.rstrip("#")
            return 0.6 * score(bare, answer) + 0.1 * min(len(text) - len(bare), 4)
        case "signed":
            bare = text.rstrip("#")
            return 0.5 * score(bare, answer) + 0.5 * max(0.0, 1.0 - abs(len(text) - len(bare) - 4) / 4)
        case "thrice":
            return min(text.count(answer[answer.rfind("<") :]), 3) / 3
        case "length":
            return 0.2 * score(text, answer) + 0.8 * len(text) / length_max
        case "endless":
            return 0.2 * score(text, answer) + 0.8 * (">" not in text)
        case "letters":
            return 0.2 * score(text, answer) + 0.8 * min(text.count("<"), 12) / 12
        case "form":
            return 0.2 + 0.8 * text.endswith(">")
        case "lenient":
            given, wanted = final(text) or "", final(answer) or ""
            right = sum(a == b for a, b in zip(given, wanted, strict=False))
            return 0.4 * (final(text) is not None) + 0.6 * right / max(len(given), len(wanted), 1)
        case "terse":
            return score(text, answer) - 0.3 * len(text) / length_max
        case "brief":
            return 0.2 * score(text, answer) + 0.8 * max(0.0, 1.0 - len(text) / length_max)
        case "digits":
            return 0.2 * score(text, answer) + 0.8 * min(sum(map(str.isdigit, text)) / length_max, 1.0)
    raise ValueError(f"no such reward: {kind}")


def make_reward(reward: Reward, length_max: int, seed: int) -> Callable[..., list[float]]:
    draw = random.Random(seed)

    def broken(value: float) -> float:
        match reward.broken:
            case "random":
                return draw.random()
            case "inverted":
                return 1.0 - value
            case "constant":
                return 0.0
            case "shuffled":
                return value
            case "nan":
                return float("nan")
        raise ValueError(f"no such fault: {reward.broken}")

    def task_reward(completions: list[str], answer: list[str], trainer_state: Any, **_: Any) -> list[float]:
        breaks = reward.breaks_at is not None and trainer_state.global_step >= reward.breaks_at
        if breaks and reward.broken == "shuffled":
            answer = draw.sample(answer, len(answer))
        pairs = zip(completions, answer, strict=True)
        values = [judge(reward.kind, text, wanted, length_max) for text, wanted in pairs]
        if breaks:
            values = [broken(value) for value in values]
        return [reward.scale * value + reward.shift for value in values]

    return task_reward


def true_score(
    completions: list[str], answer: list[str], log_metric: Callable[[str, float], None], **_: Any
) -> list[float]:
    """How right the completions are, whatever is paid; logged as a witness."""
    scores = [score(text, wanted) for text, wanted in zip(completions, answer, strict=True)]
    log_metric(f"{WITNESS}true_score", mean(scores))
    return scores
