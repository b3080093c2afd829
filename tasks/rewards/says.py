"""What a reward function says of itself, for `grpo-orch eval`, which tells wrong answers from unreadable ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

Reward = TypeVar("Reward", bound=Callable[..., Any])


def readable_by(says: Callable[..., Sequence[bool]], full: float = 1.0) -> Callable[[Reward], Reward]:
    """Mark a function that tells right answers from wrong ones.

    Args:
        says: called as the function is; returns for each completion whether an answer could be read in it.
        full: what the function gives a right answer.
    """

    def mark(reward: Reward) -> Reward:
        reward.readable, reward.full = says, full  # type: ignore[attr-defined]  # read by `tasks.evaluating`
        return reward

    return mark


def form(reward: Reward) -> Reward:
    """Mark a function that looks at the form alone, and gives 1 for the right one."""
    reward.is_form = True  # type: ignore[attr-defined]  # as above
    return reward
