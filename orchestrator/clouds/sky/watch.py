"""What one process knows of a run's clusters: from SkyPilot's records, its own calls, the machines' reports,
silence.

Looks at all clusters and calls about one overlap, in threads. A look that began before a call about a cluster
ended knows less of it than the call does, so what it found of that cluster does not count.
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

from checkpoint.records import documents
from checkpoint.records.documents import MachineReport
from checkpoint.store import layout
from checkpoint.store.document import Unreadable
from checkpoint.store.errors import StoreError
from checkpoint.store.run_store import Entry, Store
from orchestrator.clouds.protocol import CloudUnavailable
from orchestrator.clouds.sky.aws import GONE_EVERY_S
from orchestrator.clouds.sky.calls import timed
from orchestrator.clouds.sky.records import Cluster, ClusterState, Instance
from policies.costs.store_costs import are_reports_listed

if TYPE_CHECKING:
    from orchestrator.clouds.sky.skypilot import SkyPilot


@dataclass(slots=True)
class KnownCluster:
    """One cluster. `lost` says why it is no more; `attempt` is the last one that this process submitted to it."""

    cluster: Cluster
    was_up: bool
    attempt: int = 0
    lost: str = ""
    failed: bool = False  # its newest attempt ended and the machine has not said so

    @property
    def is_up(self) -> bool:
        return self.was_up and not self.lost


class Clusters:
    """The clusters of one run, by name. Every method may be called from any thread."""

    def __init__(self) -> None:
        self._entries: dict[str, KnownCluster] = {}
        self._lock = threading.Condition()
        self._calls = 0
        self._busy: Counter[str] = Counter()  # calls under way
        self._touched: dict[str, int] = {}  # the number of the last call about each cluster

    def entries(self) -> dict[str, KnownCluster]:
        """A copy of what is known now."""
        with self._lock:
            return {name: replace(entry) for name, entry in self._entries.items()}

    def being_made(self) -> list[str]:
        """The clusters of which only this is known: a call about them is under way."""
        with self._lock:
            return [name for name, calls in self._busy.items() if calls and name not in self._entries]

    @contextmanager
    def call(self, name: str) -> Iterator[None]:
        """While this call about the cluster lasts, nothing else that is said of it is believed."""
        with self._lock:
            self._busy[name] += 1
        try:
            yield
        finally:
            with self._lock:
                self._busy[name] -= 1
                self._touch(name)
                self._lock.notify_all()

    def begin_look(self) -> int:
        """A look at all clusters begins. Returns the `began` of `end_look`."""
        with self._lock:
            return self._calls

    def end_look(self, began: int, clusters: Iterable[Cluster]) -> None:
        """A look at all clusters found these, and no others."""
        with self._lock:
            found = {cluster.name: cluster for cluster in clusters}
            for name in found.keys() | self._entries.keys():
                if not self._busy[name] and self._touched.get(name, 0) <= began:
                    self._believe(name, found.get(name))
            self._lock.notify_all()

    def saw(self, cluster: Cluster) -> None:
        """A call about one cluster found it so."""
        with self._lock:
            self._believe(cluster.name, cluster)
            self._touch(cluster.name)

    def submitted(self, name: str, attempt: int) -> None:
        """An attempt of the cluster's work is with SkyPilot now."""
        with self._lock:
            if entry := self._entries.get(name):
                entry.attempt, entry.failed = attempt, False

    def failed(self, name: str) -> None:
        """The newest attempt ended without a word from the machine."""
        with self._lock:
            if entry := self._entries.get(name):
                entry.failed = True

    def lose(self, name: str, why: str) -> None:
        """The cluster is known to be no more."""
        with self._lock:
            entry = self._entries.get(name)
            if entry is not None and not entry.lost:
                entry.lost = why
            self._touch(name)

    def forget(self, name: str) -> None:
        """The cluster was taken down and nothing of it is left."""
        with self._lock:
            self._entries.pop(name, None)
            self._touch(name)

    def wait_for_change(self, timeout_s: float) -> None:
        """Return when something may be known that was not, or after `timeout_s`."""
        with self._lock:
            self._lock.wait(timeout_s)

    def _touch(self, name: str) -> None:
        self._calls += 1
        self._touched[name] = self._calls

    def _believe(self, name: str, cluster: Cluster | None) -> None:
        entry = self._entries.get(name)
        if cluster is None:
            if entry is not None and not entry.was_up:
                del self._entries[name]  # it never came to be
            elif entry is not None and not entry.lost:
                entry.lost = preempted_or_gone(entry.cluster)
            return
        up = cluster.state is ClusterState.UP
        if entry is None:
            entry = self._entries[name] = KnownCluster(cluster, up)
        # SkyPilot calls a cluster `INIT` again when it cannot reach it, which may be its own network's fault: a
        # machine that works is not given up for that.
        # Of one that could not be read all else is as it was.
        entry.cluster = cluster if cluster.infra else replace(entry.cluster, state=cluster.state)
        entry.was_up = entry.was_up or up
        if cluster.state is ClusterState.STOPPED and not entry.lost:
            entry.lost = "it was stopped"


