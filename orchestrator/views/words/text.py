"""What others wrote, made fit to be shown: it can neither move nor hide what stands beside it.

A model's completions may hold anything: control characters, marks that turn or hide text, and far too much of it.
"""

from __future__ import annotations

import re

SHOWN_MAX = 4000  # characters of one value; whoever shows longer ones cuts them for itself, and says so

# Controls but for tab and line feed, marks and overrides of direction, invisible characters and separators,
# surrogates, which no encoding has, and tags, which nothing draws.
_UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\U000e0000-\U000e007f]"
)


def shown(text: str, most: int = SHOWN_MAX) -> str:
    """The text with each character that is not seen written as `‹U+202E›`, and cut after `most` characters."""
    cut = text if len(text) <= most else f"{text[:most]} … and {len(text) - most:,} characters more"
    return _UNSEEN.sub(lambda found: f"‹U+{ord(found[0]):04X}›", cut)
