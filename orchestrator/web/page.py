"""What a page is: a path, the data it shows, and the template that draws them.

Its data are JSON: `?format=json` answers with them, for programs. What a page is asked for comes from anybody's
browser and is checked here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

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
