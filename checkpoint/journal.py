"""The run's journal: numbered, create-only entries that record its events and serve as its lock.

An entry holds one tick's events. The controller that creates an object first owns its number; a controller that
loses the race has been replaced and stops. A take-over is an ordinary entry whose number is the epoch of the
controller that wrote it. The lease only shows who is alive.

Entries are never deleted, not even after a segment holds them: a late controller must find the entry of its
successor. If that number were free, both would control the run.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import count, takewhile
from typing import Any

import structlog

from grpo_orch.checkpoint.store import layout
from grpo_orch.checkpoint.store.codec import (
    STATE_SCHEMA,
    check_schema,
    event_from_plain,
    event_to_plain,
    from_json,
    state_from_plain,
    state_to_plain,
    to_json,
)
from grpo_orch.checkpoint.store.errors import AlreadyExists, Corrupt, NotFound, StoreError, Torn
from grpo_orch.checkpoint.store.run_store import Store, in_parallel, retry_torn
from grpo_orch.policies.model.events import ControllerTookOver, Event
from grpo_orch.policies.model.fold import fold
from grpo_orch.policies.model.state import RunState

log = structlog.get_logger()

# The stored entries, one numbered object per tick, and how they are read.
#
# Numbers have no gaps: an entry missing between the first and the last is reported as damage. Other names below
# `journal/` are ignored.
#
# A power failure may leave the last entries torn: present, but without content. Their events are lost and the run
# continues: a torn entry followed only by torn ones is void. Its number stays taken, so that a late controller
# finds it. The next take-over lists the torn entries before it in `set_aside`; from then on, any other torn entry
# is damage.

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Record:
    """A stored journal entry.

    `nonce` identifies a writer's own entry after a lost response; `set_aside` are the numbers of the torn entries
    directly before a take-over; `time_s` is the run's clock in seconds since the epoch.
    """

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
        """Whether this replaces a torn entry. Real epochs begin at 1."""
        return self.epoch == 0

    def decoded(self) -> tuple[Event, ...]:
        """Decode the events. Raises Corrupt."""
        return tuple(event_from_plain(event, f"journal entry {self.number}") for event in self.events)


def entry(store: Store, number: int) -> Record:
    """Return one entry. Raises Corrupt when it is missing, torn or has another number than its name."""
    found = _read_entry(store, number)
    if found is None:
        hint = "grpo-orch never deletes entries; restore it from a backup of the store"
        raise Corrupt(f"{store.url}: journal entry {number} is missing", hint)
    return found


def entries(store: Store, numbers: Sequence[int]) -> list[Record]:
    """Return entries in the order of `numbers`; torn ones as void. Raises Corrupt."""
    records = in_parallel(lambda number: _entry_or_void(store, number), numbers)
    set_aside = {number for record in records for number in record.set_aside}
    return [_void(record.number) if record.number in set_aside else record for record in records]


def _entry_or_void(store: Store, number: int) -> Record:
    try:
        return entry(store, number)
    except Torn as error:
        if not _is_set_aside(store, number):
            raise
        log.warning("torn_entry_skipped", number=number, error=str(error))
        return _void(number)


def _void(number: int) -> Record:
    return Record(SCHEMA, number, 0, "", "", 0.0, [])


def _is_set_aside(store: Store, number: int) -> bool:
    """Whether the next entry that is not torn sets this torn entry aside, or only torn entries follow."""
    for later in count(number + 1):
        try:
            found = _read_entry(store, later)
        except Torn:
            continue
        return found is None or number in found.set_aside
    raise AssertionError("count() never ends")


@retry_torn
def _read_entry(store: Store, number: int) -> Record | None:
    """Return one entry, or None if it does not exist. Raises Torn, Corrupt."""
    key = layout.journal_entry(number)
    data = store.get_or_none(key)
    if data is None:
        return None
    record = from_json(data, Record, key)
    check_schema(record.schema, SCHEMA, key)
    if record.number != number:
        raise Corrupt(
            f"{key}: holds entry {record.number}", "the object was copied; restore the store from a backup"
        )
    return record


def entries_after(store: Store, after: int) -> list[Record]:
    """Return every entry whose number is above `after`, in order, without using segments. Raises Corrupt."""
    start = layout.journal_entry(after) if after else None
    numbers = (layout.number_of(listed.key) for listed in store.entries(layout.JOURNAL, after=start))
    listed = {number for number in numbers if number is not None}
    wanted = range(after + 1, max(listed, default=after) + 1)
    for number in wanted:
        if number not in listed:
            # A listing of files may lack an entry that was written meanwhile and contain a later one; only a read
            # proves that it is missing. Reading here makes a stray high number cost one request, not a million.
            entry(store, number)
    return entries(store, wanted)


def advance(state: RunState, records: Iterable[Record]) -> RunState:
    """Fold the records onto `state`. Raises Corrupt, or IllegalMove for an impossible history."""
    return fold(((record.number, record.time_s, record.decoded()) for record in records), state)


# Segments: SEGMENT_ENTRIES entries in one object, with the run's state after the last.
#
# A segment only makes reading faster. Its name, bounds and content follow from the entries alone, so two
# controllers, even a late one, write the same object. If it is missing, unreadable, or its state has another
# version, the entries are read instead.

SEGMENT_SCHEMA = 1
SEGMENT_ENTRIES = 256  # part of the format: segments end at its multiples
STATES_TRIED = 2  # newest first; if neither is usable, another version wrote all of them


@dataclass(frozen=True, slots=True)
class Segment:
    """`records` are the SEGMENT_ENTRIES entries up to the number in its name, `state` is the run's after them."""

    schema: int
    records: list[Record]
    state_schema: int
    state: dict[str, Any]


