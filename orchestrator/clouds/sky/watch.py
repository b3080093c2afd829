"""What a run's clusters are and what their machines say, kept up to date by two threads: both are slow to ask."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog

from checkpoint.records import documents
from checkpoint.records.documents import MachineReport
from checkpoint.store import layout
from checkpoint.store.errors import StoreError
from checkpoint.store.run_store import Entry, Store
from checkpoint.store.unreadable import Unreadable
from orchestrator.clouds.protocol import CloudUnavailable
from orchestrator.clouds.sky.aws import UnrecordedClusters
from orchestrator.clouds.sky.clusters import Clusters
from policies.fleet.store_costs import are_reports_listed

# What a run's machines last said of themselves, looked at again and again: of many, only what has changed.

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


if TYPE_CHECKING:
    from orchestrator.clouds.sky.sdk.skypilot import SkyPilot

log = structlog.get_logger()

LOOK_EVERY_S = 5.0  # at SkyPilot's records
READ_EVERY_S = 1.0  # what the machines say
STALE_S = 60.0  # what was known longer ago is not known any more


class Watch:
    """Looks at the clusters `PREFIX...`, and reads the reports of their machines, from `start` to `close`."""

    def __init__(
        self, sky: SkyPilot, unrecorded: UnrecordedClusters, clusters: Clusters, store: Store, prefix: str
    ) -> None:
        self._sky = sky
        self._unrecorded = unrecorded
        self._clusters = clusters
        self._store = store
        self._prefix = prefix
        self.reports = Reports(store)
        self._reading = threading.Lock()
        self._looked_at_s: float | None = None
        self._trouble = "SkyPilot has not been asked yet"
        self._starting = threading.Lock()
        self._started = False
        self._closed = threading.Event()

    def start(self) -> None:
        """Start the threads, once."""
        with self._starting:
            if self._started:
                return
            self._started = True
        threading.Thread(target=self._look_for_ever, name="watch-clusters", daemon=True).start()
        threading.Thread(target=self._read_for_ever, name="read-reports", daemon=True).start()

    def check_fresh(self) -> None:
        """Raise CloudUnavailable, saying why, where the clusters have not been seen for STALE_S."""
        if self._looked_at_s is None or time.monotonic() - self._looked_at_s > STALE_S:
            raise CloudUnavailable(self._trouble)

    def read(self) -> None:
        """Read what the machines of this run say. Raises StoreError."""
        nodes = [name.removeprefix(self._prefix) for name in self._clusters.entries()]
        with self._reading:
            self.reports.look(nodes)

    def forget(self, node: str) -> None:
        """Drop a machine's report: the next one of that name has said nothing yet. Raises StoreError."""
        with self._reading:
            documents.machine(node).drop(self._store)
            self.reports.forget(node)

    def close(self) -> None:
        """End the threads, soon."""
        self._closed.set()

    def _look_for_ever(self) -> None:
        while not self._closed.is_set():
            began = self._clusters.begin_look()
            try:
                unrecorded = {cluster.name: cluster for cluster in self._unrecorded.look()}
                known = {cluster.name: cluster for cluster in self._sky.clusters(self._prefix)}
                self._clusters.end_look(began, (unrecorded | known).values())
                if self._looked_at_s is None:
                    log.info(
                        "machines_found", here=sorted(known), elsewhere=sorted(unrecorded.keys() - known.keys())
                    )
                    self.read()  # which attempts are under way must be known before any is started
                self._looked_at_s = time.monotonic()
            except (CloudUnavailable, StoreError) as error:
                self._trouble = str(error)
                log.warning("clusters_not_seen", error=str(error))
            except Exception as error:
                self._trouble = repr(error)
                log.exception("watch_failed")
            self._closed.wait(LOOK_EVERY_S)

    def _read_for_ever(self) -> None:
        while not self._closed.wait(READ_EVERY_S):
            try:
                self.read()
            except StoreError as error:
                log.warning("reports_not_read", error=str(error))
            except Exception:
                log.exception("read_failed")
