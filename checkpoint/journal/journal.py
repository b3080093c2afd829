"""The run's events, numbered and create-only: the record, and the lock.

An entry holds one tick's events. Whoever creates the object first has its number; a controller that loses the race
has been replaced and stops. A take-over is an entry like any other, and its number is the epoch of the controller
that wrote it. The lease only says who is alive.

Entries are never deleted, not even those that a segment holds: a late controller must meet the entry that replaced
it. If that number were free again, it would win it and steer beside its successor.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from itertools import takewhile

import structlog

from checkpoint.journal import segments
from checkpoint.journal.entries import SCHEMA, Record, advance, entries_after, entry
from checkpoint.journal.store_clock import seconds_since
from checkpoint.store import layout
from checkpoint.store.codec import event_to_plain, from_json, to_json
from checkpoint.store.errors import AlreadyExists, StoreError
from checkpoint.store.run_store import Store
from policies.model.events import Event, TookOver
from policies.model.state import RunState

log = structlog.get_logger()


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
    last = segments.newest(store, after)
    return [*segments.records_between(store, after, last), *entries_after(store, max(after, last))]


def recover(store: Store, overlap: int = 0) -> Recovered:
    """Return the run as of now, from the newest usable segment and the entries after it. Raises Corrupt.

    Reads a bounded number of objects, however long the run is. With `overlap`, `records` begin so many segments
    earlier, to show recent history.
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
        while len(self._since) >= segments.SEGMENT_ENTRIES:
            records, rest = self._since[: segments.SEGMENT_ENTRIES], self._since[segments.SEGMENT_ENTRIES :]
            state = advance(self._segmented, records)
            try:
                segments.write(self._store, records, state)
            except StoreError as error:
                log.warning("segment_not_stored", last=records[-1].number, error=str(error))
                return  # tried again with the next entry
            self._segmented, self._since = state, rest
