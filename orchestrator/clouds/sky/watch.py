"""What this process knows of a run's clusters, from SkyPilot's records, its own calls, and the machines' reports.

Scans of all clusters and calls about one cluster overlap, in threads. For a cluster whose call ended after a scan
began, the scan's result is older than the call's and is ignored.
"""

from __future__ import annotations

import contextlib
import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import structlog

from grpo_orch.checkpoint.records import documents
from grpo_orch.checkpoint.records.documents import MachineReport
from grpo_orch.checkpoint.store import layout
from grpo_orch.checkpoint.store.document import UnreadableDocuments
from grpo_orch.checkpoint.store.errors import StoreError
from grpo_orch.checkpoint.store.run_store import Entry, Store
from grpo_orch.orchestrator.clouds.protocol import CloudUnavailable
from grpo_orch.orchestrator.clouds.sky.aws import GONE_EVERY_S
from grpo_orch.orchestrator.clouds.sky.records import Cluster, ClusterState, Instance
from grpo_orch.policies.costs.store_costs import are_reports_listed

if TYPE_CHECKING:
    from grpo_orch.orchestrator.clouds.sky.skypilot import SkyPilot


@dataclass(slots=True)
class KnownCluster:
    """A cluster. `lost` is why it is gone, if it is; `attempt` the last one that this process submitted to it."""

    cluster: Cluster
    was_up: bool
    attempt: int = 0
    lost: str = ""
    failed: bool = False  # its newest attempt ended without a report

    @property
    def is_up(self) -> bool:
        return self.was_up and not self.lost


class Clusters:
    """The clusters of one run, by name. Every method may be called from any thread."""

    def __init__(self) -> None:
        self._entries: dict[str, KnownCluster] = {}
        self._lock = threading.Lock()
        self._calls = 0
        self._busy: Counter[str] = Counter()  # calls in progress
        self._touched: dict[str, int] = {}  # the number of the last call about each cluster

    def entries(self) -> dict[str, KnownCluster]:
        """Return a copy of the known clusters."""
        with self._lock:
            return {name: replace(entry) for name, entry in self._entries.items()}

    def launching(self) -> list[str]:
        """Return the clusters known only by a call in progress."""
        with self._lock:
            return [name for name, calls in self._busy.items() if calls and name not in self._entries]

    @contextmanager
    def call(self, name: str) -> Iterator[None]:
        """Ignore scan results about the cluster during this call."""
        with self._lock:
            self._busy[name] += 1
        try:
            yield
        finally:
            with self._lock:
                self._busy[name] -= 1
                self._touch(name)

    def begin_scan(self) -> int:
        """Begin a scan of all clusters. Returns the `began` of `end_scan`."""
        with self._lock:
            return self._calls

    def end_scan(self, began: int, clusters: Iterable[Cluster]) -> None:
        """Record the result of a scan: these clusters, and no others."""
        with self._lock:
            found = {cluster.name: cluster for cluster in clusters}
            for name in found.keys() | self._entries.keys():
                if not self._busy[name] and self._touched.get(name, 0) <= began:
                    self._update(name, found.get(name))

    def record(self, cluster: Cluster) -> None:
        """Record the result of a call about one cluster."""
        with self._lock:
            self._update(cluster.name, cluster)
            self._touch(cluster.name)

    def mark_submitted(self, name: str, attempt: int) -> None:
        """Record that an attempt of the cluster's work was submitted to SkyPilot."""
        with self._lock:
            if entry := self._entries.get(name):
                entry.attempt, entry.failed = attempt, False

    def mark_failed(self, name: str) -> None:
        """Record that the newest attempt ended without a report from the machine."""
        with self._lock:
            if entry := self._entries.get(name):
                entry.failed = True

    def mark_lost(self, name: str, why: str) -> None:
        """Record that the cluster is gone."""
        with self._lock:
            entry = self._entries.get(name)
            if entry is not None and not entry.lost:
                entry.lost = why
            self._touch(name)

    def forget(self, name: str) -> None:
        """Forget a cluster that was taken down completely."""
        with self._lock:
            self._entries.pop(name, None)
            self._touch(name)

    def _touch(self, name: str) -> None:
        self._calls += 1
        self._touched[name] = self._calls

    def _update(self, name: str, cluster: Cluster | None) -> None:
        entry = self._entries.get(name)
        if cluster is None:
            if entry is not None and not entry.was_up:
                del self._entries[name]  # it was never created
            elif entry is not None and not entry.lost:
                entry.lost = preempted_or_gone(entry.cluster)
            return
        is_up = cluster.state is ClusterState.UP
        if entry is None:
            entry = self._entries[name] = KnownCluster(cluster, is_up)
        # SkyPilot sets a cluster that it cannot reach back to `INIT`, also when its own network fails. So `was_up`
        # stays true. Without `infra` the record was unreadable: keep everything but the state.
        entry.cluster = cluster if cluster.infra else replace(entry.cluster, state=cluster.state)
        entry.was_up = entry.was_up or is_up
        if cluster.state is ClusterState.STOPPED and not entry.lost:
            entry.lost = "it was stopped"


