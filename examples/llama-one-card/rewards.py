"""Form and answer, each 0 or 1; how much each counts is `grpo.reward_weights`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

FORM = re.compile(r"\s*<reasoning>\n.+?\n</reasoning>\n<answer>\n.+?\n</answer>\s*", re.DOTALL)
ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)

Chat = list[dict[str, str]]


def xml(completions: Sequence[Chat], **_: Any) -> list[float]:
    """1 for the two elements and nothing beside them."""
    return [float(FORM.fullmatch(chat[-1]["content"]) is not None) for chat in completions]


def accuracy(completions: Sequence[Chat], answer: Sequence[str], **_: Any) -> list[float]:
    """1 where <answer> holds the number that stands after `####` in the row's answer."""
    return [_right(chat[-1]["content"], right) for chat, right in zip(completions, answer, strict=True)]


def _right(text: str, right: str) -> float:
    found = ANSWER.findall(text)
    return float(bool(found) and _plain(found[-1]) == _plain(right.rpartition("####")[2]))


def _plain(number: str) -> str:
    return number.strip().replace(",", "").removeprefix("$")
