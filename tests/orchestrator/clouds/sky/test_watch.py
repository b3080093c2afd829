"""What a process knows of a run's clusters: from looks and calls, silent machines, and the machines' reports."""

from __future__ import annotations

import itertools
import socket
import time
from dataclasses import replace
from datetime import UTC, datetime

import pytest

from grpo_orch.checkpoint.records import documents
from grpo_orch.checkpoint.records.documents import MachineReport
from grpo_orch.checkpoint.store import layout
from grpo_orch.checkpoint.store.run_store import Entry, Store
from grpo_orch.orchestrator.clouds.protocol import CloudUnavailable
from grpo_orch.orchestrator.clouds.sky import watch as suspicion
from grpo_orch.orchestrator.clouds.sky.records import Cluster, ClusterState
from grpo_orch.orchestrator.clouds.sky.watch import (
    DATED_TO_S,
    DEAD,
    Clusters,
    Reports,
    Suspicions,
    accepts_connections,
)
from grpo_orch.policies.costs.store_costs import (
    CONTROL_GETS_PER_S,
    CONTROL_PUTS_PER_S,
    LEASES_PER_S,
    LISTED,
    usage_of_control,
)

NAME = "grpo-tiny-1f2e3d4c-rollout-0-i1"
UP = Cluster(
    name=NAME,
    state=ClusterState.UP,
    infra="aws/us-east-1/us-east-1a",
    spot=True,
    price_usd_per_h=0.4,
    ssh_address=("198.18.0.7", 22),
)
STARTING = replace(UP, state=ClusterState.STARTING)


@pytest.fixture
def clusters() -> Clusters:
    return Clusters()


def look(clusters: Clusters, *found: Cluster) -> None:
    clusters.end_scan(clusters.begin_scan(), found)


@pytest.mark.parametrize(
    ("looks", "lost"),
    [
        ([UP], ""),
        ([UP, None], "preempted"),
        ([UP, None, None], "preempted"),  # and stays so
        ([replace(UP, spot=False), None], "the cloud no longer has it"),
        ([UP, STARTING], ""),  # SkyPilot cannot reach it, and it is not given up for that
        ([UP, replace(UP, state=ClusterState.STOPPED)], "it was stopped"),
        ([STARTING, None], None),  # it never came up, and is forgotten
    ],
)
def test_looks_update_a_cluster(clusters: Clusters, looks: list[Cluster | None], lost: str | None) -> None:
    for found in looks:
        look(clusters, *([found] if found else []))
    entry = clusters.entries().get(NAME)
    assert (entry and entry.lost) == lost
    assert entry is None or entry.is_up == (not lost)


def test_lost_cluster_stays_lost_until_forgotten(clusters: Clusters) -> None:
    look(clusters, UP)
    clusters.mark_lost(NAME, "preempted")
    clusters.mark_lost(NAME, "something else")
    look(clusters, UP)
    assert clusters.entries()[NAME].lost == "preempted"
    clusters.forget(NAME)
    assert clusters.entries() == {}


def test_listing_from_before_a_launch_does_not_undo_it(clusters: Clusters) -> None:
    began = clusters.begin_scan()
    with clusters.call(NAME):
        clusters.record(UP)
    clusters.end_scan(began, [])
    assert clusters.entries()[NAME].is_up
    look(clusters)
    assert clusters.entries()[NAME].lost == "preempted"


def test_listing_from_before_a_teardown_does_not_revive_it(clusters: Clusters) -> None:
    look(clusters, UP)
    began = clusters.begin_scan()
    with clusters.call(NAME):
        clusters.forget(NAME)
    clusters.end_scan(began, [UP])
    assert clusters.entries() == {}


def test_while_a_call_lasts_no_look_counts(clusters: Clusters) -> None:
    with clusters.call(NAME):
        look(clusters, STARTING)
        assert clusters.entries() == {}
    look(clusters, STARTING)
    assert not clusters.entries()[NAME].is_up


def test_pending_cluster_is_known_until_its_last_call_ends(clusters: Clusters) -> None:
    with clusters.call(NAME):
        with clusters.call(NAME):
            assert clusters.launching() == [NAME]
        assert clusters.launching() == [NAME]
        clusters.record(UP)
        assert clusters.launching() == []  # from now on by its entry
        clusters.forget(NAME)
    assert clusters.launching() == []


