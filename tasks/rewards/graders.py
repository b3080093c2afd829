"""What a reward function says of itself, for `grpo-orch eval`, which tells wrong answers from unreadable ones."""

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

from tasks.rewards.in_workers import in_workers
from tasks.rewards.texts import answer_of, element, fenced, text_of

Reward = TypeVar("Reward", bound=Callable[..., Any])


def readable_by(says: Callable[..., Sequence[bool]], full: float = 1.0) -> Callable[[Reward], Reward]:
    """Mark a function that tells right answers from wrong ones.

    Args:
        says: called as the function is; returns for each completion whether an answer could be read in it.
        full: what the function gives a right answer.
    """

    def mark(reward: Reward) -> Reward:
        reward.readable, reward.full = says, full  # type: ignore[attr-defined]  # read by `tasks.evaluating`
        return reward

    return mark


def form(reward: Reward) -> Reward:
    """Mark a function that looks at the form alone, and gives 1 for the right one."""
    reward.is_form = True  # type: ignore[attr-defined]  # as above
    return reward


# Whether a completion has the form that its prompt asks for.

HALF = 0.5  # what all elements are worth at most that are there, but not in order or among other text


@form
def think_format(completions: Sequence[Any], opened: bool = False, **_: Any) -> list[float]:
    """1 for thoughts between one pair of `<think>` tags and then an answer, else 0.

    Args:
        opened: the prompt ends with `<think>`, as some chat templates have it.
    """
    return [float(_thinks(f"<think>{text_of(one)}" if opened else text_of(one))) for one in completions]


@form
def xml_format(
    completions: Sequence[Any], tags: Sequence[str] = ("reasoning", "answer"), opened: bool = False, **_: Any
) -> list[float]:
    """1 for one element after the other and nothing else; else up to 0.5, by the share that is there once.

    Without a part for what is nearly right a model that never wrote an element learns nothing from it.

    Args:
        tags: the elements' names, in their order.
        opened: the prompt ends with the first opening tag.
    """
    texts = [f"<{tags[0]}>{text_of(one)}" if opened else text_of(one) for one in completions]
    return [1.0 if _is_exactly(text, tags) else HALF * _share_there(text, tags) for text in texts]


def _thinks(text: str) -> bool:
    thoughts, closed, answer = text.strip().partition("</think>")
    opened = thoughts.startswith("<think>") and "<think>" not in thoughts[1:] + answer
    return bool(opened and closed and "</think>" not in answer and answer.strip())


def _is_exactly(text: str, tags: Sequence[str]) -> bool:
    rest = text.strip()
    for tag in tags:
        if not rest.startswith(f"<{tag}>"):
            return False
        inside, closed, rest = rest.removeprefix(f"<{tag}>").partition(f"</{tag}>")
        if not closed or not inside.strip() or any(f"<{one}>" in inside for one in tags):
            return False
        rest = rest.lstrip()
    return not rest


def _share_there(text: str, tags: Sequence[str]) -> float:
    return sum(map(_is_once, [text] * len(tags), tags)) / len(tags)


def _is_once(text: str, tag: str) -> bool:
    opening, closing = f"<{tag}>", f"</{tag}>"
    return text.count(opening) == text.count(closing) == 1 and text.index(opening) < text.index(closing)


# GSM8K's answers: a number after `####`.

MARK = "####"
NUMBER_MAX = 64  # characters in which a number ends: the rest of a long text is not looked through
_NUMBER = re.compile(r"\s*[$€£]?\s*([-+]?[$€£]?[\d,]*\.?\d+)\.?(?![\w.,]*\d)")


def gsm8k_readable(
    completions: Sequence[Any], tag: str | None = None, opened: bool = False, **_: Any
) -> list[bool]:
    """Whether each has a number where `gsm8k_reward` looks for one."""
    found = [_number_text(text_of(one), tag, opened) for one in completions]
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
    found = [_number_text(text_of(one), tag, opened) for one in completions]
    return [_score(one, str(right)) for one, right in zip(found, columns[column], strict=True)]


def _score(found: str | None, right: str) -> float | None:
    expected = _number(right.rpartition(MARK)[2])
    if expected is None:
        return None
    return float(found is not None and _number(found) == expected)


def _number_text(text: str, tag: str | None, opened: bool) -> str | None:
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


# Mathematics by math-verify, in processes of its own.
#
# Its time limits are signals, which fail outside the main thread and hold in no loop of sympy's own C code.

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
    expected = _parsed_mathematics(stated) or _parsed_mathematics(right)
    if not expected:
        return None
    return float(
        verify(expected, _parsed_mathematics(answer, extraction_mode="first_match"), timeout_seconds=None)
    )


@in_workers(needs=("math_verify",), name="math_readable")
def math_parsed(answer: str) -> float:
    """As `math_readable`, of one answer."""
    return float(bool(_parsed_mathematics(answer, extraction_mode="first_match")))


def _parsed_mathematics(text: str, **how: Any) -> list[Any]:
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that it has no limits: the worker has
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    kinds = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())
    found: list[Any] = parse(text, kinds, parsing_timeout=None, **how)
    return found


# Whether a completion is JSON of a given form, by a JSON schema.
#
# A schema may hold a pattern that takes forever over some text: it is tried in processes that can be killed.


@in_workers(needs=("jsonschema",))
def json_schema(text: str, schema: Any) -> float | None:
    """1 for JSON that the schema allows, else 0; None where the dataset has no schema. A completion may be JSON
    alone, or have it in its last code block.

    Args:
        schema: a schema as a mapping or its JSON, or a file of it beside run.yaml. An argument for all, or a
        column.
    """
    if schema is None:
        return None
    written = schema if isinstance(schema, str) else json.dumps(schema, sort_keys=True)
    validator = _validator(written)
    try:
        return float(validator.is_valid(json.loads(_document(text), parse_constant=_refuse)))
    except (ValueError, OverflowError, RecursionError):  # no JSON, or a number too large for `multipleOf`
        return 0.0


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


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
    """A file where modules are found: beside run.yaml first. Raises FileNotFoundError."""
    found = next((Path(folder, name) for folder in sys.path if Path(folder, name).is_file()), None)
    if found is None:
        raise FileNotFoundError(f"no schema {name} beside run.yaml")
    return found


# A penalty for length.


def length_penalty(
    completion_ids: Sequence[Sequence[int]], most_tokens: int, free_tokens: int = 0, **_: Any
) -> list[float]:
    """0 up to `free_tokens`, falling to -1 at `most_tokens`: DAPO's soft punishment of length (arXiv:2503.14476,
    equation 13, whose cache is the difference of the two).

    Args:
        completion_ids: token ids of each completion.
    """
    if not 0 <= free_tokens < most_tokens:
        raise ValueError(f"expected 0 <= free_tokens < most_tokens, got {free_tokens} and {most_tokens}")
    room = most_tokens - free_tokens
    return [max(-1.0, min(0.0, (free_tokens - len(ids)) / room)) for ids in completion_ids]
