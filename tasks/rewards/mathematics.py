"""Mathematics by math-verify, in processes of its own.

Its time limits are signals, which fail outside the main thread and hold in no loop of sympy's own C code.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from tasks.rewards.in_workers import in_workers
from tasks.rewards.says import readable_by
from tasks.rewards.texts import answer_of, text_of

END_CHARACTERS = 8_000  # of a completion, where its answer is: patterns take long over more


def math_readable(
    prompts: Sequence[Any], completions: Sequence[Any], opened: bool = False, **_: Any
) -> list[bool]:
    """Whether math-verify finds an answer in each; not where looking for it takes too long."""
    ends = [answer_of(text_of(one), opened)[-END_CHARACTERS:] for one in completions]
    return [bool(one) for one in math_parsed(prompts, ends)]


@readable_by(math_readable)
def math_reward(
    prompts: Sequence[Any],
    completions: Sequence[Any],
    column: str = "solution",
    opened: bool = False,
    **columns: Any,
) -> list[float | None]:
    r"""1 for an answer that equals the right one as mathematics, else 0; None where the right one is no
    mathematics.

    A `\boxed{...}` is taken first, then other LaTeX, then a number; without `</think>`, where thoughts were begun,
    there is no answer.

    Args:
        column: of the dataset, with the right answer, alone or in a text with LaTeX.
        opened: the prompt ends with `<think>`, as the chat templates of R1's kind have it.
    """
    if column not in columns:
        raise TypeError(f"math_reward needs a column `{column}`; name another as its argument `column`")
    ends = [answer_of(text_of(one), opened)[-END_CHARACTERS:] for one in completions]
    right = [None if one is None else str(one) for one in columns[column]]
    return math_verified(prompts, ends, right=right, log_metric=columns.get("log_metric"))


@in_workers(needs=("math_verify",), name="math_reward")
def math_verified(answer: str, right: str | None) -> float | None:
    """As `math_reward`, of one answer."""
    if right is None:  # a row of another dataset
        return None
    from math_verify import verify

    stated = right if "$" in right or "\\boxed" in right or "\\(" in right or "\\[" in right else f"${right}$"
    expected = _parsed(stated) or _parsed(right)
    if not expected:
        return None
    return float(verify(expected, _parsed(answer, extraction_mode="first_match"), timeout_seconds=None))


@in_workers(needs=("math_verify",), name="math_readable")
def math_parsed(answer: str) -> float:
    """As `math_readable`, of one answer."""
    return float(bool(_parsed(answer, extraction_mode="first_match")))


def _parsed(text: str, **how: Any) -> list[Any]:
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that it has no limits: the worker has
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    kinds = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())
    found: list[Any] = parse(text, kinds, parsing_timeout=None, **how)
    return found
