"""The run's events, numbered and create-only: the record, and the lock.

An entry holds one tick's events. Whoever creates the object first has its number; a controller that loses the race
has been replaced and stops. A take-over is an entry like any other, and its number is the epoch of the controller
that wrote it. The lease only says who is alive.

Entries are never deleted, not even those that a segment holds: a late controller must meet the entry that replaced
it. If that number were free again, it would win it and steer beside its successor.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime
from itertools import count, takewhile
from typing import Any, TypeVar

import structlog

from checkpoint.records import documents
from checkpoint.store import layout
from checkpoint.store.codec import (
    STATE_SCHEMA,
    check_schema,
    event_from_plain,
    event_to_plain,
    from_json,
    state_from_plain,
    state_to_plain,
    to_json,
)
from checkpoint.store.document import Unreadable
from checkpoint.store.errors import AlreadyExists, Corrupt, NotFound, StoreError, Torn
from checkpoint.store.run_store import Store
from policies.model.events import Event, TookOver
from policies.model.fold import fold
from policies.model.state import RunState

log = structlog.get_logger()

# The journal's entries as stored, one numbered object for each tick's events, and how they are read.
#
# Numbers have no gaps: an entry missing between the first and the last is damage, and is named. Other names below
# `journal/` are ignored.
#
# A power cut may leave the last entries torn: present, but without content. What they said is lost, and the run
# goes on without it: a torn entry followed only by torn ones is void. Its number stays taken, so that a late
# controller meets it. The next take-over lists the torn entries before it as set aside, and from then on that list
# decides: any other torn entry is damage.

SCHEMA = 1
READS = 3  # of a torn entry: the wire may be at fault, not the store
READERS = 16  # requests at once; a store answers one in tens of milliseconds

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
    found = _read_entry(store, number)
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
            found = _read_entry(store, later)
        except Torn:
            continue
        return found is None or number in found.set_aside
    raise AssertionError("there is no last number")


def _read_entry(store: Store, number: int) -> Record | None:
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
    return fold(((record.number, record.time_s, record.decoded()) for record in records), state)


def in_parallel(read: Callable[[int], T], numbers: Iterable[int]) -> list[T]:
    """Return `read` of each number, in order, READERS at a time. Raises the first error."""
    with ThreadPoolExecutor(READERS) as pool:
        return list(pool.map(read, numbers))


# The journal in larger pieces: SEGMENT_ENTRIES entries in an object, with the run's state after the last.
#
# A segment only makes reading faster. Its name, bounds and content follow from the entries alone, so two
# controllers, even a late one, write the same object; where it is missing, unreadable, or its state of another
# version, the entries are read instead.

SEGMENT_SCHEMA = 1
SEGMENT_ENTRIES = 256  # part of the format: segments end at its multiples
STATES_TRIED = 2  # newest first; if neither serves, all of them were written by another version


@dataclass(frozen=True, slots=True)
class Segment:
    """`records` are the SEGMENT_ENTRIES up to the number in its name, `state` is the run's after them."""

    schema: int
    records: list[Record]
    state_schema: int
    state: dict[str, Any]


def write_segment(store: Store, records: list[Record], state: RunState) -> None:
    """Store a segment; one of the same bounds is replaced by its equal."""
    segment = Segment(SEGMENT_SCHEMA, records, STATE_SCHEMA, state_to_plain(state))
    store.put(layout.segment(records[-1].number), to_json(segment))


def newest_segment(store: Store, after: int = 0) -> int:
    """Return the last number of the newest segment beyond `after` in the listing, or 0."""
    start = layout.segment(after) if after else None
    numbers = (layout.number_of(one.key) for one in store.entries(layout.SEGMENTS, after=start))
    return max((number for number in numbers if number and number % SEGMENT_ENTRIES == 0), default=0)


def records_between(store: Store, after: int, last: int) -> list[Record]:
    """Return the entries above `after`, up to `last`, which ends a segment. Raises Corrupt."""
    whole = after // SEGMENT_ENTRIES * SEGMENT_ENTRIES
    ends = range(whole + SEGMENT_ENTRIES, last + 1, SEGMENT_ENTRIES)
    pieces = in_parallel(lambda end: _segment_records(store, end), ends)
    return [record for piece in pieces for record in piece if record.number > after]


def newest_state(store: Store, last: int) -> tuple[int, RunState]:
    """Return the number and the state of the newest segment up to `last` that this version can continue.

    `(0, RunState())`, the beginning, where none of the STATES_TRIED newest serves.
    """
    for end in range(last, max(0, last - STATES_TRIED * SEGMENT_ENTRIES), -SEGMENT_ENTRIES):
        try:
            return end, _segment_state(store, end)
        except (Corrupt, NotFound) as error:
            _passed_over(end, error)
    return 0, RunState()


