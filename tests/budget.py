"""How long tests try and wait: properties at length in CI, shortly by a person after a change."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Literal, TypeVar

# For what takes a moment on an idle machine, and a whole trainer half a minute. Only what hangs reaches it: a busy
# machine may be twenty times slower.
HANG_S = 600.0

T = TypeVar("T")


def examples(most: int) -> int:
    """Return how many examples to try: `most` where CI is set, a fifth of them elsewhere."""
    return most if os.environ.get("CI") else most // 5


def until(what: str, look: Callable[[], T | Literal[False] | None]) -> T:
    """Look again and again until there is something; the time limit is a failure that says what was missing."""
    deadline_s = time.monotonic() + HANG_S
    while time.monotonic() < deadline_s:
        if found := look():
            return found
        time.sleep(0.01)
    raise AssertionError(f"not within {HANG_S:g} s: {what}")
