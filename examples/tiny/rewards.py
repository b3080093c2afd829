"""The tiny run's reward, in TRL's signature."""

from __future__ import annotations

from typing import Any

DIGIT = "7"


def digit_share(completions: list[str], **_: Any) -> list[float]:
    """The share of a completion's characters that are the one digit; 0 for an empty completion."""
    return [text.count(DIGIT) / len(text) if text else 0.0 for text in completions]
