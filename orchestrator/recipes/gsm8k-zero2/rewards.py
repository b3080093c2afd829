"""Rewards for form and length of an answer, from 0 to 1; `grpo.reward_weights` sets their weights."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from grpo_orch.rewards import form

LAST_LINE = re.compile(r"\n#### -?\d[\d,]*(?:\.\d+)?\s*\Z")
SHORT_CHARACTERS, LONG_CHARACTERS = 400, 1200

Chat = list[dict[str, str]]


@form
def in_form(completions: Sequence[Chat], **_: Any) -> list[float]:
    """Return 1 if the last line is `####` and a number, correct or not."""
    return [float(LAST_LINE.search(chat[-1]["content"]) is not None) for chat in completions]


def short(completions: Sequence[Chat], **_: Any) -> list[float]:
    """Return 1 for up to 400 characters, falling to 0 at 1,200."""
    span = LONG_CHARACTERS - SHORT_CHARACTERS
    return [min(1.0, max(0.0, (LONG_CHARACTERS - len(chat[-1]["content"])) / span)) for chat in completions]
