"""The part of a run that is looked at: what was asked for, in steps or in time, and which time that is."""

from __future__ import annotations

from dataclasses import dataclass

from checkpoint.records.metrics import Row
from orchestrator.web.page import Asked
from orchestrator.web.watch import Look

AXES = ("step", "time")
FAR = 1e12


@dataclass(frozen=True, slots=True)
class Window:
    """From `low` to `high` on `axis`; the same from `from_s` until `until_s`, seconds since the epoch."""

    axis: str
    low: float
    high: float
    from_s: float
    until_s: float

    def at(self, row: Row) -> float:
        """Where a row is on the axis."""
        return float(row.step) if self.axis == "step" else row.time_s

    def holds(self, row: Row) -> bool:
        return self.low <= self.at(row) <= self.high


def window_of(look: Look, asked: Asked) -> Window:
    """Raises Refused."""
    axis = asked.choice("x", AXES)
    low, high = asked.number("from", -FAR, -FAR, FAR), asked.number("to", FAR, -FAR, FAR)
    begin_s, end_s = extent(look)
    from_s, until_s = begin_s, end_s
    if axis == "time":
        from_s, until_s = max(low, begin_s), min(high, end_s)
    elif (low, high) != (-FAR, FAR):
        # With the time that its first step took: a step's row is of its end.
        before_s = max((row.time_s for row in look.path if row.step < low), default=begin_s)
        from_s = before_s
        until_s = max((row.time_s for row in look.path if low <= row.step <= high), default=before_s)
    return Window(axis, low, high, from_s, max(from_s, until_s))


def extent(look: Look) -> tuple[float, float]:
    """When the run began, and until when something is known of it, seconds since the epoch. Where nobody steers
    it, that is until the last word."""
    told = [time_s for _, time_s, _ in (*look.history[:1], *look.history[-1:])]
    logged = [row.time_s for row in (*look.path[:1], *look.path[-1:])]
    begin_s = min([*told, *logged], default=look.view.now_s)
    end_s = look.view.now_s if look.view.daemon.alive else max([*told, *logged], default=look.view.now_s)
    return begin_s, max(begin_s, end_s)
