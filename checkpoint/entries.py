"""The journal's objects as stored, one numbered entry for one tick's events, and how they are read.

Numbers have no gaps: what lies between the first and the last entry is there, or the journal is broken and says
which is missing. Other names below `journal/` are not ours and are passed over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from checkpoint import layout
from checkpoint.codec import event_from_plain, from_json
from checkpoint.errors import Corrupt, NotFound
from checkpoint.store import Store
from policies.events import Event
from policies.state import RunState, apply

SCHEMA = 1
READERS = 16  # requests in the air at once; a store answers one in tens of milliseconds

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Record:
    """One journal entry as stored. `nonce` tells a writer's own entry, met again after a lost answer."""

    schema: int
    number: int
    epoch: int
    writer: str
    nonce: str
    time_s: float
    events: list[dict[str, Any]]

    def decoded(self) -> tuple[Event, ...]:
        """The events, typed. Raises Corrupt."""
        return tuple(event_from_plain(event, f"journal entry {self.number}") for event in self.events)


def entry(store: Store, number: int) -> Record:
    """Return one entry. Raises Corrupt when it is missing, or not what its name says."""
    key = layout.journal_entry(number)
    try:
        record = from_json(store.get(key), Record, key)
    except NotFound:
        hint = "nothing here deletes entries; restore it from a copy of the store"
        raise Corrupt(f"{store.url}: journal entry {number} is missing", hint) from None
    if record.schema > SCHEMA:
        raise Corrupt(f"{key}: entry of schema {record.schema}", f"this grpo-orch reads up to {SCHEMA}")
    if record.number != number:
        raise Corrupt(f"{key}: holds entry {record.number}", "it was copied there; restore the store")
    return record


def entries(store: Store, numbers: Iterable[int]) -> list[Record]:
    """Return entries in the order of `numbers`. Raises Corrupt."""
    return in_parallel(lambda number: entry(store, number), numbers)


def tail(store: Store, after: int) -> list[Record]:
    """Return every entry whose number is above `after`, in order, read one by one. Raises Corrupt."""
    start = layout.journal_entry(after) if after else None
    numbers = (layout.number_of(one.key) for one in store.entries(layout.JOURNAL, after=start))
    listed = {number for number in numbers if number is not None}
    wanted = range(after + 1, max(listed, default=after) + 1)
    for number in wanted:
        if number not in listed:
            # A listing of files may miss what was written while it ran and show what came after: only the entry
            # itself can be missing. Asked for alone, so that a stray high number is one request, not a million.
            entry(store, number)
    return entries(store, wanted)


def advance(state: RunState, records: Iterable[Record]) -> RunState:
    """Fold the records onto `state`. Raises Corrupt, or IllegalMove for a history that cannot have been."""
    for record in records:
        for event in record.decoded():
            state = apply(state, event, record.time_s, record.number)
    return state


def in_parallel(read: Callable[[int], T], numbers: Iterable[int]) -> list[T]:
    """Return `read` of each number, in their order, with READERS at work. Raises what the first failed one did."""
    with ThreadPoolExecutor(READERS) as pool:
        return list(pool.map(read, numbers))
