"""Time as a controller may use it: on a clock that is never set, and over looks that followed on one another.

Journal entries carry wall-clock times, for people and because they outlive the process that wrote them. But a wall
clock is stepped, and two hosts' differ; so one process reads it once, at its start, and counts on from there.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

# Two looks so far apart say nothing of what lay between: this process was stopped, or waited for its store.
GAP_S = 30.0
_CLOCK = time.CLOCK_BOOTTIME if sys.platform == "linux" else time.CLOCK_MONOTONIC


def awake_or_asleep_s() -> float:
    """Seconds on a clock that never goes back, and goes on while a laptop sleeps."""
    return time.clock_gettime(_CLOCK)


class RunClock:
    """Seconds since the epoch as of this process's start, however the machine's own clock is set later."""

    def __init__(
        self, wall: Callable[[], float] = time.time, clock: Callable[[], float] = awake_or_asleep_s
    ) -> None:
        self._clock = clock
        self._ahead_s = wall() - clock()

    def now_s(self) -> float:
        """Return the present time in seconds since the epoch; it never goes back and never jumps."""
        return self._ahead_s + self._clock()


class Steadiness:
    """For how long this process has looked at everything, and written, without a break. Times are RunClock's."""

    def __init__(self) -> None:
        self._since_s: float | None = None
        self._looked_at_s = 0.0

    def look(self, now_s: float) -> float:
        """A look begins. Returns the seconds since the first of the unbroken row of looks that it belongs to."""
        if self._since_s is None or now_s - self._looked_at_s > GAP_S:
            self._since_s = now_s
        self._looked_at_s = now_s
        return now_s - self._since_s

    def broke(self) -> None:
        """A read or a write has failed: the row begins anew with the next look."""
        self._since_s = None
