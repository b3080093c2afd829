"""What one process knows of a run's clusters: from SkyPilot's records, from its own calls, and from silence.

Looks at all clusters and calls about one overlap, in threads. A look that began before a call about a cluster
ended knows less of it than the call does, so what it says of that cluster does not count.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from orchestrator.clouds.sky.records import Cluster, ClusterState


@dataclass(slots=True)
class Entry:
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
        self._entries: dict[str, Entry] = {}
        self._lock = threading.Condition()
        self._calls = 0
        self._busy: Counter[str] = Counter()  # calls under way
        self._touched: dict[str, int] = {}  # the number of the last call about each cluster

    def entries(self) -> dict[str, Entry]:
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
            entry = self._entries[name] = Entry(cluster, up)
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
