"""The journal's entries as stored, one numbered object for each tick's events, and how they are read.

Numbers have no gaps: an entry missing between the first and the last is damage, and is named. Other names below
`journal/` are ignored.

A power cut may leave the last entries torn: present, but without content. What they said is lost, and the run goes
on without it: a torn entry followed only by torn ones is void. Its number stays taken, so that a late controller
meets it. The next take-over lists the torn entries before it as set aside, and from then on that list decides: any
other torn entry is damage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import count
from typing import Any, TypeVar

import structlog

from checkpoint.store import layout
from checkpoint.store.codec import check_schema, event_from_plain, from_json
from checkpoint.store.errors import Corrupt, Torn
from checkpoint.store.run_store import Store
from policies.model.events import Event
from policies.model.fold import apply, draft, final
from policies.model.state import RunState

SCHEMA = 1
READS = 3  # of a torn entry: the wire may be at fault, not the store
READERS = 16  # requests at once; a store answers one in tens of milliseconds

log = structlog.get_logger()
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Record:
    """One journal entry as stored. `nonce` tells a writer's own entry, met again after a lost answer; `set_aside`
    are the numbers of the torn entries right before a take-over."""

    schema: int
    number: int
    epoch: int
    writer: str
    nonce: str
    time_s: float
    events: list[dict[str, Any]]
    set_aside: list[int] = field(default_factory=list)

    @property
    def is_void(self) -> bool:
        """Whether it stands for a torn entry. Real epochs begin at 1."""
        return self.epoch == 0

    def decoded(self) -> tuple[Event, ...]:
        """The events, typed. Raises Corrupt."""
        return tuple(event_from_plain(event, f"journal entry {self.number}") for event in self.events)


def entry(store: Store, number: int) -> Record:
    """Return one entry. Raises Corrupt when it is missing, Torn or not what its name says."""
    found = _read(store, number)
    if found is None:
        hint = "nothing here deletes entries; restore it from a copy of the store"
        raise Corrupt(f"{store.url}: journal entry {number} is missing", hint)
    return found


def entries(store: Store, numbers: Iterable[int]) -> list[Record]:
    """Return entries in the order of `numbers`, void ones as such. Raises Corrupt."""
    found = in_parallel(lambda number: _entry_or_void(store, number), numbers)
    aside = {number for record in found for number in record.set_aside}
    return [_void(record.number) if record.number in aside else record for record in found]


def _entry_or_void(store: Store, number: int) -> Record:
    try:
        return entry(store, number)
    except Torn as error:
        if not _is_set_aside(store, number):
            raise
        log.warning("torn_entry_left_out", number=number, error=str(error))
        return _void(number)


def _void(number: int) -> Record:
    return Record(SCHEMA, number, 0, "", "", 0.0, [])


def _is_set_aside(store: Store, number: int) -> bool:
    """Whether the next entry that is not torn sets this torn one aside, or there is none."""
    for later in count(number + 1):
        try:
            found = _read(store, later)
        except Torn:
            continue
        return found is None or number in found.set_aside
    raise AssertionError("there is no last number")


def _read(store: Store, number: int) -> Record | None:
    """Return one entry, None where there is none. Raises Torn, Corrupt."""
    key = layout.journal_entry(number)
    for left in reversed(range(READS)):
        data = store.get_or_none(key)
        if data is None:
            return None
        try:
            record = from_json(data, Record, key)
            break
        except Torn:
            if not left:
                raise
    check_schema(record.schema, SCHEMA, key)
    if record.number != number:
        raise Corrupt(f"{key}: holds entry {record.number}", "it was copied there; restore the store")
    return record


def entries_after(store: Store, after: int) -> list[Record]:
    """Return every entry whose number is above `after`, in order, without segments. Raises Corrupt."""
    start = layout.journal_entry(after) if after else None
    numbers = (layout.number_of(one.key) for one in store.entries(layout.JOURNAL, after=start))
    listed = {number for number in numbers if number is not None}
    wanted = range(after + 1, max(listed, default=after) + 1)
    for number in wanted:
        if number not in listed:
            # A listing of files may miss an entry that was written meanwhile and show a later one: only a read
            # proves it missing. Read here, so that a stray high number costs one request, not a million.
            entry(store, number)
    return entries(store, wanted)


def advance(state: RunState, records: Iterable[Record]) -> RunState:
    """Fold the records onto `state`. Raises Corrupt, or IllegalMove for a history that cannot have been."""
    state = draft(state)
    for record in records:
        for event in record.decoded():
            state = apply(state, event, record.time_s, record.number)
    return final(state)


def in_parallel(read: Callable[[int], T], numbers: Iterable[int]) -> list[T]:
    """Return `read` of each number, in order, READERS at a time. Raises the first error."""
    with ThreadPoolExecutor(READERS) as pool:
        return list(pool.map(read, numbers))
