"""Watching a run: the screen drawn again and again, and plain lines where the output is no terminal."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console
from rich.live import Live

from orchestrator.views.model import RunView
from orchestrator.views.terminal.lines import plain
from orchestrator.views.terminal.screen import Screen
from orchestrator.views.words import clock, short

REFRESH_S = 0.5


def watch(
    get_view: Callable[[], RunView],
    wait: Callable[[float], bool],
    console: Console | None = None,
) -> RunView:
    """Show the run until it is over, and return the last view.

    Args:
        get_view: looks at the run.
        wait: waits for so many seconds, and returns True to stop watching: `threading.Event().wait`.
        console: where to; on anything but a terminal that can be drawn on, one plain line for each change is
            printed.

    Ctrl-C is the caller's: KeyboardInterrupt passes, the terminal restored.
    """
    console = console or Console()
    if not console.is_terminal or console.is_dumb_terminal:
        return _follow(get_view, wait, console)
    view = get_view()
    with Live(Screen(view, console.height), console=console, auto_refresh=False) as live:
        while not view.over and not wait(REFRESH_S):
            view = get_view()
            live.update(Screen(view, console.height), refresh=True)
        live.update(Screen(view, console.height), refresh=True)
    return view


def changes(before: RunView | None, view: RunView) -> list[str]:
    """Return a plain line for each event and the step that are new since `before`."""
    known = {(line.type, line.number, line.index) for line in before.events} if before else set()
    fresh = [line for line in view.events if (line.type, line.number, line.index) not in known]
    told = [f"{clock(line.time_s)} {plain(line.text)}" for line in fresh]
    newest = _newest(view)
    if newest is not None and (before is None or _newest(before) != newest):
        step, reward, kl = newest
        of = f"/{view.max_steps}" if view.max_steps else ""
        told.append(f"{clock(view.now_s)} step {step}{of} reward {short(reward)} kl {short(kl)}")
    return told


def _newest(view: RunView) -> tuple[int, float | None, float | None] | None:
    """What a plain line tells of the newest row, which an evaluation may still add to."""
    row = view.recent[-1] if view.recent else None
    return None if row is None else (row.step, row.values.get("reward"), row.values.get("kl"))


def _follow(get_view: Callable[[], RunView], wait: Callable[[float], bool], console: Console) -> RunView:
    before: RunView | None = None
    while True:
        view = get_view()
        for line in changes(before, view):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
        if view.over or wait(REFRESH_S):
            return view
        before = view
