"""Mathematics by math-verify, in processes of its own.

Its time limits are signals, which fail outside the main thread and hold in no loop of sympy's own C code.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from tasks.rewards.in_workers import in_workers
from tasks.rewards.texts import answer_of, text_of

END_CHARACTERS = 8_000  # of a completion, where its answer is: patterns take long over more


def math_reward(
    prompts: Sequence[Any], completions: Sequence[Any], column: str = "solution", **columns: Any
) -> list[float | None]:
    r"""1 for an answer that equals the right one as mathematics, else 0; None where the right one is no
    mathematics.

    A `\boxed{...}` is taken first, then other LaTeX, then a number; without `</think>`, where thoughts were begun,
    there is no answer.

    Args:
        column: of the dataset, with the right answer, alone or in a text with LaTeX.
    """
    if column not in columns:
        raise TypeError(f"math_reward needs a column `{column}`; name another as its argument `column`")
    ends = [answer_of(text_of(one))[-END_CHARACTERS:] for one in completions]
    right = [None if one is None else str(one) for one in columns[column]]
    return math_verified(prompts, ends, right=right, log_metric=columns.get("log_metric"))


@in_workers(needs=("math_verify",), name="math_reward")
def math_verified(answer: str, right: str | None) -> float | None:
    """As `math_reward`, of one answer."""
    if right is None:  # a row of another dataset
        return None
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that it has no limits: the worker has
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    kinds = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())
    no_limits: dict[str, Any] = {"parsing_timeout": None}
    stated = right if "$" in right or "\\boxed" in right or "\\(" in right or "\\[" in right else f"${right}$"
    expected = parse(stated, kinds, **no_limits) or parse(right, kinds, **no_limits)
    if not expected:
        return None
    found = parse(answer, kinds, extraction_mode="first_match", **no_limits)
    return float(verify(expected, found, timeout_seconds=None))
