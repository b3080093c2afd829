"""What is added to a reward: a penalty for length, and sums."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any


def length_penalty(
    completion_ids: Sequence[Sequence[int]], most_tokens: int, free_tokens: int = 0, **_: Any
) -> list[float]:
    """0 up to `free_tokens`, falling to -1 at `most_tokens`: DAPO's soft punishment of length (arXiv:2503.14476,
    equation 13, whose cache is the difference of the two).

    Args:
        completion_ids: token ids of each completion.
    """
    if not 0 <= free_tokens < most_tokens:
        raise ValueError(f"expected 0 <= free_tokens < most_tokens, got {free_tokens} and {most_tokens}")
    room = most_tokens - free_tokens
    return [max(-1.0, min(0.0, (free_tokens - len(ids)) / room)) for ids in completion_ids]


def weighted_sum(
    name: str, weights: Mapping[Callable[..., Sequence[float | None]], float]
) -> Callable[..., list[float | None]]:
    """Return a reward function that is the sum of others, times their weights; None of it where all are None.

    In run.yaml `grpo.reward_weights` does the same, and each part has a curve of its own.

    Args:
        name: by which TRL logs it.
    """

    def reward(**told: Any) -> list[float | None]:
        parts = [(weight, function(**told)) for function, weight in weights.items()]
        count = len(told["completions"])
        return [_sum([(weight, scores[index]) for weight, scores in parts]) for index in range(count)]

    reward.__name__ = name
    return reward


def _sum(weighed: Sequence[tuple[float, float | None]]) -> float | None:
    there = [weight * score for weight, score in weighed if score is not None]
    return sum(there) if there else None
