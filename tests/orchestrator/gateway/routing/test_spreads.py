"""How long a policy takes to come to the members, as the gateway sees it and as they say."""

from __future__ import annotations

import asyncio

from grpo_orch.orchestrator.gateway.routing.gateway_members import VERSIONS_KEPT, VersionSpreads
from grpo_orch.policies.serving.gateway_status import VersionSpread
from grpo_orch.policies.serving.membership import Member
from grpo_orch.policies.serving.wire import Announce, PolicyStages
from tests.rigs.gateway_world import World


def row(node: str, policy: str | None = "0-0") -> Member:
    return Member(1, node, "boot", "h:1", policy, 4, 0.0)


def says(policy: str, stages: PolicyStages | None = None) -> Announce:
    return Announce("boot", "h:1", policy, stages=stages)


def test_each_stage_is_the_longest_of_any_member() -> None:
    spreads = VersionSpreads()
    spreads.want("0-1", [row("a"), row("b"), row("c"), row("has-it", "0-1")], 100.0)
    assert spreads.last == [VersionSpread("0-1", members=3)]
    spreads.record("a", says("0-0"), 101.0)
    spreads.record("b", says("0-1", PolicyStages("0-1", 2.0, 500, 1.0)), 104.0)
    spreads.record("a", says("0-1", PolicyStages("0-1", 3.0, 400, 0.5)), 105.0)
    for at_s in (106.0, 107.0):  # what is said again, and by who came later, changes nothing
        spreads.record("b", says("0-1"), at_s)
        spreads.record("later", says("0-1"), at_s)
        spreads.want("0-1", [row("later")], at_s)
    assert spreads.last == [VersionSpread("0-1", 3, 2, 4.0, 5.0, 3.0, 500, 1.0)]


def test_few_versions_are_kept_and_late_members_count() -> None:
    spreads = VersionSpreads()
    for step in range(VERSIONS_KEPT + 2):
        spreads.want(f"0-{step}", [row("a", None)], float(step))
    assert [one.policy for one in spreads.last] == [f"0-{step}" for step in range(2, VERSIONS_KEPT + 2)]
    spreads.record("a", says("0-5"), 50.0)
    assert [(one.policy, one.last_ready_s) for one in spreads.last if one.ready] == [("0-5", 45.0)]


async def test_status_and_metrics_show_newest_held_version(world: World) -> None:
    node = await world.node("a")
    world.want("0-1")
    assert "policy_ready{}" not in await world.numbers()
    node.change(policy="0-1")
    while not any(one.ready for one in world.members.version_spreads.last):
        await asyncio.sleep(0.01)
    world.want("0-2")
    told = world.gateway.status().versions
    assert [(one.policy, one.members, one.ready) for one in told] == [
        ("0-0", 0, 0),
        ("0-1", 1, 1),
        ("0-2", 1, 0),
    ]
    found = await world.numbers()
    assert found["policy_ready{}"] == 1
    assert found["policy_ready_seconds{first}"] == found["policy_ready_seconds{last}"] == told[1].first_ready_s > 0
    assert found["policy_load_seconds{}"] == 0