def _segment_records(store: Store, end: int) -> list[Record]:
    try:
        return _load_segment(store, end).records
    except (Corrupt, NotFound) as error:
        _passed_over(end, error)
        return entries(store, range(end - SEGMENT_ENTRIES + 1, end + 1))


def _segment_state(store: Store, end: int) -> RunState:
    segment = _load_segment(store, end)
    where = layout.segment(end)
    if segment.state_schema != STATE_SCHEMA:
        raise Corrupt(f"{where}: state of schema {segment.state_schema}, this grpo-orch has {STATE_SCHEMA}")
    return state_from_plain(segment.state, where)


def _load_segment(store: Store, end: int) -> Segment:
    """Raises NotFound, and Corrupt for what is not a segment with that end."""
    key = layout.segment(end)
    segment = from_json(store.get(key), Segment, key)
    if segment.schema != SEGMENT_SCHEMA:
        raise Corrupt(f"{key}: segment of schema {segment.schema}, this grpo-orch has {SEGMENT_SCHEMA}")
    if [record.number for record in segment.records] != list(range(end - SEGMENT_ENTRIES + 1, end + 1)):
        raise Corrupt(f"{key}: does not hold the {SEGMENT_ENTRIES} entries up to {end}")
    return segment


def _passed_over(end: int, error: Exception) -> None:
    log.warning("segment_passed_over", last=end, error=str(error))


# How long ago an entry was written, by the clock of the store: it outlives every host, and none of them sets it.
#
# A controller that takes over knows by its own clock how long nobody steered, unless that is behind the clock of
# the one before it. The store dates what it holds. Only dates of one store are compared, so that it may be years
# off. What it says is a floor: time never goes back, or slower, for it.

JITTER_S = 60.0  # so late a gateway may tell the store that it began, and a store's own servers differ


def seconds_since(store: Store, number: int) -> float:
    """Return how long ago entry `number` was written, in whole seconds, as some stores date by them. 0: it cannot
    be told. Raises StoreError."""
    store.put(layout.CLOCK, b"{}")
    now, then = _date(store, layout.CLOCK), _date(store, layout.journal_entry(number))
    if now is None or then is None:
        return 0.0
    return max(0.0, math.floor((now - then).total_seconds() - _jumped_s(store)))


def _jumped_s(store: Store) -> float:
    """How far the store's clock was set ahead while the run's gateway lived, which counts its own seconds. 0: not
    at all, or there is no gateway to ask."""
    if (by := documents.newest_gateway(store)) is None:
        return 0.0
    unreadable = Unreadable()
    address, status = documents.gateway(by).read(store, unreadable), documents.members(by).read(store, unreadable)
    if address is None or status is None or address.boot_id != status.boot_id:
        return 0.0
    began, told = _date(store, layout.gateway(by)), _date(store, layout.members(by))
    if began is None or told is None:
        return 0.0
    ahead_s = (told - began).total_seconds() - status.up_s
    return ahead_s if ahead_s > JITTER_S else 0.0


def _date(store: Store, key: str) -> datetime | None:
    """When the store says that an object was written; None where it lists none."""
    folder, _, name = key.rpartition("/")
    before = f"{folder}/{name[:-1]}"  # a name right before it: only what follows is asked for
    return next((one.modified_at for one in store.entries(folder, after=before) if one.key == key), None)


class Fenced(Exception):
    """Another controller wrote the next entry: this one no longer steers."""


@dataclass(frozen=True, slots=True)
class Recovered:
    """The run up to entry `number`: its state, and how it came out of an earlier one.

    `before` is the state at a segment's end, `records` are all entries after it.
    """

    before: RunState
    records: list[Record]
    number: int
    state: RunState


def read(store: Store, after: int = 0) -> list[Record]:
    """Return every entry whose number is above `after`, in order, through segments. Raises Corrupt."""
    last = newest_segment(store, after)
    return [*records_between(store, after, last), *entries_after(store, max(after, last))]


def recover(store: Store, overlap: int = 0) -> Recovered:
    """Return the run as of now, from the newest usable segment and the entries after it. Raises Corrupt.

    Reads a bounded number of objects, however long the run is. With `overlap`, `records` begin so many segments
    earlier, to show recent history.
    """
    last = newest_segment(store)
    begin = max(0, last - overlap * SEGMENT_ENTRIES)
    known, state = newest_state(store, begin)
    before = advance(state, records_between(store, known, begin))
    records = [*records_between(store, begin, last), *entries_after(store, last)]
    number = records[-1].number if records else begin
    return Recovered(before, records, number, advance(before, records))


