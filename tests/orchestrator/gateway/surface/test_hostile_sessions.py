"""Sessions of agents, against what no well-behaved agent, node or trainer sends."""

from __future__ import annotations

from typing import Any

import pytest

from policies.serving.sessions import HEADER_REQUEST, SESSIONS
from policies.serving.wire import CHAT
from tests.orchestrator.gateway.surface.test_sessions import OPEN, USER, Agent
from tests.rigs.gateway_world import World
from tests.stand_ins import fake_vllm


def session_of(world: World, name: str = "0-1-0-0-0") -> Any:
    return world.gateway.sessions._sessions[name]


async def named(agent: Agent, request: str, **more: Any) -> Any:
    """Ask under a name."""
    body = {"messages": agent.messages, **more}
    headers = {HEADER_REQUEST: request}
    return await agent.world.http.post(f"{SESSIONS}/{agent.name}{CHAT}", json=body, headers=headers)


def check_empty(world: World) -> None:
    """Nothing is left of sessions that are over."""
    gateway = world.gateway
    assert len(gateway.sessions) == 0
    assert not gateway.sessions._making
    assert world.members._demand._open == {}
    assert world.members._table._sessions == {}
    assert world.members.waiting.count == 0
    assert all(row.running == 0 for row in world.members.rows)
    assert world.session_log._open == world.session_log._parts == {}


@pytest.mark.parametrize("version", ["garbage", "", "0", "0-0-0", "-1-0", "0-0@"])
async def test_session_of_no_policy_version_leaves_gateway_intact(world: World, version: str) -> None:
    await world.node("a")
    policy = {"version": version, "prefix": "policies/x"}
    answer = await world.http.put(f"{SESSIONS}/odd", json={**OPEN, "policy": policy})
    assert answer.status_code == 400
    assert "policy version" in answer.json()["error"]["message"]
    assert len(world.gateway.sessions) == 0
    await (await Agent(world).open()).turn()


async def test_logprobs_of_a_turn_are_its_tokens(world: World) -> None:
    await world.node("a")
    agent = await Agent(world).open()
    answer = (await agent.ask(logprobs=True, return_token_ids=True)).json()
    [choice], [branch] = answer["choices"], (await agent.trace()).branches
    turn = branch.turns[0]
    logprobs = [one["logprob"] for one in choice["logprobs"]["content"]]
    assert logprobs == branch.logprobs[turn.start : turn.end][: len(logprobs)]
    assert choice["token_ids"] == branch.token_ids[turn.start : turn.end]


async def test_parsed_chat_without_a_session_keeps_top_logprobs(world: World) -> None:
    await world.node("a")
    body = {"messages": [USER], "reasoning_effort": "high", "logprobs": True, "top_logprobs": 1, "max_tokens": 5}
    [choice] = (await world.http.post(CHAT, json=body)).json()["choices"]
    content = choice["logprobs"]["content"]
    assert len(content) == 5
    assert all(len(one["top_logprobs"]) == 1 for one in content)


@pytest.mark.parametrize(
    ("function", "broken"),
    [
        ("derender", {"choices": []}),
        ("derender", {"choices": [{"message": {}}, {"message": {}}]}),
        ("derender", {"choices": [{"message": {"content": 5}}]}),
        ("render", {"token_ids": [-1], "sampling_params": {"max_tokens": 5}}),
        ("render", {"token_ids": [2**40], "sampling_params": {"max_tokens": 5}}),
        ("render", {"token_ids": [1], "sampling_params": {"max_tokens": -5}}),
        ("render", [1]),
    ],
)
async def test_node_that_reads_nonsense_is_not_believed(
    world: World, monkeypatch: pytest.MonkeyPatch, function: str, broken: Any
) -> None:
    real, answers = getattr(fake_vllm, function), iter([broken])
    monkeypatch.setattr(fake_vllm, function, lambda body: next(answers, None) or real(body))
    await world.node("a")
    await world.node("b")
    agent = await Agent(world).open()
    await agent.turn()
