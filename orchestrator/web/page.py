"""A page: a path, its data, and the template that draws them. Also the window of a run that a request selects.

A page's data are JSON and returned as such for `?format=json`. Request parameters are untrusted and checked here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from grpo_orch.checkpoint.records.metrics import MetricsRow
from grpo_orch.orchestrator.web.run_watch import Observation

TEXT_MAX = 200  # characters of a parameter


class PageError(Exception):
    """The page cannot be shown; `status` is the HTTP status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class PageRequest:
    """The parameters in the path and in the query."""

    path: Mapping[str, str] = field(default_factory=dict)
    query: Mapping[str, str] = field(default_factory=dict)

    def text(self, name: str, default: str = "") -> str:
        """Return a parameter. Raises PageError."""
        found = self.path.get(name, self.query.get(name, default))
        if len(found) > TEXT_MAX:
            raise PageError(400, f"{name}: at most {TEXT_MAX} characters")
        return found

    def choice(self, name: str, among: tuple[str, ...]) -> str:
        """Return one of `among`, the first by default. Raises PageError."""
        found = self.text(name, among[0])
        if found not in among:
            raise PageError(400, f"{name}: expected one of {', '.join(among)}")
        return found

    def number(self, name: str, default: float, least: float, most: float) -> float:
        """Return a number within bounds. Raises PageError."""
        found = self.text(name)
        try:
            number = float(found) if found else default
        except ValueError:
            number = float("nan")
        if not least <= number <= most:
            raise PageError(400, f"{name}: expected a number from {least:g} to {most:g}")
        return number

    def whole(self, name: str, default: int, least: int, most: int) -> int:
        """Return an integer within bounds. Raises PageError."""
        number = self.number(name, default, least, most)
        if number != int(number):
            raise PageError(400, f"{name}: expected a whole number")
        return int(number)


@dataclass(frozen=True, slots=True)
class Page:
    """A page.

    Args:
        path: a route of aiohttp, with parameters in braces.
        data: returns the page's data as JSON types. May be slow and read the store. Raises PageError, StoreError.
        template: a file in `templates`; None: JSON only, for a script.
        name: in the navigation; empty: not in the navigation.
    """

    path: str
    data: Callable[[Observation, PageRequest], dict[str, Any]]
    template: str | None = None
    name: str = ""


# The window: in steps or in time, and the time it covers.

AXES = ("step", "time")
FAR_FUTURE = 1e12


@dataclass(frozen=True, slots=True)
class Window:
    """From `low` to `high` on `axis`, and in time from `from_s` until `until_s`, seconds since the epoch."""

    axis: str
    low: float
    high: float
    from_s: float
    until_s: float

    def at(self, row: MetricsRow) -> float:
        """Return the position of a row on the axis."""
        return float(row.step) if self.axis == "step" else row.time_s

    def holds(self, row: MetricsRow) -> bool:
        return self.low <= self.at(row) <= self.high


def window_of(observation: Observation, request: PageRequest) -> Window:
    """Return the requested window. Raises PageError."""
    axis = request.choice("x", AXES)
    low, high = (
        request.number("from", -FAR_FUTURE, -FAR_FUTURE, FAR_FUTURE),
        request.number("to", FAR_FUTURE, -FAR_FUTURE, FAR_FUTURE),
    )
    begin_s, end_s = extent(observation)
    from_s, until_s = begin_s, end_s
    if axis == "time":
        from_s, until_s = max(low, begin_s), min(high, end_s)
    elif (low, high) != (-FAR_FUTURE, FAR_FUTURE):
        # A row is logged at the end of its step, so the window starts at the end of the step before.
        before_s = max((row.time_s for row in observation.reader.path if row.step < low), default=begin_s)
        from_s = before_s
        until_s = max((row.time_s for row in observation.reader.path if low <= row.step <= high), default=before_s)
    return Window(axis, low, high, from_s, max(from_s, until_s))


def extent(observation: Observation) -> tuple[float, float]:
    """Return the first and last known moment of the run, seconds since the epoch.

    The last is now if a controller is alive, else that of the last record.
    """
    journalled = [time_s for _, time_s, _ in (*observation.reader.history[:1], *observation.reader.history[-1:])]
    logged = [row.time_s for row in (*observation.reader.path[:1], *observation.reader.path[-1:])]
    begin_s = min([*journalled, *logged], default=observation.view.now_s)
    end_s = (
        observation.view.now_s
        if observation.view.daemon.alive
        else max([*journalled, *logged], default=observation.view.now_s)
    )
    return begin_s, max(begin_s, end_s)