def write_segment(store: Store, records: list[Record], state: RunState) -> None:
    """Store a segment. Replaces an existing one, which is equal."""
    segment = Segment(SEGMENT_SCHEMA, records, STATE_SCHEMA, state_to_plain(state))
    store.put(layout.segment(records[-1].number), to_json(segment))


def newest_segment(store: Store, after: int = 0) -> int:
    """Return the last number of the newest segment beyond `after` in the listing, or 0."""
    start = layout.segment(after) if after else None
    numbers = (layout.number_of(listed.key) for listed in store.entries(layout.SEGMENTS, after=start))
    return max((number for number in numbers if number and number % SEGMENT_ENTRIES == 0), default=0)


def records_between(store: Store, after: int, last: int) -> list[Record]:
    """Return the entries above `after`, up to `last`, which ends a segment. Raises Corrupt."""
    first_end = (after // SEGMENT_ENTRIES + 1) * SEGMENT_ENTRIES
    ends = range(first_end, last + 1, SEGMENT_ENTRIES)
    segments = in_parallel(lambda end: _segment_records(store, end), ends)
    return [record for records in segments for record in records if record.number > after]


def newest_state(store: Store, last: int) -> tuple[int, RunState]:
    """Return the last number and the state of the newest segment up to `last` that this version can continue.

    Returns `(0, RunState())`, the beginning, if none of the STATES_TRIED newest is usable.
    """
    for end in range(last, max(0, last - STATES_TRIED * SEGMENT_ENTRIES), -SEGMENT_ENTRIES):
        try:
            return end, _segment_state(store, end)
        except (Corrupt, NotFound) as error:
            _log_skipped(end, error)
    return 0, RunState()


def _segment_records(store: Store, end: int) -> list[Record]:
    try:
        return _load_segment(store, end).records
    except (Corrupt, NotFound) as error:
        _log_skipped(end, error)
        return entries(store, range(end - SEGMENT_ENTRIES + 1, end + 1))


def _segment_state(store: Store, end: int) -> RunState:
    segment = _load_segment(store, end)
    where = layout.segment(end)
    if segment.state_schema != STATE_SCHEMA:
        raise Corrupt(f"{where}: state schema {segment.state_schema}, this grpo-orch has {STATE_SCHEMA}")
    return state_from_plain(segment.state, where)


def _load_segment(store: Store, end: int) -> Segment:
    """Raises NotFound, and Corrupt for anything but a segment with that end."""
    key = layout.segment(end)
    segment = from_json(store.get(key), Segment, key)
    if segment.schema != SEGMENT_SCHEMA:
        raise Corrupt(f"{key}: segment schema {segment.schema}, this grpo-orch has {SEGMENT_SCHEMA}")
    if [record.number for record in segment.records] != list(range(end - SEGMENT_ENTRIES + 1, end + 1)):
        raise Corrupt(f"{key}: does not hold the {SEGMENT_ENTRIES} entries up to {end}")
    return segment


def _log_skipped(end: int, error: Exception) -> None:
    log.warning("segment_skipped", last=end, error=str(error))


# The age of an entry by the store's clock, which outlives every host and which no host sets.
#
# A controller that takes over computes by its own clock how long the run was uncontrolled, unless its clock is
# behind its predecessor's. The store's modification times do not depend on either. Only times of one store are
# compared, so its clock may be years off. It never makes the run's time go back or slower.


def seconds_since(store: Store, number: int) -> float:
    """Return the age of entry `number` in whole seconds, the resolution of some stores; 0: unknown.

    Raises StoreError.
    """
    store.put(layout.CLOCK, b"{}")
    now, then = _date(store, layout.CLOCK), _date(store, layout.journal_entry(number))
    if now is None or then is None:
        return 0.0
    return max(0.0, math.floor((now - then).total_seconds()))


def _date(store: Store, key: str) -> datetime | None:
    """Return the store's modification time of an object; None if the object is not listed."""
    folder, _, name = key.rpartition("/")
    before = f"{folder}/{name[:-1]}"  # a name shortly before it, to list only what follows
    return next((listed.modified_at for listed in store.entries(folder, after=before) if listed.key == key), None)


class Fenced(Exception):
    """Another controller wrote the next entry, so this one no longer controls the run."""


@dataclass(frozen=True, slots=True)
class Recovered:
    """The run's `state` at entry `number`: `before`, the state at a segment's end, and the `records` after it."""

    before: RunState
    records: list[Record]
    number: int
    state: RunState


def read(store: Store, after: int = 0) -> list[Record]:
    """Return every entry whose number is above `after`, in order, using segments. Raises Corrupt."""
    last = newest_segment(store, after)
    return [*records_between(store, after, last), *entries_after(store, max(after, last))]


def recover(store: Store, overlap: int = 0) -> Recovered:
    """Return the run's current state, from the newest usable segment and the entries after it. Raises Corrupt.

    Reads a bounded number of objects, however long the run is. `records` begin `overlap` segments earlier, to show
    recent history.
    """
    last = newest_segment(store)
    begin = max(0, last - overlap * SEGMENT_ENTRIES)
    known, state = newest_state(store, begin)
    before = advance(state, records_between(store, known, begin))
    records = [*records_between(store, begin, last), *entries_after(store, last)]
    number = records[-1].number if records else begin
    return Recovered(before, records, number, advance(before, records))


class Journal:
    """Writes the journal for one controller.

    Args:
        store: the run's store.
        writer: the name of the controller: `host/pid`.
    """

    def __init__(self, store: Store, writer: str) -> None:
        self._store = store
        self._writer = writer
        self._unsettled: list[Record] = []  # attempts at the next number with an unknown outcome
        self._segmented = RunState()  # the state at the newest segment
        self._since: list[Record] = []  # the entries after it, for the next segments
        self.number = 0
        self.epoch = 0

    def take_over(
        self, now_s: float, host: str, pid: int, reason: str, after_epoch: int | None = None
    ) -> RunState:
        """Write the take-over entry and return the state after it.

        The entry holds the age of the last entry with events by the store's clock. Torn entries directly before it
        are set aside permanently. Raises Fenced when another controller takes over at the same moment, or has
        taken over since `after_epoch`.
        """
        run = recover(self._store)
        if after_epoch is not None and run.state.epoch != after_epoch:
            raise Fenced(f"another controller has taken over: epoch {run.state.epoch} instead of {after_epoch}")
        self._segmented, self._since = run.before, run.records
        self.number = run.number
        self.epoch = self.number + 1
        with_events = [record.number for record in run.records if record.events]
        since_s = seconds_since(self._store, with_events[-1] if with_events else run.number) if run.number else 0.0
        torn = [record.number for record in takewhile(lambda record: record.is_void, reversed(run.records))]
        return advance(run.state, [self._append(now_s, (ControllerTookOver(host, pid, reason, since_s),), torn)])

    def append(self, now_s: float, events: tuple[Event, ...]) -> Record:
        """Write one entry. Return it once it is durable.

        Raises Fenced, and Corrupt, before writing, for events that could not be read back. After another
        StoreError the entry may be stored, missing or delayed: call `settle` before the next `append`.
        """
        return self._append(now_s, events, [])

    def settle(self, now_s: float) -> Record | None:
        """Settle the number that a StoreError left unsettled and return its entry; None if all are settled.

        The old events no longer fit the present. Unless they are already stored, an empty entry takes their
        number, so that they cannot arrive late. Raises Fenced.
        """
        return self.append(now_s, ()) if self._unsettled else None

    def check(self) -> None:
        """Check that this controller wrote the last entry: one small read. Raises Fenced."""
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
        # Store only what can be decoded. Entries are never deleted, so an undecodable one, as with a price of NaN
        # (null in JSON), would prevent every later take-over.
        from_json(to_json(record), Record, layout.journal_entry(record.number)).decoded()
        self._unsettled.append(record)
        return self._write(record)

    def _write(self, record: Record) -> Record:
        try:
            self._store.create(layout.journal_entry(record.number), to_json(record))
        except AlreadyExists:
            # Ours, if a response was lost and the retry found the object of the first attempt.
            record = self._own(entry(self._store, record.number))
        self._unsettled.clear()
        self.number = record.number
        self._since.append(record)
        self._store_segments()
        return record

    def _own(self, winner: Record) -> Record:
        """Return the entry that has the number if this controller wrote it. Raises Fenced."""
        if winner.nonce not in [record.nonce for record in self._unsettled]:
            raise Fenced(f"{winner.writer} wrote journal entry {winner.number}")
        return winner

    def _store_segments(self) -> None:
        """Store each full segment. Its entries are durable, so a failure is only logged."""
        while len(self._since) >= SEGMENT_ENTRIES:
            records, rest = self._since[:SEGMENT_ENTRIES], self._since[SEGMENT_ENTRIES:]
            state = advance(self._segmented, records)
            try:
                write_segment(self._store, records, state)
            except StoreError as error:
                log.warning("segment_write_failed", last=records[-1].number, error=str(error))
                return  # retried after the next entry
            self._segmented, self._since = state, rest
