"""Whether a machine that nothing is heard from is lost, before money is spent on another.

Its cloud is asked: at once where this process can, else through SkyPilot, which first tries to talk to the machine
for some 20 s. One that died while its cloud calls it running is given up when its SSH port, which answered this
process before, has been silent for DEAD_AFTER_S. Where that port was never reached from here, SkyPilot has to say
twice in a row that it cannot talk to the machine; it says so of a busy one, too. While this process is cut off
itself the cloud cannot be asked, and nothing is concluded.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

from orchestrator.clouds.sky.calls import timed
from orchestrator.clouds.sky.clusters import Clusters, Entry, preempted_or_gone
from orchestrator.clouds.sky.records import Cluster, ClusterState

if TYPE_CHECKING:
    from orchestrator.clouds.sky.aws import UnrecordedClusters
    from orchestrator.clouds.sky.sdk.skypilot import SkyPilot

EVERY_S = 5.0  # between two questions about one machine
TIMEOUT_S = 120.0  # SkyPilot takes up to 40 s about a machine that does not answer
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
        if time.monotonic() - self._asked_at_s.get(name, -EVERY_S) < EVERY_S:
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

    def _look_through_skypilot(self, name: str, entry: Entry) -> bool:
        with timed("confirm", name):
            cluster = self._sky.confirm(name, TIMEOUT_S)
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
