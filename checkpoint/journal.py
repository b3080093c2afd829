"""The run's events, numbered and create-only: the record, and the lock.

An entry is one tick's events. Its number is taken by whoever creates the object first; a controller that loses
the race for a number has been replaced and stops. The entry that takes a run over is numbered like any other,
and its number is the epoch of the controller that wrote it. A lease elsewhere only says who is alive.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Any

from checkpoint import layout
from checkpoint.codec import event_from_plain, event_to_plain, from_json, to_json
from checkpoint.errors import AlreadyExists
from checkpoint.store import Store
from policies.events import Event, TookOver

SCHEMA = 1


class Fenced(Exception):
    """Another controller wrote the next entry: this one steers no longer."""


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


def read(store: Store, after: int = 0) -> list[Record]:
    """Return every entry whose number is above `after`, in order. Raises Corrupt."""
    start = layout.journal_entry(after) if after else None
    keys = [entry.key for entry in store.entries(layout.JOURNAL, after=start)]
    return [from_json(store.get(key), Record, key) for key in keys]


class Journal:
    """The writing end, for one controller.

    Args:
        store: the run's store.
        writer: who writes, for people to read: `host/pid`.
    """

    def __init__(self, store: Store, writer: str) -> None:
        self._store = store
        self._writer = writer
        self.number = 0
        self.epoch = 0

    def take_over(self, now_s: float, host: str, pid: int, reason: str) -> list[Record]:
        """Write the take-over entry behind the last one and return all entries, that one included.

        Raises Fenced when another controller takes over at the same moment.
        """
        records = read(self._store)
        self.number = records[-1].number if records else 0
        self.epoch = self.number + 1
        return [*records, self.append(now_s, (TookOver(host, pid, reason),))]

    def append(self, now_s: float, events: tuple[Event, ...]) -> Record:
        """Write one entry. Returns it once it is durable. Raises Fenced."""
        record = Record(
            schema=SCHEMA,
            number=self.number + 1,
            epoch=self.epoch,
            writer=self._writer,
            nonce=secrets.token_hex(8),
            time_s=now_s,
            events=[event_to_plain(event) for event in events],
        )
        key = layout.journal_entry(record.number)
        try:
            self._store.create(key, to_json(record))
        except AlreadyExists:
            # Ours, if an answer was lost and the retry met the object that the first try had made.
            winner = from_json(self._store.get(key), Record, key)
            if winner.nonce != record.nonce:
                raise Fenced(f"{winner.writer} wrote journal entry {record.number}") from None
        self.number = record.number
        return record
