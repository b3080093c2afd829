"""Classify a completion as correct, wrong, unreadable or unscored, from the scores of the reward functions.

`tasks.rewards.graders` marks the reward functions that decide it.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

SINGLE = 2.0**-23  # relative rounding error of scores, which are single precision


class Verdict(StrEnum):
    """The verdicts, in the order of the printed table."""

    CORRECT = "correct"
    WRONG = "wrong"  # the answer was readable, or no function reports readability
    UNREADABLE = "unreadable"
    UNSCORED = "unscored"  # all nodes rejected the prompt, or the dataset has no answer to compare with


def verdict(score: float | None, full: float, readable: bool | None) -> Verdict:
    """Judge one completion.

    Args:
        score: of the function that decides correctness; None if it returned none.
        full: the score of a correct answer.
        readable: whether the answer was readable; None if unknown.
    """
    if score is None:
        return Verdict.UNSCORED
    if score >= full - SINGLE * abs(full):
        return Verdict.CORRECT
    return Verdict.UNREADABLE if readable is False else Verdict.WRONG


def readability(
    count: int, reported: Sequence[bool] | None, forms: Sequence[Sequence[float | None]]
) -> list[bool | None]:
    """Return whether each of `count` completions was readable.

    `reported` comes from the scoring function. Without it, a completion is readable if all functions that check
    its form score it 1.
    """
    if reported is not None:
        return list(reported)
    if not forms:
        return [None] * count
    return [
        all(scores[index] is not None and (scores[index] or 0.0) >= 1.0 for scores in forms)
        for index in range(count)
    ]
