"""Reports to the user, each journalled once.

A topic has a state, such as the store being slow or having caught up. An event reports it. An event that reports
the same state as the last one of its topic is not journalled again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from grpo_orch.policies.model.events import (
    BudgetNeared,
    BudgetRefused,
    CapacityShortage,
    DocumentUnreadable,
    Event,
    PitfallFound,
    StoreCaughtUp,
    StoreSlowed,
)

UNREADABLE, BUDGET, CAPACITY, PITFALL, STORE = (
    "unreadable",
    "budget",
    "capacity",
    "pitfall",
    "store",
)
SLOW = "slow"


@dataclass(frozen=True, slots=True)
class Report:
    """The last report of a topic: its state, and when it was journalled."""

    state: str
    at_s: float


Reports = Mapping[str, Report]


def topic_of(event: Event) -> tuple[str, str] | None:
    """Return the topic that an event reports, and its state; None for other events."""
    match event:
        case BudgetNeared():
            return f"{BUDGET} neared", "neared"
        case BudgetRefused():
            return f"{BUDGET} refused {event.role}", "refused"
        case CapacityShortage():
            return f"{CAPACITY} {event.role}", "missing"
        case PitfallFound():
            return f"{PITFALL} {event.kind}", str(event.step)
        case DocumentUnreadable():
            return f"{UNREADABLE} {event.key}", event.reason
        case StoreSlowed():
            return STORE, SLOW
        case StoreCaughtUp():
            return STORE, "caught up"
        case _:
            return None


def is_news(reports: Reports, event: Event) -> bool:
    """Whether an event differs from the last report of its topic."""
    found = topic_of(event)
    if found is None:
        return True
    topic, state = found
    return topic not in reports or reports[topic].state != state


def with_report(reports: Reports, event: Event, time_s: float) -> Reports:
    """Return the reports with the event's added."""
    found = topic_of(event)
    return reports if found is None else {**reports, found[0]: Report(found[1], time_s)}


def without(reports: Reports, *topics: str) -> Reports:
    """Return the reports without topics that begin so; their next event is news again."""
    kept = {name: report for name, report in reports.items() if not name.startswith(topics)}
    return reports if len(kept) == len(reports) else kept
