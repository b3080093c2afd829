"""The screen: what the run is doing, whether it learns, what it costs, who works, what happened last.

Drawn within whatever there is of columns and lines. Where there is not enough, what a person needs least is left
out; no information is in a colour alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from orchestrator.views.model import RunView
from orchestrator.views.terminal import notes
from orchestrator.views.terminal.head import figures, head
from orchestrator.views.terminal.lines import fit, left
from orchestrator.views.terminal.machines import machines
from orchestrator.views.words import clock, duration

HEIGHT = 24
MACHINES_LEAST = 5  # lines: their head, three, and the counts
MACHINES_SHARE = 2 / 3  # of what is left for them and for what happened, at most
EVENTS_LEAST = 3
MEMBERSHIP_SHOWN = 3
TOLD = 11  # cells: a time of day, or how long ago
BLANK = Text("")


class Screen:
    """A view of a run, for rich: as wide as the console, at most `height` lines."""

    def __init__(self, view: RunView, height: int = HEIGHT) -> None:
        self._view = view
        self._height = height

    def __rich_console__(self, _console: Console, options: ConsoleOptions) -> RenderResult:
        yield from drawn(self._view, options.max_width, self._height)


class _Room:
    """The lines that are left of a screen."""

    def __init__(self, height: int) -> None:
        self.left = max(0, height)

    def take(self, lines: Sequence[Text], keep: int = 0) -> list[Text]:
        """As many of them as there is room for beside `keep` more."""
        taken = list(lines[: max(0, self.left - keep)])
        self.left -= len(taken)
        return taken


def drawn(view: RunView, width: int, height: int) -> list[Text]:
    """The lines of the screen from the top. What is asked for room first is needed most."""
    room = _Room(height)
    top = room.take(head(view, width))
    trouble = room.take(notes.trouble(view, width))
    curves = room.take(figures(view, width), EVENTS_LEAST)
    keep = min(MACHINES_LEAST, len(view.nodes) + 2) + EVENTS_LEAST
    dollars = room.take(notes.money(view.money, width), keep)
    dollars += room.take(notes.deadline(view, width), keep)
    step = room.take(notes.step(view.step_split, width), keep)
    coming = room.take(notes.coming(view, width), keep)
    beside = room.take(notes.weights(view, width), keep) + room.take(notes.fleet(view.fleet, width), keep)
    blanks = room.take([BLANK] * 3, keep)
    fleet = room.take(machines(view, width, _machine_lines(view, room.left)))
    changes = room.take(_membership(view, width), EVENTS_LEAST + 1)
    if changes:
        changes += room.take([BLANK])
    events = _events(view, width, room.left)
    gap = [blanks[:1] for blanks in (blanks, blanks[1:], blanks[2:])]
    facts = [*curves, *dollars, *step, *beside, *trouble, *coming]
    return [*top, *gap[2], *facts, *gap[0], *fleet, *gap[1], *changes, *events]


def _machine_lines(view: RunView, room: int) -> int:
    """How many lines the machines have."""
    most = max(min(MACHINES_LEAST, room), room - max(EVENTS_LEAST, round((1 - MACHINES_SHARE) * room)))
    return min(len(view.nodes) + 2, most)


def _membership(view: RunView, width: int) -> list[Text]:
    return [
        _told(f"{duration(change.ago_s)} ago", change.reason, width)
        for change in view.membership[-MEMBERSHIP_SHOWN:]
    ]


def _events(view: RunView, width: int, count: int) -> list[Text]:
    shown = view.events[-count:] if count > 0 else ()
    return [_told(clock(line.time_s), line.text, width) for line in shown]


def _told(when: str, words: str, width: int) -> Text:
    before = left(when, TOLD)
    if width < 2 * TOLD:
        return Text(fit(words, width), no_wrap=True)
    return Text(before, "dim", no_wrap=True).append(fit(words, width - len(before)), "not dim")
