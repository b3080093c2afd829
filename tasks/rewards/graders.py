"""Reward functions for common formats and answers, and marks that `grpo-orch eval` reads from a reward function.

With the marks `grpo-orch eval` distinguishes wrong answers from unreadable ones.
"""

from __future__ import annotations

import functools
import json
import logging
import re
import sys
from collections.abc import Callable, Sequence
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any, TypeVar

from grpo_orch.tasks.rewards.in_workers import in_workers
from grpo_orch.tasks.rewards.texts import answer_of, element, fenced, text_of

Reward = TypeVar("Reward", bound=Callable[..., Any])


def readable_by(is_readable: Callable[..., Sequence[bool]], full: float = 1.0) -> Callable[[Reward], Reward]:
    """Mark a reward function that judges whether answers are right.

    Args:
        is_readable: called like the reward function; returns for each completion whether it contains a readable
            answer.
        full: the score of a right answer.
    """

    def mark(reward: Reward) -> Reward:
        reward.readable, reward.full = is_readable, full  # type: ignore[attr-defined]  # read by `tasks.evaluating`
        return reward

    return mark


def form(reward: Reward) -> Reward:
    """Mark a reward function that checks only the format, and scores 1 for the right one."""
    reward.is_form = True  # type: ignore[attr-defined]  # as above
    return reward


# Formats that a prompt asks for.

HALF = 0.5  # maximum score of elements that are out of order or among other text


@form
def think_format(completions: Sequence[Any], opened: bool = False, **_: Any) -> list[float]:
    """Score 1 for reasoning in one pair of `<think>` tags followed by an answer, else 0.

    Args:
        opened: the prompt ends with `<think>`, as with some chat templates.
    """
    texts = [f"<think>{text_of(completion)}" if opened else text_of(completion) for completion in completions]
    return [float(_has_think_format(text)) for text in texts]


@form
def xml_format(
    completions: Sequence[Any], tags: Sequence[str] = ("reasoning", "answer"), opened: bool = False, **_: Any
) -> list[float]:
    """Score 1 for all elements in order and nothing else; else 0.5 times the share of elements that occur once.

    The partial score gives a gradient to a model that does not write the whole format yet.

    Args:
        tags: the elements' names, in order.
        opened: the prompt ends with the first opening tag.
    """
    texts = [f"<{tags[0]}>{text_of(completion)}" if opened else text_of(completion) for completion in completions]
    return [1.0 if _is_exactly(text, tags) else HALF * _share_present(text, tags) for text in texts]


def _has_think_format(text: str) -> bool:
    reasoning, closed, answer = text.strip().partition("</think>")
    opened = reasoning.startswith("<think>") and "<think>" not in reasoning[1:] + answer
    return bool(opened and closed and "</think>" not in answer and answer.strip())


def _is_exactly(text: str, tags: Sequence[str]) -> bool:
    rest = text.strip()
    for tag in tags:
        if not rest.startswith(f"<{tag}>"):
            return False
        inside, closed, rest = rest.removeprefix(f"<{tag}>").partition(f"</{tag}>")
        if not closed or not inside.strip() or any(f"<{other}>" in inside for other in tags):
            return False
        rest = rest.lstrip()
    return not rest


def _share_present(text: str, tags: Sequence[str]) -> float:
    return sum(map(_is_once, [text] * len(tags), tags)) / len(tags)


def _is_once(text: str, tag: str) -> bool:
    opening, closing = f"<{tag}>", f"</{tag}>"
    return text.count(opening) == text.count(closing) == 1 and text.index(opening) < text.index(closing)


# GSM8K's answers: a number after `####`.

MARK = "####"
NUMBER_MAX = 64  # characters searched for a number
_NUMBER = re.compile(r"\s*[$€£]?\s*([-+]?[$€£]?[\d,]*\.?\d+)\.?(?![\w.,]*\d)")


def gsm8k_readable(
    completions: Sequence[Any], tag: str | None = None, opened: bool = False, **_: Any
) -> list[bool]:
    """Return for each completion whether it has a number where `gsm8k_reward` looks for one."""
    answers = [_number_text(text_of(completion), tag, opened) for completion in completions]
    return [answer is not None and _number(answer) is not None for answer in answers]


@readable_by(gsm8k_readable)
def gsm8k_reward(
    completions: Sequence[Any],
    column: str = "answer",
    tag: str | None = None,
    opened: bool = False,
    **columns: Any,
) -> list[float | None]:
    """Score 1 for the right number after the last `####`, else 0; None if the dataset's own answer has no number.

    Args:
        column: dataset column with a number, or a text with a number after `####`.
        tag: read the number from the last `<tag>...</tag>` instead.
        opened: the prompt ends with `<think>`, so a completion without `</think>` has no answer.
    """
    if column not in columns:
        raise TypeError(f"gsm8k_reward needs a column `{column}`; set its argument `column` to use another one")
    answers = [_number_text(text_of(completion), tag, opened) for completion in completions]
    return [_score(answer, str(right)) for answer, right in zip(answers, columns[column], strict=True)]


def _score(answer: str | None, right: str) -> float | None:
    expected = _number(right.rpartition(MARK)[2])
    if expected is None:
        return None
    return float(answer is not None and _number(answer) == expected)


