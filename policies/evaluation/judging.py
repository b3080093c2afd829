"""What became of one problem: correct, of the right form and wrong, unreadable, or not scored at all.

Reward functions say which: `tasks.rewards.graders` is how.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

SINGLE = 2.0**-23  # scores come in single precision, where 0.9 is less than 0.9


class Verdict(StrEnum):
    """In the order of the table that people read."""

    CORRECT = "correct"
    WRONG = "wrong"  # an answer could be read, or no function tells whether one could
    UNREADABLE = "unreadable"
    UNSCORED = "unscored"  # no node took the prompt, or the dataset has no answer to compare with


def verdict(score: float | None, full: float, readable: bool | None) -> Verdict:
    """Judge one completion.

    Args:
        score: of the function that tells right from wrong; None: it has none.
        full: what that function gives an answer that is right.
        readable: whether an answer could be read; None: nobody says.
    """
    if score is None:
        return Verdict.UNSCORED
    if score >= full - SINGLE * abs(full):
        return Verdict.CORRECT
    return Verdict.UNREADABLE if readable is False else Verdict.WRONG


def told_readable(
    count: int, said: Sequence[bool] | None, forms: Sequence[Sequence[float | None]]
) -> list[bool | None]:
    """Whether each of `count` completions could be read: by the function that scores it, else by all that look at
    its form, which give 1 for the right one."""
    if said is not None:
        return list(said)
    if not forms:
        return [None] * count
    return [
        all(scores[index] is not None and (scores[index] or 0.0) >= 1.0 for scores in forms)
        for index in range(count)
    ]
