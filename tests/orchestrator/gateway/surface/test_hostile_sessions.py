"""Sessions of agents, against what no well-behaved agent, node or trainer sends."""

from __future__ import annotations

import pytest

from policies.serving.sessions import SESSIONS
from tests.orchestrator.gateway.surface.test_sessions import OPEN, Agent
from tests.rigs.gateway_world import World


@pytest.mark.parametrize("version", ["garbage", "", "0", "0-0-0", "-1-0", "0-0@"])
async def test_session_of_no_policy_version_leaves_gateway_intact(world: World, version: str) -> None:
    await world.node("a")
    policy = {"version": version, "prefix": "policies/x"}
    answer = await world.http.put(f"{SESSIONS}/odd", json={**OPEN, "policy": policy})
    assert answer.status_code == 400
    assert "policy version" in answer.json()["error"]["message"]
    assert len(world.gateway.sessions) == 0
    await (await Agent(world).open()).turn()