def test_new_attempt_clears_the_failed_one(clusters: Clusters) -> None:
    look(clusters, UP)
    clusters.mark_submitted(NAME, 1)
    clusters.mark_failed(NAME)
    assert clusters.entries()[NAME].failed
    clusters.mark_submitted(NAME, 2)
    assert (clusters.entries()[NAME].attempt, clusters.entries()[NAME].failed) == (2, False)


# When a machine that nothing is heard from is given up, and when not.


class World:
    """One machine: whether its SSH port answers, and what SkyPilot says of it."""

    def __init__(self) -> None:
        self.answers = True
        self.says: Cluster | Exception | None = UP
        self.has: bool | None = None  # whether the cloud has it; None: it cannot be asked from here
        self.asked = 0
        self.clusters = Clusters()
        self.clusters.record(UP)
        self.suspicions = Suspicions(self, self.clusters, lambda _: self.answers)  # type: ignore[arg-type]  # it confirms

    def confirm(self, name: str, timeout_s: float) -> Cluster | None:
        assert (name, timeout_s) == (NAME, suspicion.QUERY_TIMEOUT_S)
        self.asked += 1
        if isinstance(self.says, Exception):
            raise self.says
        return self.says

    def has_machines(self, name: str) -> bool | None:
        assert name == NAME
        if isinstance(self.says, Exception):
            raise self.says
        return self.has

    def look(self) -> bool:
        return self.suspicions.check(NAME)

    @property
    def lost(self) -> str:
        return self.clusters.entries()[NAME].lost


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(suspicion, "QUERY_EVERY_S", 0.0)
    return World()


@pytest.mark.parametrize(
    ("answers", "has", "says", "asked", "lost"),
    [
        (True, None, [UP], 0, ""),  # it answers, and nobody else is asked
        (True, None, [STARTING], 0, ""),  # busy: SkyPilot cannot talk to it
        (False, False, [UP], 0, "preempted"),  # at the cloud's word
        (False, None, [None], 1, "preempted"),  # where the cloud cannot be asked SkyPilot is
        (False, True, [STARTING], 1, ""),
        (False, True, [STARTING, STARTING], 2, DEAD),
        (False, None, [STARTING, STARTING], 2, DEAD),
        (False, None, [STARTING, UP, STARTING], 3, ""),  # a word of life between
    ],
)
def test_silent_machine_is_classified(
    world: World, answers: bool, has: bool | None, says: list[Cluster | None], asked: int, lost: str
) -> None:
    world.answers, world.has = answers, has
    for said in says:
        world.says = said and replace(said, ssh_address=None)
        there = world.look()
    assert (world.asked, world.lost) == (asked, lost)
    assert there == answers or len(says) > 1


def test_machine_still_launching_is_not_dead(world: World) -> None:
    world.clusters.forget(NAME)
    world.clusters.record(STARTING)
    world.answers, world.says = False, STARTING
    for _ in range(3):
        world.look()
    assert world.lost == ""