def preempted_or_gone(cluster: Cluster) -> str:
    """Return why a cluster that this process did not take down is gone."""
    return "preempted" if cluster.spot else "the cloud no longer has it"


# Machines that another SkyPilot launched, which occur after `resume` on another machine or when SkyPilot's records
# are lost. Their work continues and reports to the store; AWS lists and terminates them. They get no new work,
# because the local SkyPilot does not have their SSH key.

AWS_EVERY_S = 60.0
ELSEWHERE = "its work ended, and another SkyPilot had launched it"
_NODE = re.compile(r"(trainer|rollout)-\d+-i\d+")


class UnrecordedClusters:
    """Clusters `PREFIX...` without a record here; `places`: see `Account`. All calls raise CloudUnavailable."""

    def __init__(self, sky: SkyPilot, prefix: str, places: Sequence[str | None]) -> None:
        self._sky = sky
        self._prefix = prefix
        self._places = places
        self._due_s = 0.0
        self._found: dict[str, Instance] = {}

    def scan(self) -> list[Cluster]:
        """Return them all. While AWS lists none, it is queried only every AWS_EVERY_S."""
        if self._found or time.monotonic() >= self._due_s:
            self._found = {instance.name: instance for instance in self._query()}
            self._due_s = time.monotonic() + AWS_EVERY_S
        return [self._sky.as_cluster(instance) for instance in list(self._found.values())]

    def has_machines(self, name: str) -> bool | None:
        """As `SkyPilot.has_machines`, of any cluster."""
        if name not in self._found:
            return self._sky.has_machines(name)
        return any(instance.name == name for instance in self._query())

    def confirm(self, name: str, timeout_s: float) -> Cluster | None:
        """As `SkyPilot.confirm`, of any cluster."""
        if name not in self._found:
            return self._sky.confirm(name, timeout_s)
        return next((self._sky.as_cluster(found) for found in self._query() if found.name == name), None)

    def is_idle(self, name: str, timeout_s: float) -> bool:
        """As `SkyPilot.is_idle`, of any cluster; False for unrecorded ones, whose jobs are unknown."""
        return name not in self._found and self._sky.is_idle(name, timeout_s)

    def down(self, name: str, timeout_s: float) -> None:
        """As `SkyPilot.down`, of any cluster."""
        deadline_s = time.monotonic() + timeout_s
        self._sky.down(name, timeout_s)
        while name in self._found and (left := [found for found in self._query() if found.name == name]):
            self._sky.terminate_instances(left)
            if time.monotonic() > deadline_s:
                ids = ", ".join(instance.id for instance in left)
                raise CloudUnavailable(f"{name} was taken down, but AWS still has {ids}")
            time.sleep(GONE_EVERY_S)
        self._found = {other: instance for other, instance in self._found.items() if other != name}

    def clean_up(self) -> None:
        """Terminate the run's remaining machines on AWS; once there are none, delete their security group."""
        if left := self._query():
            self._sky.terminate_instances(left)
            names = ", ".join(sorted(instance.name for instance in left))
            raise CloudUnavailable(f"AWS still had {names}, which are being terminated; try again")
        self._sky.drop_group(self._places, 0.0)

    def _query(self) -> list[Instance]:
        found = self._sky.unrecorded(self._prefix, self._places)
        return [instance for instance in found if _NODE.fullmatch(instance.name.removeprefix(self._prefix))]


# Reports of the run's machines. With many machines, only changed reports are read.

# Some stores list times with a resolution of 1 s: a second write in the same second, after the first was read,
# does not change the listing. So each report is read again after this time.
DATED_TO_S = 2.0