def _number_text(text: str, tag: str | None, opened: bool) -> str | None:
    """Return the text in the answer's position; None if there is no answer."""
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


# Mathematics by math-verify, in worker processes.
#
# Its own time limits use signals, which fail outside the main thread and cannot interrupt sympy's C code.

END_CHARACTERS = 8_000  # last characters of a completion, searched for its answer: patterns are slow on more


def math_readable(
    prompts: Sequence[Any], completions: Sequence[Any], opened: bool = False, **_: Any
) -> list[bool]:
    """Return for each completion whether math-verify finds an answer in it within the time limit."""
    ends = [answer_of(text_of(completion), opened)[-END_CHARACTERS:] for completion in completions]
    return [bool(score) for score in math_parsed(prompts, ends)]


@readable_by(math_readable)
def math_reward(
    prompts: Sequence[Any],
    completions: Sequence[Any],
    column: str = "solution",
    opened: bool = False,
    **columns: Any,
) -> list[float | None]:
    r"""Score 1 for an answer mathematically equal to the right one, else 0; None if that cannot be parsed.

    The answer is the first of: a `\boxed{...}`, other LaTeX, a number. A completion with unfinished reasoning (no
    `</think>`) has no answer.

    Args:
        column: dataset column with the right answer, alone or in a text with LaTeX.
        opened: the prompt ends with `<think>`, as with R1-style chat templates.
    """
    if column not in columns:
        raise TypeError(f"math_reward needs a column `{column}`; set its argument `column` to use another one")
    ends = [answer_of(text_of(completion), opened)[-END_CHARACTERS:] for completion in completions]
    right = [None if answer is None else str(answer) for answer in columns[column]]
    return math_verified(prompts, ends, right=right, log_metric=columns.get("log_metric"))


@in_workers(needs=("math_verify",), name="math_reward")
def math_verified(answer: str, right: str | None) -> float | None:
    """Score one answer for `math_reward`."""
    if right is None:  # a row of another dataset
        return None
    from math_verify import verify

    stated = right if "$" in right or "\\boxed" in right or "\\(" in right or "\\[" in right else f"${right}$"
    expected = _parsed_mathematics(stated) or _parsed_mathematics(right)
    if not expected:
        return None
    return float(
        verify(expected, _parsed_mathematics(answer, extraction_mode="first_match"), timeout_seconds=None)
    )


@in_workers(needs=("math_verify",), name="math_readable")
def math_parsed(answer: str) -> float:
    """Return 1 if math-verify finds an answer in the text, else 0."""
    return float(bool(_parsed_mathematics(answer, extraction_mode="first_match")))


def _parsed_mathematics(text: str, **options: Any) -> list[Any]:
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # hides its warning about limits: the worker has them
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    kinds = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())
    expressions: list[Any] = parse(text, kinds, parsing_timeout=None, **options)
    return expressions


# JSON by a schema. A schema may contain a regular expression that never ends, so workers evaluate it.


@in_workers(needs=("jsonschema",))
def json_schema(text: str, schema: Any) -> float | None:
    """Score 1 for JSON that matches the schema, else 0; None if the row has no schema.

    The JSON is the whole completion or its last code block.

    Args:
        schema: a mapping, JSON text, or a file next to run.yaml. An argument for all rows, or a column.
    """
    if schema is None:
        return None
    written = schema if isinstance(schema, str) else json.dumps(schema, sort_keys=True)
    validator = _validator(written)
    try:
        return float(validator.is_valid(json.loads(_document(text), parse_constant=_refuse)))
    except (ValueError, OverflowError, RecursionError):  # invalid JSON, or a number too large for `multipleOf`
        return 0.0


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not valid JSON")


def _document(text: str) -> str:
    answer = answer_of(text)
    return answer if (block := fenced(answer)) is None else block


@functools.lru_cache(maxsize=256)
def _validator(schema: str) -> Any:
    from jsonschema import validators

    text = schema if schema.lstrip().startswith(("{", "true", "false")) else _file(schema).read_text()
    loaded = json.loads(text)
    kind = validators.validator_for(loaded)
    kind.check_schema(loaded)
    return kind(loaded)


def _file(name: str) -> Path:
    """Find a file in the folders of `sys.path`, that of run.yaml first. Raises FileNotFoundError."""
    path = next((Path(folder, name) for folder in sys.path if Path(folder, name).is_file()), None)
    if path is None:
        raise FileNotFoundError(f"schema file {name} not found; put it next to run.yaml")
    return path


def length_penalty(
    completion_ids: Sequence[Sequence[int]], most_tokens: int, free_tokens: int = 0, **_: Any
) -> list[float]:
    """Score 0 up to `free_tokens`, falling linearly to -1 at `most_tokens`.

    DAPO's soft overlong punishment (arXiv:2503.14476, equation 13); its cache is the difference of the two.

    Args:
        completion_ids: token ids of each completion.
    """
    if not 0 <= free_tokens < most_tokens:
        raise ValueError(f"expected 0 <= free_tokens < most_tokens, got {free_tokens} and {most_tokens}")
    penalized_tokens = most_tokens - free_tokens
    return [max(-1.0, min(0.0, (free_tokens - len(ids)) / penalized_tokens)) for ids in completion_ids]