def test_silence_is_counted_from_the_last_answer(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    world.has = True
    for answers, passes_s in ((True, 1), (False, 7), (True, 7), (False, 7), (False, 7)):
        world.answers = answers
        world.look()
        assert world.lost == ""
        now_s += passes_s
    world.look()
    assert world.lost == DEAD


def test_no_verdict_while_the_cloud_is_unreachable(world: World) -> None:
    world.look()
    world.answers, world.says = False, CloudUnavailable("no network")
    with pytest.raises(CloudUnavailable):
        world.look()
    assert world.lost == ""


def test_lost_machine_is_not_queried(world: World) -> None:
    world.clusters.mark_lost(NAME, "preempted")
    assert not world.look()
    assert not world.suspicions.check("never-was")
    assert world.asked == 0


def test_queries_are_limited_in_rate(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suspicion, "QUERY_EVERY_S", 1000.0)
    world.answers = False
    for _ in range(5):
        world.look()
    assert world.asked == 1


def test_a_listening_port_accepts_and_a_closed_one_does_not() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        address = server.getsockname()
        assert not accepts_connections(address)
        server.listen()
        assert accepts_connections(address)


# Of what machines say of themselves as little is asked as tells it, and nothing of it is missed.

names = itertools.count()


class Counting(Store):
    """A store that counts requests, and dates by the second of the test's own clock."""

    def __init__(self) -> None:
        super().__init__(f"memory://reports-{next(names)}")
        self.now_s = 0.0
        self.gets = self.listings = 0
        self._dates: dict[str, datetime] = {}

    def get(self, key: str) -> bytes:
        self.gets += 1
        return super().get(key)

    def put(self, key: str, data: bytes | bytearray | memoryview) -> None:
        self._dates[key] = datetime.fromtimestamp(int(self.now_s), UTC)
        super().put(key, data)

    def entries(self, prefix: str, *, after: str | None = None) -> list[Entry]:
        found = [replace(one, modified_at=self._dates[one.key]) for one in super().entries(prefix, after=after)]
        self.listings += max(1, -(-len(found) // LISTED))
        return found


class Fleet:
    """Machines that say so, and who looks at them once a second."""

    def __init__(self, count: int) -> None:
        self.store = Counting()
        self.nodes = [f"rollout-{place}-i1" for place in range(count)]
        for node in self.nodes:
            self.says(node)
        self.reports = Reports(self.store, clock=lambda: self.store.now_s)

    def says(self, node: str, reason: str = "z0", *, notice: bool = False) -> None:
        documents.machine(node).write(self.store, MachineReport(node, 1, None, notice, exit_reason=reason))

    def looks(self, seconds: int) -> None:
        for _ in range(seconds):
            self.store.now_s += 1.0
            self.reports.update(self.nodes)


@pytest.mark.parametrize("count", [9, 12, 13, 101, 1001])
def test_quiet_fleet_makes_the_estimated_requests(count: int) -> None:
    fleet = Fleet(count)
    fleet.looks(10)
    assert set(fleet.reports.by_node) == set(fleet.nodes)
    fleet.store.gets = fleet.store.listings = 0
    fleet.looks(60)
    use = usage_of_control(60.0, count)
    assert fleet.store.listings == use.puts - 60 * CONTROL_PUTS_PER_S
    assert fleet.store.gets == pytest.approx(use.gets - 60 * (CONTROL_GETS_PER_S + LEASES_PER_S * count))


@pytest.mark.parametrize("count", [2, 40])
def test_report_is_read_at_the_next_look(count: int) -> None:
    fleet = Fleet(count)
    fleet.looks(10)
    fleet.says(fleet.nodes[1], notice=True)
    fleet.looks(1)
    assert [node for node, one in fleet.reports.by_node.items() if one.notice] == [fleet.nodes[1]]


def test_second_report_in_one_second_is_read() -> None:
    fleet = Fleet(40)
    fleet.looks(10)
    fleet.says(fleet.nodes[1], "z1")
    fleet.reports.update(fleet.nodes)
    fleet.says(fleet.nodes[1], "z2")  # as long, and within the same second
    fleet.looks(int(DATED_TO_S) + 1)
    assert fleet.reports.by_node[fleet.nodes[1]].exit_reason == "z2"


def test_dropped_report_counts_as_none() -> None:
    fleet = Fleet(40)
    fleet.looks(10)
    documents.machine(fleet.nodes[1]).drop(fleet.store)
    fleet.looks(1)
    assert set(fleet.reports.by_node) == {*fleet.nodes} - {fleet.nodes[1]}
    fleet.says(fleet.nodes[1], "z3")
    fleet.looks(1)
    assert fleet.reports.by_node[fleet.nodes[1]].exit_reason == "z3"


@pytest.mark.parametrize("count", [2, 40])
def test_damaged_report_hides_no_other(count: int) -> None:
    fleet = Fleet(count)
    fleet.store.put(layout.machine(fleet.nodes[0]), b"{")
    fleet.looks(1)
    assert set(fleet.reports.by_node) == set(fleet.nodes[1:])


def test_reports_are_read_again_after_the_fleet_grew() -> None:
    fleet = Fleet(40)
    nodes, fleet.nodes = fleet.nodes, fleet.nodes[:5]
    fleet.looks(10)
    fleet.says(nodes[1], "z4")
    fleet.nodes = nodes
    fleet.looks(1)
    assert fleet.reports.by_node[nodes[1]].exit_reason == "z4"
    assert len(fleet.reports.by_node) == 40
