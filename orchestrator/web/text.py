"""What others wrote, made fit to be shown: it cannot be markup, nor move or hide what stands beside it.

Jinja escapes markup. Here goes what HTML lets through: control characters, those that turn or hide text, and too
much of it. A model's completions may hold anything.
"""

from __future__ import annotations

import re
from typing import Any

from markupsafe import Markup

SHOWN_MAX = 4000  # characters of one value; whoever shows longer ones cuts them for itself, and says so

# Controls but for tab and line feed; marks and overrides of direction; invisible characters and separators;
# surrogates, which no encoding has; tags, private use and noncharacters stay, as they show.
_UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\U000e0000-\U000e007f]"
)


def shown(text: str, most: int = SHOWN_MAX) -> str:
    """The text with what is not seen written as `␀U+202E`-like names, and cut after `most` characters."""
    cut = text if len(text) <= most else f"{text[:most]} … and {len(text) - most:,} characters more"
    return _UNSEEN.sub(lambda found: f"‹U+{ord(found[0]):04X}›", cut)


def finalize(value: Any) -> Any:
    """For Jinja: every text that a template prints goes through `shown`."""
    return value if isinstance(value, Markup) or not isinstance(value, str) else shown(value)
