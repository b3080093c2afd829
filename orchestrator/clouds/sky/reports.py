"""What a run's machines last said of themselves, looked at again and again: of many, only what has changed."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

from checkpoint.records import documents
from checkpoint.records.documents import MachineReport
from checkpoint.store import layout
from checkpoint.store.run_store import Entry, Store
from checkpoint.store.unreadable import Unreadable
from policies.fleet.store_costs import are_reports_listed

# Some stores date by the second. What is written twice in one, and read in between, is listed as it was: so it is
# read once more when that second is over for certain.
DATED_TO_S = 2.0


@dataclass(frozen=True, slots=True)
class _Read:
    """How a report was listed as it was read, and when it is read once more; None: it has been."""

    entry: Entry
    again_at_s: float | None


class Reports:
    """`said`: by node, what was last read. One thread at a time may call it.

    Args:
        store: the run's.
        clock: seconds on a clock of this machine that never goes back.
    """

    def __init__(self, store: Store, clock: Callable[[], float] = time.monotonic) -> None:
        self.said: dict[str, MachineReport] = {}
        self._store, self._clock = store, clock
        self._read: dict[str, _Read] = {}
        self._unreadable = Unreadable()

    def look(self, nodes: Collection[str]) -> None:
        """Learn what these machines have said, and forget others. Raises StoreError."""
        for node in self.said.keys() - nodes:
            self.forget(node)
        if are_reports_listed(len(nodes)):
            self._look_at_list(nodes)
            return
        self._read.clear()
        for node in nodes:
            self._hear(node)

    def forget(self, node: str) -> None:
        """Know nothing of a machine."""
        self.said.pop(node, None)
        self._read.pop(node, None)

    def _look_at_list(self, nodes: Collection[str]) -> None:
        listed = {entry.key: entry for entry in self._store.entries(layout.MACHINES)}
        now_s = self._clock()
        for node in nodes:
            entry, read = listed.get(layout.machine(node)), self._read.get(node)
            if entry is None:
                self.forget(node)
            elif read is None or entry != read.entry:
                self._hear(node)
                self._read[node] = _Read(entry, now_s + DATED_TO_S)
            elif read.again_at_s is not None and now_s >= read.again_at_s:
                self._hear(node)
                self._read[node] = _Read(entry, None)

    def _hear(self, node: str) -> None:
        """Read one report. One that is damaged says nothing, and keeps none of the others from being heard."""
        report = documents.machine(node).read(self._store, self._unreadable)
        if report is None:
            self.said.pop(node, None)
        else:
            self.said[node] = report
