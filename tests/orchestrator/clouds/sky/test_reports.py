"""Of what machines say of themselves as little is asked as tells it, and nothing of it is missed."""

from __future__ import annotations

import itertools
from dataclasses import replace
from datetime import UTC, datetime

import pytest

from grpo_orch.checkpoint.records import documents
from grpo_orch.checkpoint.records.documents import MachineReport
from grpo_orch.checkpoint.store import layout
from grpo_orch.checkpoint.store.run_store import Entry, Store
from grpo_orch.orchestrator.clouds.sky.watch import DATED_TO_S, Reports
from grpo_orch.policies.costs.store_costs import (
    CONTROL_GETS_PER_S,
    CONTROL_PUTS_PER_S,
    LEASES_PER_S,
    LISTED,
    usage_of_control,
)

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
