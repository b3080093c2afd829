"""Reward correct answers in the expected form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from grpo_orch.rewards import readable_by


def in_form(completions: Sequence[str], **_: Any) -> list[bool]:
    """Return whether </think> and an answer with a \\boxed{} follow; `grpo-orch eval` uses this."""
    return [_answer(text) is not None for text in completions]


@readable_by(in_form)
def right_in_form(completions: Sequence[str], solution: Sequence[str], **_: Any) -> list[float]:
    """Return 1 for the expected form with the same \\boxed{} content as the solution, else 0."""
    return [_score(text, boxed(right)) for text, right in zip(completions, solution, strict=True)]


def boxed(text: str) -> str | None:
    """Return the content of the last \\boxed{} without spaces, or None."""
    _, found, rest = text.rpartition("\\boxed{")
    depth = 1
    for end, character in enumerate(rest):
        depth += (character == "{") - (character == "}")
        if found and depth == 0:
            return "".join(rest[:end].split())
    return None


def _score(text: str, right: str | None) -> float:
    return float(right is not None and _answer(text) == right)


def _answer(text: str) -> str | None:
    """Return the \\boxed{} content of an answer in the expected form, else None."""
    thoughts, ended, answer = text.partition("</think>")
    answer = answer.strip()
    in_place = answer.startswith("<answer>") and answer.endswith("</answer>")
    return boxed(answer) if ended and "<think>" not in thoughts and in_place else None
