"""What a run's clusters are and what their machines say, kept up to date by two threads: both are slow to ask."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import structlog

from checkpoint.records import documents
from checkpoint.store.errors import StoreError
from checkpoint.store.run_store import Store
from orchestrator.clouds.protocol import CloudUnavailable
from orchestrator.clouds.sky.clusters import Clusters
from orchestrator.clouds.sky.reports import Reports
from orchestrator.clouds.sky.unrecorded import UnrecordedClusters

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
