"""A node that is slow to come is waited for while it gets on, and replaced once it does not: hours, simulated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest

from grpo_orch.orchestrator.gateway.routing.gateway_members import JOINING_NODES_MAX, JoiningNodes
from grpo_orch.policies.model.events import NodeMoved
from grpo_orch.policies.model.vocabulary import NodePhase, Refusal, Role
from grpo_orch.policies.serving.joining import (
    BASE_MODEL,
    ENGINE,
    HUB,
    Stage,
)
from grpo_orch.policies.tick.snapshot import Snapshot
from tests.stand_ins.world import HOUR_S, World, spec

OF_70B_BYTES = 141_000_000_000  # in bfloat16
OF_32B_BYTES = 65_500_000_000
LIMIT_S = 900.0
SETUP_S = 400.0  # in which the agent does not run yet


@dataclass
class SlowWorld(World):
    """Rollout nodes tell the gateway how far they are, by `at`: seconds since the agent's start to a stage."""

    at: Callable[[float], Stage] = lambda _: Stage(ENGINE)
    joining_nodes: JoiningNodes = field(default_factory=JoiningNodes)
    deaf: bool = False  # the controller does not hear from the gateway

    def snapshot(self) -> Snapshot:
        seen = super().snapshot()
        for name in self.machines:
            if name.startswith(Role.ROLLOUT) and self.now_s >= self.up_at_s[name] + SETUP_S:
                self.joining_nodes.update(name, self.at(self.now_s - self.up_at_s[name] - SETUP_S), self.now_s)
        members = seen.members or {}
        coming = self.joining_nodes.status(members, self.now_s)
        if self.deaf:
            return replace(seen, members=None, joining={})
        return replace(seen, joining={one.node: one for one in coming} if seen.members is not None else {})


def slow(at: Callable[[float], Stage], takes_s: float) -> SlowWorld:
    boot_s = {Role.ROLLOUT: SETUP_S + takes_s}
    return SlowWorld(spec=spec(1), max_steps=10**6, boot_s=boot_s, at=at, proved=True)


def fetched(bytes_per_s: float, total_bytes: int) -> Callable[[float], Stage]:
    def at(since_s: float) -> Stage:
        done_bytes = int(min(total_bytes, since_s * bytes_per_s))
        return (
            Stage(BASE_MODEL, done_bytes, total_bytes)
            if done_bytes < total_bytes
            else Stage(ENGINE, 0, total_bytes)
        )

    return at


@pytest.mark.parametrize(
    ("bytes_per_s", "reads_s", "served"),
    [
        (12.5e6, 700.0, True),  # 100 Mbit/s: 3:08 h
        (8e6, 700.0, True),  # 4:54 h
        (7e6, 700.0, False),  # less than a twentieth in 900 s
        (1e9, 2300.0, True),  # from a disk that gives 61 MB/s
        (1e9, 2400.0, False),
    ],
)
def test_70b_node_is_awaited_while_it_makes_progress(bytes_per_s: float, reads_s: float, served: bool) -> None:
    world = slow(fetched(bytes_per_s, OF_70B_BYTES), OF_70B_BYTES / bytes_per_s + reads_s)
    bought = world.let_pass(5.5)
    assert (len(bought.machines) == 1) is served
    if served:
        assert world.up(Role.ROLLOUT)
    else:
        gone = [one for one in world.of(NodeMoved) if one.refusal is Refusal.NEVER_SERVED]
        assert gone
        assert ": no progress for" in gone[0].reason


def test_stalled_download_is_abandoned_after_900_s() -> None:
    def at(since_s: float) -> Stage:
        return Stage(BASE_MODEL, int(min(0.42, since_s / (4 * HOUR_S)) * OF_70B_BYTES), OF_70B_BYTES)

    world = slow(at, 10 * HOUR_S)
    stopped_s = SETUP_S + 0.4 * 4 * HOUR_S  # the last twentieth that was whole
    world.let_pass(stopped_s / HOUR_S + 0.2)
    assert world.state.nodes["rollout-0-i1"].phase is NodePhase.BOOTING
    world.let_pass(0.2)
    assert world.state.slots["rollout-0"] == 2