class Journal:
    """The writing end, for one controller.

    Args:
        store: the run's store.
        writer: who writes, for people to read: `host/pid`.
    """

    def __init__(self, store: Store, writer: str) -> None:
        self._store = store
        self._writer = writer
        self._open: list[Record] = []  # tries for the next number whose outcome is unknown
        self._segmented = RunState()  # as of the newest segment
        self._since: list[Record] = []  # what the next segments will hold
        self.number = 0
        self.epoch = 0

    def take_over(
        self, now_s: float, host: str, pid: int, reason: str, after_epoch: int | None = None
    ) -> RunState:
        """Write the take-over entry after the last one, with how long ago that one was by the store's clock, and
        return the state after it.

        Torn entries right before it are set aside for good. Raises Fenced when another controller takes over at
        the same moment, or has since `after_epoch`, where that is given.
        """
        found = recover(self._store)
        if after_epoch is not None and found.state.epoch != after_epoch:
            raise Fenced(f"another has taken over: epoch {found.state.epoch} and not {after_epoch}")
        self._segmented, self._since = found.before, found.records
        self.number = found.number
        self.epoch = self.number + 1
        told = [record.number for record in found.records if record.events]
        since_told_s = seconds_since(self._store, told[-1] if told else found.number) if found.number else 0.0
        torn = [one.number for one in takewhile(lambda record: record.is_void, reversed(found.records))]
        return advance(found.state, [self._append(now_s, (TookOver(host, pid, reason, since_told_s),), torn)])

    def append(self, now_s: float, events: tuple[Event, ...]) -> Record:
        """Write one entry. Returns it once it is durable.

        Raises Fenced; Corrupt, with nothing written, for events that could not be read back. After another
        StoreError the entry may be in the store, or not, or arrive late: `settle` it before
        the next.
        """
        return self._append(now_s, events, [])

    def settle(self, now_s: float) -> Record | None:
        """Settle the number that a StoreError left open and return its entry; None if none is open.

        The events are not written now, for the world has moved on: unless they are already stored, an empty entry
        takes their number, so that they cannot arrive late either. Raises Fenced.
        """
        return self.append(now_s, ()) if self._open else None

    def check(self) -> None:
        """Check that nobody has written after this controller's last entry: one small read. Raises Fenced."""
        number = self.number + 1
        if self._store.get_or_none(layout.journal_entry(number)) is not None:
            self._own(entry(self._store, number))

    def _append(self, now_s: float, events: tuple[Event, ...], set_aside: list[int]) -> Record:
        record = Record(
            schema=SCHEMA,
            number=self.number + 1,
            epoch=self.epoch,
            writer=self._writer,
            nonce=secrets.token_hex(8),
            time_s=now_s,
            events=[event_to_plain(event) for event in events],
            set_aside=set_aside,
        )
        # What no later controller could decode must not be stored, such as a price of NaN, which JSON has as null:
        # entries are never deleted, and nobody could take the run over any more.
        from_json(to_json(record), Record, layout.journal_entry(record.number)).decoded()
        self._open.append(record)
        return self._write(record)

    def _write(self, record: Record) -> Record:
        try:
            self._store.create(layout.journal_entry(record.number), to_json(record))
        except AlreadyExists:
            # Ours, if an answer was lost and the retry met the object that the first try had made.
            record = self._own(entry(self._store, record.number))
        self._open.clear()
        self.number = record.number
        self._since.append(record)
        self._store_segments()
        return record

    def _own(self, winner: Record) -> Record:
        """Return the entry that has the number if this controller wrote it. Raises Fenced."""
        if winner.nonce not in [record.nonce for record in self._open]:
            raise Fenced(f"{winner.writer} wrote journal entry {winner.number}")
        return winner

    def _store_segments(self) -> None:
        """Store each full segment. Its entries are durable, so a failure here is only logged."""
        while len(self._since) >= SEGMENT_ENTRIES:
            records, rest = self._since[:SEGMENT_ENTRIES], self._since[SEGMENT_ENTRIES:]
            state = advance(self._segmented, records)
            try:
                write_segment(self._store, records, state)
            except StoreError as error:
                log.warning("segment_not_stored", last=records[-1].number, error=str(error))
                return  # tried again with the next entry
            self._segmented, self._since = state, rest
