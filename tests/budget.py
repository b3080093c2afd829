"""How long tests try and wait: properties at length in CI, shortly by a person after a change."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Literal, TypeVar

# For what takes a moment on an idle machine, and a whole trainer half a minute. Only what hangs reaches it: a busy
# machine may be twenty times slower.
HANG_S = 600.0
LOOK_EVERY_S = 0.01
LOOK_REST_FACTOR, LOOK_REST_MAX_S = 10.0, 1.0  # of the pause after a look, by the processor time of the look

T = TypeVar("T")


def examples(most: int) -> int:
    """Return how many examples to try: `most` where CI is set, a fifth of them elsewhere."""
    return most if os.environ.get("CI") else most // 5


def until(
    what: str,
    look: Callable[[], T | Literal[False] | None],
    limit_s: float = HANG_S,
    last_words: Callable[[], str] = str,
) -> T:
    """Look again and again until there is something; the time limit is a failure that says what was missing."""
    deadline_s = time.monotonic() + limit_s
    while time.monotonic() < deadline_s:
        began_s = time.process_time()
        if found := look():
            return found
        # A look at a run's journal in an S3 store takes a tenth of a second of a core that the run needs.
        rest_s = LOOK_REST_FACTOR * (time.process_time() - began_s)
        time.sleep(min(max(LOOK_EVERY_S, rest_s), LOOK_REST_MAX_S))
    raise AssertionError(f"not within {limit_s:g} s: {what}\n{last_words()}")
