"""Whether a completion has the form that its prompt asks for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tasks.rewards.says import form
from tasks.rewards.texts import text_of

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
    return [1.0 if _is_exactly(text, tags) else HALF * _share(text, tags) for text in texts]


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


def _share(text: str, tags: Sequence[str]) -> float:
    return sum(map(_is_once, [text] * len(tags), tags)) / len(tags)


def _is_once(text: str, tag: str) -> bool:
    opening, closing = f"<{tag}>", f"</{tag}>"
    return text.count(opening) == text.count(closing) == 1 and text.index(opening) < text.index(closing)