@dataclass(frozen=True, slots=True)
class _Read:
    """The listing of a report when it was read, and when to read it again; None: already done."""

    entry: Entry
    again_at_s: float | None


class Reports:
    """The latest reports, `by_node`. Not thread-safe.

    Args:
        store: the run's.
        clock: a monotonic clock, in seconds.
    """

    def __init__(self, store: Store, clock: Callable[[], float] = time.monotonic) -> None:
        self.by_node: dict[str, MachineReport] = {}
        self._store, self._clock = store, clock
        self._reads: dict[str, _Read] = {}
        self._unreadable = UnreadableDocuments()

    def update(self, nodes: Collection[str]) -> None:
        """Read the reports of these machines, and forget others. Raises StoreError."""
        for node in self.by_node.keys() - nodes:
            self.forget(node)
        if are_reports_listed(len(nodes)):
            self._read_changed(nodes)
            return
        self._reads.clear()
        for node in nodes:
            self._read(node)

    def forget(self, node: str) -> None:
        """Forget the report of a machine."""
        self.by_node.pop(node, None)
        self._reads.pop(node, None)

    def _read_changed(self, nodes: Collection[str]) -> None:
        listed = {entry.key: entry for entry in self._store.entries(layout.MACHINES)}
        now_s = self._clock()
        for node in nodes:
            entry, read = listed.get(layout.machine(node)), self._reads.get(node)
            if entry is None:
                self.forget(node)
            elif read is None or entry != read.entry:
                self._read(node)
                self._reads[node] = _Read(entry, now_s + DATED_TO_S)
            elif read.again_at_s is not None and now_s >= read.again_at_s:
                self._read(node)
                self._reads[node] = _Read(entry, None)

    def _read(self, node: str) -> None:
        """Read a report; a damaged one counts as missing."""
        report = documents.machine(node).read(self._store, self._unreadable)
        if report is None:
            self.by_node.pop(node, None)
        else:
            self.by_node[node] = report


log = structlog.get_logger()

SCAN_EVERY_S = 5.0  # between scans of SkyPilot's records
READ_EVERY_S = 1.0  # between reads of the machines' reports
STALE_S = 60.0  # maximum age of the last successful scan


class Watch:
    """Scans the clusters `PREFIX...` and reads their machines' reports, from `start` to `close`.

    Two threads, since both SkyPilot and the store are slow.
    """

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
        self._scanned_at_s: float | None = None
        self._scan_error = "the first scan of SkyPilot's records has not finished"
        self._started = False
        self._closed = threading.Event()

    def start(self) -> None:
        """Start the threads, once. Not thread-safe."""
        if self._started:
            return
        self._started = True
        threading.Thread(target=self._scan_loop, name="watch-clusters", daemon=True).start()
        threading.Thread(target=self._read_loop, name="read-reports", daemon=True).start()

    def check_fresh(self) -> None:
        """Raise CloudUnavailable, with the reason, if no scan succeeded within STALE_S."""
        if self._scanned_at_s is None or time.monotonic() - self._scanned_at_s > STALE_S:
            raise CloudUnavailable(self._scan_error)

    def read(self) -> None:
        """Read the reports of the run's machines. Raises StoreError."""
        nodes = [name.removeprefix(self._prefix) for name in self._clusters.entries()]
        with self._reading:
            self.reports.update(nodes)

    def forget(self, node: str) -> None:
        """Delete a machine's report, so that the next machine of that name starts without. Raises StoreError."""
        with self._reading:
            documents.machine(node).drop(self._store)
            self.reports.forget(node)

    def close(self) -> None:
        """Stop the threads soon."""
        self._closed.set()

    def _scan_loop(self) -> None:
        while not self._closed.is_set():
            began = self._clusters.begin_scan()
            try:
                unrecorded = {cluster.name: cluster for cluster in self._unrecorded.scan()}
                known = {cluster.name: cluster for cluster in self._sky.clusters(self._prefix)}
                self._clusters.end_scan(began, (unrecorded | known).values())
                if self._scanned_at_s is None:
                    others = sorted(unrecorded.keys() - known.keys())
                    log.info("machines_found", recorded=sorted(known), unrecorded=others)
                    self.read()  # running attempts must be known before any is started
                self._scanned_at_s = time.monotonic()
            except (CloudUnavailable, StoreError) as error:
                self._scan_error = str(error)
                log.warning("cluster_list_failed", error=str(error))
            except Exception as error:
                self._scan_error = repr(error)
                log.exception("cluster_scan_failed")
            self._closed.wait(SCAN_EVERY_S)

    def _read_loop(self) -> None:
        while not self._closed.wait(READ_EVERY_S):
            try:
                self.read()
            except StoreError as error:
                log.warning("machine_reports_failed", error=str(error))
            except Exception:
                log.exception("report_reader_failed")


