"""A completion's text and its parts. A model may have written anything: all of this is linear in its length."""

from __future__ import annotations

from typing import Any

SHOWN_MAX = 80  # characters of a completion in a log


def text_of(completion: Any) -> str:
    """The text of a completion: plain, or the last message of a chat. Its images count for nothing."""
    if isinstance(completion, str):
        return completion
    content = completion[-1].get("content") if completion else None
    if isinstance(content, list):
        return "".join(part.get("text") or "" for part in content)
    return content or ""


def answer_of(text: str, opened: bool = False) -> str:
    """What follows the thoughts, `<think>...</think>`; all of a text without them, nothing of one that never ends
    them.

    Args:
        opened: the prompt ends with `<think>`, so that a text without `</think>` is thoughts alone.
    """
    _, closed, after = text.rpartition("</think>")
    if closed:
        return after
    return "" if opened or "<think>" in text else text


def element(text: str, tag: str) -> str | None:
    """What is in the last whole `<tag>...</tag>`; None where there is none."""
    before, closed, _ = text.rpartition(f"</{tag}>")
    _, opened, inside = before.rpartition(f"<{tag}>")
    return inside if closed and opened else None


def fenced(text: str) -> str | None:
    """What is in the last block between lines of three backquotes; None where there is none."""
    before, fence, _ = text.rpartition("\n```")
    if not fence:
        return None
    _, fence, block = f"\n{before}".rpartition("\n```")
    return block.partition("\n")[2] if fence else None


def shown(text: str) -> str:
    """A text in one short line, safe to print."""
    return ascii(text if len(text) <= SHOWN_MAX else text[: SHOWN_MAX - 3] + "...")