def test_store_failure_near_the_end_grants_time_for_the_hub() -> None:
    """A damaged chunk: what the hub sends after that is the second time, and no less needed."""
    store_s, hub_s = 0.97 * OF_70B_BYTES / 500e6, OF_70B_BYTES / 100e6

    def at(since_s: float) -> Stage:
        if since_s < store_s:
            return Stage(BASE_MODEL, int(since_s * 500e6), OF_70B_BYTES)
        done_bytes = int((since_s - store_s) * 100e6)
        return (
            Stage(HUB, done_bytes, OF_70B_BYTES) if since_s < store_s + hub_s else Stage(ENGINE, 0, OF_70B_BYTES)
        )

    world = slow(at, store_s + hub_s + 500.0)
    bought = world.let_pass(1.5)
    assert len(bought.machines) == 1
    assert world.up(Role.ROLLOUT)


def test_silent_agent_is_abandoned_by_its_last_stage() -> None:
    world = slow(fetched(1e6, OF_32B_BYTES), 10 * HOUR_S)
    world.let_pass(0.2)
    world.at = lambda _: Stage(BASE_MODEL, 1, OF_32B_BYTES)
    world.let_pass(0.3)
    assert world.state.slots["rollout-0"] == 2


@pytest.mark.parametrize("hours", [1.0, 6.0])
def test_silent_gateway_counts_against_no_node(hours: float) -> None:
    world = slow(fetched(12.5e6, OF_70B_BYTES), 10 * HOUR_S)
    world.let_pass(0.3)
    world.deaf = True
    world.let_pass(hours)
    assert world.state.slots["rollout-0"] == 1


def test_restarted_gateway_counts_from_its_own_start() -> None:
    world = slow(fetched(12.5e6, OF_70B_BYTES), 10 * HOUR_S)
    world.let_pass(2.0)
    world.joining_nodes = JoiningNodes()
    world.let_pass(0.2)
    assert world.state.slots["rollout-0"] == 1


@pytest.mark.parametrize("by", ["a new gateway", "another stage"])
def test_endless_progress_is_abandoned_at_a_limit(by: str) -> None:
    def at(since_s: float) -> Stage:
        return Stage(ENGINE if by == "a new gateway" or since_s % 1200 < 600 else HUB, 0, OF_70B_BYTES)

    world = slow(at, 100 * HOUR_S)
    for _ in range(12 * 6):
        world.let_pass(1 / 6)
        world.joining_nodes = JoiningNodes() if by == "a new gateway" else world.joining_nodes
    assert world.state.slots["rollout-0"] == 2
    [gone] = [one for one in world.of(NodeMoved) if one.refusal is Refusal.NEVER_SERVED]
    assert ": no member after" in gone.reason


def test_gateway_counts_each_progress_of_a_node() -> None:
    joining_nodes = JoiningNodes()
    for at_s, done_bytes in enumerate((0, 1, 6, 7, 12, 11, 12)):
        joining_nodes.update("rollout-0-i1", Stage(BASE_MODEL, done_bytes, 100), float(at_s))
    assert joining_nodes.moves == 3
    assert joining_nodes.status((), 10.0)[0].stalled_s == 6.0
    joining_nodes.forget("rollout-0-i1")
    assert joining_nodes.status((), 10.0) == []


def test_joining_nodes_are_limited_and_exclude_members() -> None:
    joining_nodes = JoiningNodes()
    for number in range(2 * JOINING_NODES_MAX):
        joining_nodes.update(f"rollout-{number}-i1", Stage(ENGINE), float(number))
    told = joining_nodes.status({f"rollout-{2 * JOINING_NODES_MAX - 1}-i1"}, 1000.0)
    assert len(told) == JOINING_NODES_MAX - 1
    assert {one.node for one in told} == {
        f"rollout-{n}-i1" for n in range(JOINING_NODES_MAX, 2 * JOINING_NODES_MAX - 1)
    }