# Silent machines: decide whether a machine is lost before a replacement is bought. The cloud is queried: directly
# if possible, else through SkyPilot, which first tries to reach the machine for about 20 s. If the cloud lists the
# machine as running, it is lost once its SSH port, which answered this process before, has been silent for
# DEAD_AFTER_S. If that port was never reached from here, SkyPilot has to fail twice in a row to reach the machine;
# it also fails for a busy one. While this process has no network the cloud cannot be queried, and nothing is
# concluded.

QUERY_EVERY_S = 5.0  # between two checks of a machine
QUERY_TIMEOUT_S = 120.0  # SkyPilot takes up to 40 s for a machine that does not answer
CONNECT_S = 3.0  # enough to repeat two lost packets
DEAD_AFTER_S = 8.0
UNREACHED_MAX = 2  # consecutive failures of SkyPilot to reach a machine
DEAD = "it does not answer, but its cloud lists it as running"


class Suspicions:
    """Checks silent machines, by cluster name. `answers` returns whether an address accepts connections."""

    def __init__(
        self,
        sky: SkyPilot | UnrecordedClusters,
        clusters: Clusters,
        answers: Callable[[tuple[str, int]], bool] | None = None,
    ) -> None:
        self._sky = sky
        self._clusters = clusters
        self._answers = answers or accepts_connections
        self._asked_at_s: dict[str, float] = {}
        self._answered: set[str] = set()
        self._unreached: Counter[str] = Counter()
        self._silent_since_s: dict[str, float] = {}

    def check(self, name: str) -> bool:
        """Check a silent machine and record the result in the clusters. Return whether it exists and answers.

        Raises CloudUnavailable.
        """
        if time.monotonic() - self._asked_at_s.get(name, -QUERY_EVERY_S) < QUERY_EVERY_S:
            return False
        self._asked_at_s[name] = time.monotonic()
        try:
            return self._check(name)
        finally:
            self._asked_at_s[name] = time.monotonic()

    def _check(self, name: str) -> bool:
        entry = self._clusters.entries().get(name)
        if entry is None or entry.lost:
            return False
        if self._can_connect(entry.cluster):
            return True
        exists = self._sky.has_machines(name)
        if exists is False:
            self._clusters.mark_lost(name, preempted_or_gone(entry.cluster))
        elif exists and name in self._answered:
            silent_since_s = self._silent_since_s.setdefault(name, time.monotonic())
            if time.monotonic() - silent_since_s >= DEAD_AFTER_S:
                self._clusters.mark_lost(name, DEAD)
        else:
            return self._check_through_skypilot(name, entry)
        return False

    def _check_through_skypilot(self, name: str, entry: KnownCluster) -> bool:
        cluster = self._sky.confirm(name, QUERY_TIMEOUT_S)
        if cluster is None:
            self._clusters.mark_lost(name, preempted_or_gone(entry.cluster))
            return False
        self._clusters.record(cluster)
        if cluster.state is not ClusterState.STARTING or not entry.was_up or self._can_connect(cluster):
            self._unreached[name] = 0
            return cluster.state is ClusterState.UP
        self._unreached[name] += 1
        if self._unreached[name] >= UNREACHED_MAX:
            self._clusters.mark_lost(name, DEAD)
        return False

    def _can_connect(self, cluster: Cluster) -> bool:
        if cluster.ssh_address is None or not self._answers(cluster.ssh_address):
            return False
        self._answered.add(cluster.name)
        self._unreached.pop(cluster.name, None)
        self._silent_since_s.pop(cluster.name, None)
        return True


def accepts_connections(address: tuple[str, int]) -> bool:
    """Whether a TCP connection to `(host, port)` succeeds."""
    with contextlib.suppress(OSError), socket.create_connection(address, CONNECT_S):
        return True
    return False
