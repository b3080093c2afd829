"""A reward that even random weights earn some of, so that every step of a short run learns."""

from __future__ import annotations

from typing import Any


def lower_share(completions: list[str], **_: Any) -> list[float]:
    """The share of a completion's characters that are lower-case letters."""
    return [sum(map(str.islower, text)) / max(1, len(text)) for text in completions]
