"""The way to a run's deadline in words, the same in the terminal and on the run page."""

from __future__ import annotations

from orchestrator.views.model import RunView
from orchestrator.views.words import duration, moment


def deadline_words(view: RunView) -> list[str]:
    """When it is, where the run is on the way, and what keeps it, the most important first; empty without one."""
    told = view.deadline
    if told is None:
        return []
    words = [moment(told.deadline_s)]
    if told.ended_s is not None:
        apart_s = told.deadline_s - told.ended_s
        return [*words, f"kept, {duration(apart_s)} before" if apart_s >= 0 else f"missed by {duration(-apart_s)}"]
    if told.end_s is not None:
        words.append(f"ends {moment(told.end_s)}")
    if told.expected_step is not None:
        words.append(f"step {view.step:,}, {told.expected_step:,.0f} expected{': behind' * bool(told.behind)}")
    if told.nodes is not None:
        many = "1 node keeps it" if told.nodes == 1 else f"{told.nodes} nodes keep it"
        words.append(many if told.nodes else "out of reach")
    return words


def is_late(view: RunView) -> bool:
    """Whether the deadline is missed, or will be as it goes now."""
    told = view.deadline
    if told is None:
        return False
    ends_s = told.end_s if told.ended_s is None else told.ended_s
    return told.nodes == 0 or (ends_s is not None and ends_s > told.deadline_s)
