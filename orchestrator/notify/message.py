"""What of the journal a person is told of at once, away from a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from checkpoint.journal import Record
from policies.model.events import (
    BudgetNeared,
    BudgetReached,
    CapacityMissing,
    DeadlineMissed,
    Event,
    RollbackBegun,
    RunMoved,
)
from policies.model.vocabulary import RunPhase

LONGEST = 1000  # characters of a reason: a glance
_TOLD = {
    RunPhase.FINISHED: "finished",
    RunPhase.FAILED: "failed",
    RunPhase.PAUSED: "is paused",
    RunPhase.GAVE_UP: "gave up",
    RunPhase.PARKED: "is parked",
}


@dataclass(frozen=True, slots=True)
class Message:
    """One thing to tell. The same event always has the same `id`, however often it is told."""

    id: str
    number: int  # of the journal entry
    time_s: float  # seconds since the epoch, when it was journalled
    run: str
    store: str
    kind: str  # as docs/monitoring.md lists them
    text: str  # one line


def messages_in(record: Record, run: str, run_id: str, store: str) -> Iterator[Message]:
    """The messages of a journal entry; of most entries there is none. Raises Corrupt."""
    for index, event in enumerate(record.decoded()):
        if (told := _told(event)) is not None:
            kind, text = told
            shown = f"{run} {' '.join(text.split())[:LONGEST]}"
            yield Message(
                f"{run_id}/{record.number}.{index}", record.number, record.time_s, run, store, kind, shown
            )


def _told(event: Event) -> tuple[str, str] | None:
    """Kind and text; None for what can wait until somebody looks."""
    match event:
        case RunMoved() if event.phase in _TOLD:
            return f"{event.phase}", f"{_TOLD[event.phase]}: {event.reason}"
        case RunMoved(phase=RunPhase.STARTING, parked_s=parked_s) if parked_s is not None:
            return "unparked", f"is no longer parked: {event.reason}"
        case RollbackBegun():
            whereto = f"timeline {event.fork.timeline} from step {event.fork.start_at}"
            return "rollback", f"is rolled back at step {event.from_step}, to {whereto}: {event.reason}"
        case CapacityMissing():
            return "no_capacity", f"waits: {event.reason}"
        case DeadlineMissed():
            return "deadline_missed", f"is at step {event.step} of {event.steps} and misses its deadline"
        case BudgetNeared():
            return "budget_neared", f"has spent {event.spent_usd:.2f} of its {event.usd:.2f} USD"
        case BudgetReached():
            return "budget_reached", f"has reached its budget and is to {event.at}: {event.reason}"
        case _:
            return None
