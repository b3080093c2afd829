"""The reward for an answer that is right and in its place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tasks.rewards import readable_by


def in_form(completions: Sequence[str], **_: Any) -> list[bool]:
    """Whether the thoughts end and an answer with something boxed in it follows: what `grpo-orch eval` asks."""
    return [_answer(text) is not None for text in completions]


@readable_by(in_form)
def right_in_form(completions: Sequence[str], solution: Sequence[str], **_: Any) -> list[float]:
    """1 where the thoughts end, an answer follows, and what is boxed in it is what is boxed in the solution."""
    return [_score(text, boxed(right)) for text, right in zip(completions, solution, strict=True)]


def boxed(text: str) -> str | None:
    """What stands in the last \\boxed{}, without spaces; None where there is none."""
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
    """What is boxed in the answer, where the form is right; else None."""
    thoughts, ended, answer = text.partition("</think>")
    answer = answer.strip()
    in_place = answer.startswith("<answer>") and answer.endswith("</answer>")
    return boxed(answer) if ended and "<think>" not in thoughts and in_place else None
