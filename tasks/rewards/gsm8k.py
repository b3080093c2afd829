"""GSM8K's answers: a number after `####`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal, InvalidOperation
from typing import Any

from tasks.rewards.says import readable_by
from tasks.rewards.texts import answer_of, element, text_of

MARK = "####"
NUMBER_MAX = 64  # characters in which a number ends: the rest of a long text is not looked through
_NUMBER = re.compile(r"\s*[$€£]?\s*([-+]?[$€£]?[\d,]*\.?\d+)\.?(?![\w.,]*\d)")


def gsm8k_readable(
    completions: Sequence[Any], tag: str | None = None, opened: bool = False, **_: Any
) -> list[bool]:
    """Whether each has a number where `gsm8k_reward` looks for one."""
    found = [_found(text_of(one), tag, opened) for one in completions]
    return [one is not None and _number(one) is not None for one in found]


@readable_by(gsm8k_readable)
def gsm8k_reward(
    completions: Sequence[Any],
    column: str = "answer",
    tag: str | None = None,
    opened: bool = False,
    **columns: Any,
) -> list[float | None]:
    """1 for the right number after the last `####`, else 0; None where the dataset's own has none.

    Args:
        column: of the dataset, with a number, or a text with one after `####`.
        tag: take the number from the last `<tag>...</tag>` instead.
        opened: the prompt ends with `<think>`: without `</think>` there is no answer.
    """
    if column not in columns:
        raise TypeError(f"gsm8k_reward needs a column `{column}`; name another as its argument `column`")
    found = [_found(text_of(one), tag, opened) for one in completions]
    return [_score(one, str(right)) for one, right in zip(found, columns[column], strict=True)]


def _score(found: str | None, right: str) -> float | None:
    expected = _number(right.rpartition(MARK)[2])
    if expected is None:
        return None
    return float(found is not None and _number(found) == expected)


def _found(text: str, tag: str | None, opened: bool) -> str | None:
    """What stands where the answer should."""
    if tag is not None:
        return element(text, tag)
    _, marked, after = answer_of(text, opened).rpartition(MARK)
    return after if marked else None


def _number(text: str) -> Decimal | None:
    if (found := _NUMBER.match(text.strip()[:NUMBER_MAX])) is None:
        return None
    try:
        return Decimal(re.sub("[,$€£]", "", found[1]))
    except InvalidOperation:
        return None
