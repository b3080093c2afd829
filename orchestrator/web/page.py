"""What a page is: a path, the data it shows, the template that draws them; and the window of a run that is asked
for.

A page's data are JSON: `?format=json` answers with them, for programs. What a page is asked for comes from
anybody's browser and is checked here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from checkpoint.records.metrics import Row
from orchestrator.web.watch import Look

TEXT_MAX = 200  # characters of anything in a query


class Refused(Exception):
    """What was asked for cannot be shown; `status` is HTTP's."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class Asked:
    """Names in the path and in the query."""

    path: Mapping[str, str] = field(default_factory=dict)
    query: Mapping[str, str] = field(default_factory=dict)

    def text(self, name: str, default: str = "") -> str:
        """Raises Refused."""
        found = self.path.get(name, self.query.get(name, default))
        if len(found) > TEXT_MAX:
            raise Refused(400, f"{name}: at most {TEXT_MAX} characters")
        return found

    def choice(self, name: str, among: tuple[str, ...]) -> str:
        """One of `among`, the first by default. Raises Refused."""
        found = self.text(name, among[0])
        if found not in among:
            raise Refused(400, f"{name}: expected one of {', '.join(among)}")
        return found

    def number(self, name: str, default: float, least: float, most: float) -> float:
        """Raises Refused."""
        found = self.text(name)
        try:
            number = float(found) if found else default
        except ValueError:
            number = float("nan")
        if not least <= number <= most:
            raise Refused(400, f"{name}: expected a number from {least:g} to {most:g}")
        return number

    def whole(self, name: str, default: int, least: int, most: int) -> int:
        """Raises Refused."""
        number = self.number(name, default, least, most)
        if number != int(number):
            raise Refused(400, f"{name}: expected a whole number")
        return int(number)


@dataclass(frozen=True, slots=True)
class Page:
    """One page.

    Args:
        path: as aiohttp's router takes it, names in braces.
        data: what it shows, as JSON's own types; it may take its time and read the store. Raises Refused,
            StoreError.
        template: in `templates`; None: there is JSON alone, for a script.
        name: in the navigation; empty: it is not there.
    """

    path: str
    data: Callable[[Look, Asked], dict[str, Any]]
    template: str | None = None
    name: str = ""


# The window: in steps or in time, and which time that is.

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
