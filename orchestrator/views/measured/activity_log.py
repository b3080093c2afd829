"""What machines' time went to, read from the store for whoever draws some stretch of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime

from checkpoint.records.activity import HOUR_S, MINUTE_S, SLOTS, Part, read_part
from checkpoint.store import layout
from checkpoint.store.errors import Corrupt
from checkpoint.store.run_store import Entry, Store
from orchestrator.views.measured.lanes import LANE_S
from policies.serving.activity import UNKNOWN, unpack

MINUTES_MOST_S = 86_400.0  # what is longer is told in hours: a day is 25 objects either way, a month 31
AGAIN_S = 20.0  # what was read is so long good: it grows by the minute
AT_A_TIME = 8
KEPT = 200  # objects; those of what was asked for last stay in any case
ASKED_KEPT = 8


@dataclass(frozen=True, slots=True)
class Recorded:
    """What is known of some stretch of time."""

    slot_s: int
    parts: Sequence[Part]  # by the time of their last write, the newest last

    def line(self, machine: str, first: int, count: int) -> bytearray:
        """The machine's byte for each of `count` slots, the first of them counted from the epoch."""
        line = bytearray([UNKNOWN]) * count
        for part in self.parts:
            known = part.machines.get(machine)
            if not known:
                continue
            at = part.began_s // self.slot_s - first
            for place in range(max(0, -at), min(len(known), count - at)):
                if unpack(known[place]) is not None:
                    line[at + place] = known[place]
        return line


class ActivityLog:
    """The run's; for several threads. Raises StoreError where the store cannot be read."""

    def __init__(self, store: Store, clock: Callable[[], float] = time.monotonic) -> None:
        self._store, self._clock = store, clock
        self._lock = threading.Lock()
        self._parts: dict[str, tuple[int, datetime, Part | None]] = {}
        self._read: dict[tuple[int, int, int], tuple[float, Recorded]] = {}

    def between(self, from_s: float, until_s: float) -> Recorded:
        """In minutes up to a day, in hours beyond."""
        slot_s = MINUTE_S if until_s - from_s <= MINUTES_MOST_S else HOUR_S
        length_s = slot_s * SLOTS[slot_s]
        asked = slot_s, int(from_s // length_s), int(until_s // length_s)
        with self._lock:
            known = self._read.get(asked)
            if known is None or self._clock() - known[0] >= AGAIN_S:
                known = self._clock(), self._look(*asked)
                self._read = {**dict(list(self._read.items())[-ASKED_KEPT:]), asked: known}
            return known[1]

    def _look(self, slot_s: int, first: int, last: int) -> Recorded:
        listed = self._store.entries(layout.activities(slot_s), after=layout.activity(slot_s, first, ""))
        wanted = [one for one in listed if (layout.activity_group_of(one.key) or 0) <= last]
        changed = [one for one in wanted if not self._holds(one)]
        with ThreadPoolExecutor(AT_A_TIME) as pool:
            for entry, part in zip(changed, pool.map(self._get, changed), strict=True):
                self._parts[entry.key] = entry.size_bytes, entry.modified_at, part
        newest_last = sorted(wanted, key=lambda one: one.modified_at)
        found = [self._parts[one.key][2] for one in newest_last]
        if len(self._parts) > KEPT:
            self._parts = {one.key: self._parts[one.key] for one in wanted}
        return Recorded(slot_s, [part for part in found if part is not None])

    def _holds(self, entry: Entry) -> bool:
        known = self._parts.get(entry.key)
        return known is not None and known[:2] == (entry.size_bytes, entry.modified_at)

    def _get(self, entry: Entry) -> Part | None:
        try:
            return read_part(self._store, entry.key)
        except Corrupt:
            return None  # nothing depends on it, and what is left out is seen to be missing


class LastHour:
    """The minutes of the last hour by slot, whose machines came one after another."""

    def __init__(self, log: ActivityLog) -> None:
        self._log = log
        self._made_of: tuple[Recorded, int] | None = None
        self._minutes: Mapping[str, bytes] = {}

    def until(self, now_s: float) -> Mapping[str, bytes]:
        """A byte for each minute since the one an hour ago, for each slot of which anything is known. Raises
        StoreError."""
        recorded, first = self._log.between(now_s - LANE_S, now_s), int((now_s - LANE_S) // MINUTE_S)
        if self._made_of is None or self._made_of[0] is not recorded or self._made_of[1] != first:
            self._made_of = recorded, first
            self._minutes = _by_slot(recorded, first, int(now_s // MINUTE_S) - first + 1)
        return self._minutes


def _by_slot(recorded: Recorded, first: int, count: int) -> dict[str, bytes]:
    lines = dict[str, bytearray]()
    for machine in {one for part in recorded.parts for one in part.machines}:
        known = lines.setdefault(machine.rpartition("-i")[0], bytearray([UNKNOWN]) * count)
        for place, byte in enumerate(recorded.line(machine, first, count)):
            if byte != UNKNOWN:
                known[place] = byte
    return {slot: bytes(line) for slot, line in lines.items()}
