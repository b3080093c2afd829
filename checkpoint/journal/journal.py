"""The run's events, numbered and create-only: the record, and the lock.

An entry is one tick's events. Its number is taken by whoever creates the object first; a controller that loses
the race for a number has been replaced and stops. The entry that takes a run over is numbered like any other,
and its number is the epoch of the controller that wrote it. A lease elsewhere only says who is alive.

Entries are never deleted, also where a segment holds them: a late controller has to meet the entry that replaced
it. Were that number free again, it would win it and steer beside its successor.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from itertools import takewhile

import structlog

from checkpoint.journal import segments
from checkpoint.journal.entries import SCHEMA, Record, advance, entries_after, entry
from checkpoint.store import layout
from checkpoint.store.codec import event_to_plain, to_json
from checkpoint.store.errors import AlreadyExists, StoreError
from checkpoint.store.run_store import Store
from policies.model.events import Event, TookOver
from policies.model.state import RunState

log = structlog.get_logger()


class Fenced(Exception):
    """Another controller wrote the next entry: this one steers no longer."""


@dataclass(frozen=True, slots=True)
class Recovered:
    """The run up to entry `number`: its state, and how it came out of an earlier one.

    `records` are all entries behind `before`; `before` is the state that they continue, as of a segment's end.
    """

    before: RunState
    records: list[Record]
    number: int
    state: RunState


def read(store: Store, after: int = 0) -> list[Record]:
    """Return every entry whose number is above `after`, in order, through segments. Raises Corrupt."""
    last = segments.newest(store, after)
    return [*segments.records_between(store, after, last), *entries_after(store, max(after, last))]


def recover(store: Store, overlap: int = 0) -> Recovered:
    """Return the run as of now, from the newest usable segment and the entries behind it. Raises Corrupt.

    Reads a bounded number of objects, however long the run is. With `overlap`, `records` begin so many segments
    earlier, for who wants to see what happened lately.
    """
    last = segments.newest(store)
    begin = max(0, last - overlap * segments.SEGMENT_ENTRIES)
    known, state = segments.newest_state(store, begin)
    before = advance(state, segments.records_between(store, known, begin))
    records = [*segments.records_between(store, begin, last), *entries_after(store, last)]
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
        self._open: list[Record] = []  # tried for the next number, and nobody knows what became of them
        self._segmented = RunState()  # as of the newest segment
        self._since: list[Record] = []  # what the next segments will hold
        self.number = 0
        self.epoch = 0

    def take_over(self, now_s: float, host: str, pid: int, reason: str) -> RunState:
        """Write the take-over entry behind the last one and return the state behind it.

        Torn entries right before it are set aside for good. Raises Fenced when another controller takes over at
        the same moment.
        """
        found = recover(self._store)
        self._segmented, self._since = found.before, found.records
        self.number = found.number
        self.epoch = self.number + 1
        torn = [one.number for one in takewhile(lambda record: record.is_void, reversed(found.records))]
        return advance(found.state, [self._append(now_s, (TookOver(host, pid, reason),), torn)])

    def append(self, now_s: float, events: tuple[Event, ...]) -> Record:
        """Write one entry. Returns it once it is durable.

        Raises Fenced. After a StoreError the entry may be in the store, or not, or come there late: `settle` it
        before the next.
        """
        return self._append(now_s, events, [])

    def settle(self, now_s: float) -> Record | None:
        """Close the number that a StoreError left open, and return the entry that has it; None if none is open.

        What was decided then is not written now, for the world has gone on: an entry without events takes its
        place, so that it can't come late either, unless it is in the store already. Raises Fenced.
        """
        return self.append(now_s, ()) if self._open else None

    def check(self) -> None:
        """See that nobody has written behind this controller's last entry: one small read. Raises Fenced."""
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
        """The entry that has a number, if this controller wrote it. Raises Fenced."""
        if winner.nonce not in [record.nonce for record in self._open]:
            raise Fenced(f"{winner.writer} wrote journal entry {winner.number}")
        return winner

    def _store_segments(self) -> None:
        """Store what fills a segment. Its entries are durable: no trouble here may hide that."""
        while len(self._since) >= segments.SEGMENT_ENTRIES:
            records, rest = self._since[: segments.SEGMENT_ENTRIES], self._since[segments.SEGMENT_ENTRIES :]
            state = advance(self._segmented, records)
            try:
                segments.write(self._store, records, state)
            except StoreError as error:
                log.warning("segment_not_stored", last=records[-1].number, error=str(error))
                return  # with the next entry it is tried again
            self._segmented, self._since = state, rest
