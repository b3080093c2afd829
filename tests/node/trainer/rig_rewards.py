"""Rewards that even random weights earn some of, so that every step of a short run learns."""

from __future__ import annotations

import math
import os
import re
import time
from pathlib import Path
from typing import Any

import torch

CALLS_WITHIN_MEMORY = 3  # one before the training, and two steps
EXBIBYTE = 1 << 60
HELD = "RIG_HELD"
HELD_FROM = 3

_calls = 0


def lower_share(completions: list[str], **_: Any) -> list[float]:
    """The share of a completion's characters that are lower-case letters."""
    return [sum(map(str.islower, text)) / max(1, len(text)) for text in completions]


def digit_share(completions: list[str], **_: Any) -> list[float]:
    """The share of a completion's characters that are digits."""
    return [sum(map(str.isdigit, text)) / max(1, len(text)) for text in completions]


def asks(row: dict[str, Any]) -> str:
    """A prompt."""
    return f"How many {row['prompt']}?"


def insatiable(completions: list[str], **_: Any) -> list[float]:
    """The same, until a call that wants more memory than any machine has."""
    global _calls
    _calls += 1
    if _calls > CALLS_WITHIN_MEMORY:
        torch.empty(EXBIBYTE, dtype=torch.uint8)
    return lower_share(completions)


def held(completions: list[str], trainer_state: Any, **_: Any) -> list[float]:
    """The same; from the fourth step on it does not return while there is the file that HELD names."""
    while trainer_state.global_step >= HELD_FROM and Path(os.environ[HELD]).exists():
        time.sleep(0.01)
    return lower_share(completions)


def later_none(completions: list[str], **_: Any) -> list[float]:
    """The same, and no number from the second step on."""
    global _calls
    _calls += 1
    return lower_share(completions) if _calls < CALLS_WITHIN_MEMORY else [math.nan for _ in completions]


def endless(**_: Any) -> list[float]:
    """No scores: an expression that takes longer than the universe, and holds the interpreter's lock meanwhile."""
    re.match(r"(a+)+$", "a" * 64 + "b")
    return []


def none(completions: list[str], **_: Any) -> list[None]:
    """No reward."""
    return [None for _ in completions]


def half(completions: list[str], **_: Any) -> list[float]:
    """The same reward for every completion."""
    return [0.5 for _ in completions]