def preempted_or_gone(cluster: Cluster) -> str:
    """Why a cluster that nobody here took down is no longer there."""
    return "preempted" if cluster.spot else "the cloud no longer has it"


# Machines that another SkyPilot launched: after `resume` on another machine, or once SkyPilot's records are lost.
# The work on them goes on and reports to the store; AWS lists and terminates them. They get no new work, for
# SkyPilot here does not have the key to them.

AWS_EVERY_S = 60.0
ELSEWHERE = "its work ended, and SkyPilot here did not launch it"
_NODE = re.compile(r"(trainer|rollout)-\d+-i\d+")


class UnrecordedClusters:
    """Those among the clusters `PREFIX...`; `places`: see `Account`. All calls raise CloudUnavailable."""

    def __init__(self, sky: SkyPilot, prefix: str, places: Sequence[str | None]) -> None:
        self._sky = sky
        self._prefix = prefix
        self._places = places
        self._due_s = 0.0
        self._found: dict[str, Instance] = {}

    def look(self) -> list[Cluster]:
        """All of them. While there are none, AWS is asked only every AWS_EVERY_S."""
        if self._found or time.monotonic() >= self._due_s:
            self._found = {one.name: one for one in self._ask()}
            self._due_s = time.monotonic() + AWS_EVERY_S
        return [self._sky.as_cluster(one) for one in list(self._found.values())]

    def has_machines(self, name: str) -> bool | None:
        """As `SkyPilot.has_machines`, of any cluster."""
        if name not in self._found:
            return self._sky.has_machines(name)
        return any(one.name == name for one in self._ask())

    def confirm(self, name: str, timeout_s: float) -> Cluster | None:
        """As `SkyPilot.confirm`, of any cluster."""
        if name not in self._found:
            return self._sky.confirm(name, timeout_s)
        return next((self._sky.as_cluster(one) for one in self._ask() if one.name == name), None)

    def is_idle(self, name: str, timeout_s: float) -> bool:
        """As `SkyPilot.is_idle`, of any cluster; False for these, of which nothing is known."""
        return name not in self._found and self._sky.is_idle(name, timeout_s)

    def down(self, name: str, timeout_s: float) -> None:
        """As `SkyPilot.down`, of any cluster, whoever launched it."""
        deadline_s = time.monotonic() + timeout_s
        self._sky.down(name, timeout_s)
        while name in self._found and (left := [one for one in self._ask() if one.name == name]):
            self._sky.end(left)
            if time.monotonic() > deadline_s:
                raise CloudUnavailable(f"{name} was taken down, but AWS still has {', '.join(o.id for o in left)}")
            time.sleep(GONE_EVERY_S)
        self._found = {other: one for other, one in self._found.items() if other != name}

    def clean_up(self) -> None:
        """Take back what AWS still has of the run, and then the machines' security group."""
        if left := self._ask():
            self._sky.end(left)
            raise CloudUnavailable(f"AWS still had {', '.join(sorted(one.name for one in left))}; try again")
        self._sky.drop_group(self._places, 0.0)

    def _ask(self) -> list[Instance]:
        found = self._sky.unrecorded(self._prefix, self._places)
        return [one for one in found if _NODE.fullmatch(one.name.removeprefix(self._prefix))]


