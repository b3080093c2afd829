"""Form and length of an answer, each from 0 to 1; how much each counts is `grpo.reward_weights`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from tasks.rewards import form

LAST_LINE = re.compile(r"\n#### -?\d[\d,]*(?:\.\d+)?\s*\Z")
SHORT_CHARACTERS, LONG_CHARACTERS = 400, 1200

Chat = list[dict[str, str]]


@form
def in_form(completions: Sequence[Chat], **_: Any) -> list[float]:
    """1 where the last line is `####` and a number, right or wrong."""
    return [float(LAST_LINE.search(chat[-1]["content"]) is not None) for chat in completions]


def short(completions: Sequence[Chat], **_: Any) -> list[float]:
    """1 up to 400 characters, falling to 0 at 1,200."""
    room = LONG_CHARACTERS - SHORT_CHARACTERS
    return [min(1.0, max(0.0, (LONG_CHARACTERS - len(chat[-1]["content"])) / room)) for chat in completions]
