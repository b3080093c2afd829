"""Clocks for a controller: a wall clock that never jumps, and the time observed without a gap.

Journal entries carry wall-clock times, for people and because they outlive the process that wrote them. But wall
clocks are stepped and differ between hosts, so a process reads its wall clock once, at its start, and counts on
from there.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

# After a longer gap between ticks, this process was stopped or waited for its store; the gap proves nothing.
GAP_S = 30.0
_CLOCK = time.CLOCK_BOOTTIME if sys.platform == "linux" else time.CLOCK_MONOTONIC


def awake_or_asleep_s() -> float:
    """Return seconds on a clock that never goes back and runs on while a laptop sleeps."""
    return time.clock_gettime(_CLOCK)


class RunClock:
    """Seconds since the epoch, unaffected by changes of the machine's clock after this process's start."""

    def __init__(
        self, wall: Callable[[], float] = time.time, clock: Callable[[], float] = awake_or_asleep_s
    ) -> None:
        self._clock = clock
        self._ahead_s = wall() - clock()

    def now_s(self) -> float:
        """Return the current time in seconds since the epoch; it never goes back and never jumps."""
        return self._ahead_s + self._clock()


class Steadiness:
    """Measures for how long this process has observed and written without a gap. Times are RunClock's."""

    def __init__(self) -> None:
        self._since_s: float | None = None
        self._looked_at_s = 0.0

    def observe(self, now_s: float) -> float:
        """Record a tick. Returns the seconds since the first tick of the unbroken sequence."""
        if self._since_s is None or now_s - self._looked_at_s > GAP_S:
            self._since_s = now_s
        self._looked_at_s = now_s
        return now_s - self._since_s

    def interrupt(self) -> None:
        """Record a failed read or write: the next tick starts a new sequence."""
        self._since_s = None