# Two threads keep it up to date, for both SkyPilot and the store are slow to answer.

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


# Silent machines: whether one is lost, before money is spent on another. Its cloud is asked: directly where this
# process can, else through SkyPilot, which first tries to reach the machine for some 20 s. A machine that died
# while its cloud calls it running is given up when its SSH port, which answered this process before, has been
# silent for DEAD_AFTER_S. Where that port was never reached from here, SkyPilot has to fail twice in a row to
# reach the machine; it fails for a busy one, too. While this process is cut off itself the cloud cannot be asked,
# and nothing is concluded.

ASK_EVERY_S = 5.0  # between two questions about one machine
ASK_TIMEOUT_S = 120.0  # SkyPilot takes up to 40 s about a machine that does not answer
CONNECT_S = 3.0  # two lost packets and their repetition
DEAD_AFTER_S = 8.0
UNREACHED_MAX = 2  # times in a row that SkyPilot cannot talk to a machine
DEAD = "it does not answer, though its cloud calls it running"


class Suspicions:
    """What is known of silent machines, by cluster name. `answers` says whether an address takes connections."""

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

    def look(self, name: str) -> bool:
        """Find out about a silent machine and record it in the clusters. Returns whether it is there and answers.

        Raises CloudUnavailable.
        """
        if time.monotonic() - self._asked_at_s.get(name, -ASK_EVERY_S) < ASK_EVERY_S:
            return False
        self._asked_at_s[name] = time.monotonic()
        try:
            return self._look(name)
        finally:
            self._asked_at_s[name] = time.monotonic()

    def _look(self, name: str) -> bool:
        entry = self._clusters.entries().get(name)
        if entry is None or entry.lost:
            return False
        if self._reached(entry.cluster):
            return True
        with timed("has_machines", name):
            there = self._sky.has_machines(name)
        if there is False:
            self._clusters.lose(name, preempted_or_gone(entry.cluster))
        elif there and name in self._answered:
            silent_since_s = self._silent_since_s.setdefault(name, time.monotonic())
            if time.monotonic() - silent_since_s >= DEAD_AFTER_S:
                self._clusters.lose(name, DEAD)
        else:
            return self._look_through_skypilot(name, entry)
        return False

    def _look_through_skypilot(self, name: str, entry: KnownCluster) -> bool:
        with timed("confirm", name):
            cluster = self._sky.confirm(name, ASK_TIMEOUT_S)
        if cluster is None:
            self._clusters.lose(name, preempted_or_gone(entry.cluster))
            return False
        self._clusters.saw(cluster)
        if cluster.state is not ClusterState.STARTING or not entry.was_up or self._reached(cluster):
            self._unreached[name] = 0
            return cluster.state is ClusterState.UP
        self._unreached[name] += 1
        if self._unreached[name] >= UNREACHED_MAX:
            self._clusters.lose(name, DEAD)
        return False

    def _reached(self, cluster: Cluster) -> bool:
        if cluster.ssh_address is None or not self._answers(cluster.ssh_address):
            return False
        self._answered.add(cluster.name)
        self._unreached.pop(cluster.name, None)
        self._silent_since_s.pop(cluster.name, None)
        return True


def accepts_connections(address: tuple[str, int]) -> bool:
    """Whether a TCP connection to `(host, port)` comes about."""
    with contextlib.suppress(OSError), socket.create_connection(address, CONNECT_S):
        return True
    return False
