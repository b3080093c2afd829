"""The parts of a shaped reward, each from 0 to 1; how much each counts is `grpo.reward_weights`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

LAST_LINE = re.compile(r"\n#### (-?\d[\d,]*(?:\.\d+)?)\s*\Z")
SHORT_CHARACTERS, LONG_CHARACTERS = 400, 1200

Chat = list[dict[str, str]]


def correct(completions: Sequence[Chat], answer: Sequence[str], **_: Any) -> list[float]:
    """1 for the number that the row's own answer ends with."""
    return [
        float(_number(chat[-1]["content"]) == _number(right) is not None)
        for chat, right in zip(completions, answer, strict=True)
    ]


def in_form(completions: Sequence[Chat], **_: Any) -> list[float]:
    """1 where the last line is `####` and a number, right or wrong."""
    return [float(_number(chat[-1]["content"]) is not None) for chat in completions]


def short(completions: Sequence[Chat], **_: Any) -> list[float]:
    """1 up to 400 characters, falling to 0 at 1,200."""
    room = LONG_CHARACTERS - SHORT_CHARACTERS
    return [min(1.0, max(0.0, (LONG_CHARACTERS - len(chat[-1]["content"])) / room)) for chat in completions]


def _number(text: str) -> float | None:
    found = LAST_LINE.search(text)
    return float(found[1].replace(",", "")) if found else None
