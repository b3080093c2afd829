"""Extract the text of a completion and its parts. Everything here is linear in the length of the text."""

from __future__ import annotations

from typing import Any

SHOWN_MAX = 80  # characters of a completion in a log


def text_of(completion: Any) -> str:
    """Return the text of a completion: a string, or a chat's last message without its images."""
    if isinstance(completion, str):
        return completion
    content = completion[-1].get("content") if completion else None
    if isinstance(content, list):
        return "".join(part.get("text") or "" for part in content)
    return content or ""


def answer_of(text: str, opened: bool = False) -> str:
    """Return the text after the reasoning, `<think>...</think>`; empty if the reasoning is unfinished.

    Args:
        opened: the prompt ends with `<think>`, so a text without `</think>` is all reasoning.
    """
    _, closed, after = text.rpartition("</think>")
    if closed:
        return after
    return "" if opened or "<think>" in text else text


def element(text: str, tag: str) -> str | None:
    """Return the content of the last complete `<tag>...</tag>`, or None."""
    before, closed, _ = text.rpartition(f"</{tag}>")
    _, opened, inside = before.rpartition(f"<{tag}>")
    return inside if closed and opened else None


def fenced(text: str) -> str | None:
    """Return the content of the last code block between lines of three backquotes, or None."""
    before, fence, _ = text.rpartition("\n```")
    if not fence:
        return None
    _, fence, block = f"\n{before}".rpartition("\n```")
    return block.partition("\n")[2] if fence else None


def shown(text: str) -> str:
    """Return the text as one short ASCII line, safe to print."""
    return ascii(text if len(text) <= SHOWN_MAX else text[: SHOWN_MAX - 3] + "...")
