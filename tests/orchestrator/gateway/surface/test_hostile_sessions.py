"""Sessions of agents, against what no well-behaved agent, node or trainer sends."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from grpo_orch.orchestrator.gateway.job import Finished, Job
from grpo_orch.policies.serving.wire import (
    CHAT,
    HEADER_OPENING,
    HEADER_REQUEST,
    LIMIT_CODE,
    LOST_CODE,
    SESSIONS,
)
from tests.orchestrator.gateway.surface.test_sessions import OPEN, USER, Agent, half_made
from tests.rigs.gateway_world import World
from tests.stand_ins import fake_vllm
from tests.stand_ins.fake_vllm import FOREVER


async def named(agent: Agent, request: str, **more: Any) -> Any:
    """Ask under a name."""
    body = {"messages": agent.messages, **more}
    headers = {HEADER_REQUEST: request}
    return await agent.world.http.post(f"{SESSIONS}/{agent.name}{CHAT}", json=body, headers=headers)


def check_empty(world: World) -> None:
    """Nothing is left of sessions that are over."""
    gateway = world.gateway
    assert len(gateway.sessions) == 0
    assert not gateway.sessions.turn_tasks
    assert world.members.demand.open_policies == {}
    assert world.members.table.session_nodes == {}
    assert world.members.places.waiting.count == 0
    assert all(row.running == 0 for row in world.members.table.members)
    assert world.session_log.records == {}


async def test_late_request_of_an_earlier_opening_gets_no_turn(world: World) -> None:
    """An agent of a trainer that was killed or cut off, whose session another trainer has opened since."""
    node = await world.node("a")
    await Agent(world, opening="first").open()
    agent = await Agent(world, opening="second").open()
    late = {HEADER_OPENING: "first"}
    url = f"{SESSIONS}/{agent.name}"
    for answer in (
        await world.http.post(url + CHAT, json={"messages": [USER]}, headers=late),
        await world.http.get(url, headers=late),
    ):
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, LOST_CODE)
    assert node.asked == []
    message = await agent.turn()
    for refused in (
        await world.http.put(url, json={**OPEN, "opening": "first"}),
        await world.http.delete(url, headers=late),
    ):
        assert refused.status_code == 409
    again = await Agent(world, opening="third").open()
    assert await again.turn() == message
    assert len(node.asked) == 1
    closed = await world.http.delete(url, headers={HEADER_OPENING: "third, and later"})
    assert closed.status_code == 400
    assert (await world.http.delete(url, headers={HEADER_OPENING: "third-1"})).status_code == 204
    check_empty(world)


async def test_repeated_opening_changes_nothing(tmp_path: Path) -> None:
    """A trainer repeats it while the gateway does not answer; the first may arrive last."""
    async with World(folder=tmp_path) as world:
        node = await world.node("a")
        agent = await Agent(world, opening="only").open()
        await agent.turn()
        await agent.open()
        assert len((await agent.trace()).branches) == 1
    async with World(folder=tmp_path) as world:  # and the next gateway knows it
        node = await world.node("a")
        agent.world = world
        await agent.open()
        await agent.turn()
        [branch] = (await agent.trace()).branches
        assert len(branch.turns) == 2
        assert len(node.asked) == 1
        refused = await world.http.put(f"{SESSIONS}/{agent.name}", json={**OPEN, "opening": "no name"})
        assert refused.status_code == 400


@pytest.mark.parametrize("version", ["garbage", "", "0", "0-0-0", "-1-0", "0-0@"])
async def test_session_of_no_policy_version_is_refused(world: World, version: str) -> None:
    await world.node("a")
    policy = {"version": version, "prefix": "policies/x"}
    answer = await world.http.put(f"{SESSIONS}/odd", json={**OPEN, "policy": policy})
    assert answer.status_code == 400
    assert "policy version" in answer.json()["error"]["message"]
    assert len(world.gateway.sessions) == 0
    await (await Agent(world).open()).turn()


async def test_repeated_last_turn_is_within_the_limit(world: World) -> None:
    node, agent, asking = await half_made(world, turns_max=1)
    asking.cancel()
    await world.until(lambda: not world.gateway.sessions.open_requests(agent.name))
    node.change(stalls=FOREVER)
    await agent.turn(max_tokens=20)
    assert len(node.asked) == 1
    assert (await agent.ask()).json()["error"]["code"] == LIMIT_CODE


async def test_two_parallel_requests_of_one_name_are_one_turn(world: World) -> None:
    node = await world.node("a", deaf=True)
    agent = await Agent(world).open()
    asking = [asyncio.ensure_future(named(agent, "r")) for _ in range(2)]
    await world.until(lambda: node.translated == 2)
    node.change(deaf=False)
    first, second = await asyncio.gather(*asking)
    assert first.json()["choices"] == second.json()["choices"]
    assert len(node.asked) == 1


async def test_turn_repeated_by_name_is_not_given_to_the_next(world: World) -> None:
    node = await world.node("a", stalls=3)
    agent = await Agent(world, sampling={}).open()
    asking = asyncio.ensure_future(named(agent, "r", max_tokens=20))
    await world.until(lambda: node.stalled)
    asking.cancel()
    await world.until(lambda: not world.gateway.sessions.open_requests(agent.name))
    node.change(stalls=FOREVER)
    first = await named(agent, "r", max_tokens=20)
    second = await named(agent, "s", max_tokens=20)
    assert first.json()["choices"] != second.json()["choices"]
    assert len((await agent.trace()).branches) == 2


async def test_refused_request_is_made_when_repeated_by_name(world: World) -> None:
    node = await world.node("a")
    agent = await Agent(world).open()
    node.refuses = lambda body: "prompt" in body
    assert (await named(agent, "r")).status_code == 400
    node.refuses = lambda _: False
    assert (await named(agent, "r")).status_code == 200


async def test_turn_whose_answer_cannot_be_read_is_made_once(world: World) -> None:
    node = await world.node("a")
    agent = await Agent(world).open()
    node.refuses = lambda body: "generate_response" in body
    assert (await agent.ask()).status_code == 400
    node.refuses = lambda _: False
    await agent.turn()
    assert len(node.asked) == 1


async def test_session_closed_during_render_leaves_nothing(world: World) -> None:
    node = await world.node("a", deaf=True)
    agent = await Agent(world).open()
    asking = asyncio.ensure_future(agent.ask())
    await world.until(lambda: node.translated)
    assert (await world.http.delete(f"{SESSIONS}/{agent.name}")).status_code == 204
    node.change(deaf=False)
    assert (await asking).status_code == 404
    assert node.asked == []
    check_empty(world)


async def test_answer_requested_before_the_opening_is_no_turn(world: World) -> None:
    node, _, asking = await half_made(world)
    again = await Agent(world, sampling={}).open()
    node.change(stalls=FOREVER)
    assert (await asking).status_code == 404
    assert (await again.trace()).branches == []
    await again.turn(max_tokens=20)
    assert len(node.asked) == 1, "what was made already was made again"
    await again.ask([USER], max_tokens=20)
    assert len((await again.trace()).branches) == 2


async def test_waiting_request_of_an_earlier_opening_holds_no_turn(world: World) -> None:
    """Its trainer's machine is gone, and the connection has not noticed."""
    node, _, waiting = await half_made(world)
    agent = await Agent(world, sampling={}).open()
    asking = asyncio.ensure_future(agent.ask(max_tokens=20))
    await world.until(lambda: node.translated == 2)
    await asyncio.sleep(0.1)  # and it waits for the turn
    asking.cancel()
    await world.until(lambda: not world.gateway.sessions.open_requests(agent.name))
    again = asyncio.ensure_future(agent.turn(max_tokens=20))
    await world.until(lambda: node.translated == 3)
    node.change(stalls=FOREVER)
    await again
    assert len(node.asked) == 1
    assert (await waiting).status_code == 404


async def test_session_whose_turn_waits_does_not_expire(world: World) -> None:
    expiring = asyncio.ensure_future(world.gateway.sessions.run())
    node, _, asking = await half_made(world)
    world.gateway.sessions.ttl_s = 0.2
    world.gateway.sessions.policy_held_s = 0.1
    await asyncio.sleep(0.5)
    node.change(stalls=FOREVER)
    assert (await asking).status_code == 200
    await world.until(lambda: len(world.gateway.sessions) == 0)
    check_empty(world)
    expiring.cancel()


async def test_idle_session_does_not_hold_its_policy(world: World) -> None:
    world.gateway.sessions.policy_held_s = 0.2
    node = await world.node("a", loads=True)
    agent = await Agent(world).open()
    await agent.turn()
    expiring = asyncio.ensure_future(world.gateway.sessions.run())
    newer = await Agent(world, "newer", policy={"version": "0-1", "prefix": "policies/0-1"}).open()
    await newer.turn()
    assert node.policy == "0-1"
    assert (await agent.trace()).policy == "0-0"
    expiring.cancel()


async def test_session_of_earlier_gateway_holds_no_policy_until_used(tmp_path: Path) -> None:
    async with World(folder=tmp_path) as world:
        await world.node("a")
        agent = await Agent(world).open()
        await agent.turn()
        saved = (tmp_path / "turns").read_bytes()
    (tmp_path / "turns").write_bytes(saved)
    async with World(folder=tmp_path) as world:
        await world.node("a")
        assert len(world.gateway.sessions) == 1
        assert world.members.demand.open_policies == {}
        agent.world = world
        await agent.turn()
        assert world.members.demand.open_policies["0-0"].requests == 1
        await world.http.delete(f"{SESSIONS}/{agent.name}")
        check_empty(world)


@pytest.mark.parametrize("calls", [5, True, "abc", {"a": 1}, [1, None, []], [{"function": {"arguments": {}}}]])
async def test_tool_calls_of_odd_shapes_are_accepted(
    world: World, monkeypatch: pytest.MonkeyPatch, calls: Any
) -> None:
    real = fake_vllm.render
    monkeypatch.setattr(fake_vllm, "render", lambda _: real({"messages": [USER]}))
    await world.node("a")
    agent = await Agent(world).open()
    answer = await agent.ask([USER, {"role": "assistant", "tool_calls": calls}, USER])
    assert answer.status_code == 200


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"messages": [{"role": "user", "content": 2**70}]}, "messages"),
        ({"messages": [USER], "truncate_prompt_tokens": 4}, "truncate_prompt_tokens"),
        ({"messages": [USER], "n": 2}, "n"),
    ],
)
async def test_request_that_cannot_be_recorded_is_refused(world: World, body: dict[str, Any], said: str) -> None:
    node = await world.node("a")
    answer = await (await Agent(world).open()).ask(**body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, said)
    assert node.asked == []


async def test_logprobs_of_a_turn_are_its_tokens(world: World) -> None:
    await world.node("a")
    agent = await Agent(world).open()
    answer = (await agent.ask(logprobs=True, return_token_ids=True)).json()
    [choice], [branch] = answer["choices"], (await agent.trace()).branches
    turn = branch.turns[0]
    logprobs = [one["logprob"] for one in choice["logprobs"]["content"]]
    assert logprobs == branch.logprobs[turn.start : turn.end][: len(logprobs)]
    assert choice["token_ids"] == branch.token_ids[turn.start : turn.end]


async def test_session_sampling_of_tokens_does_not_lift_the_limits(world: World) -> None:
    node = await world.node("a")
    sampling = {"max_completion_tokens": 500, "min_tokens": 50}
    agent = await Agent(world, sampling=sampling, tokens_max=30).open()
    await agent.turn(max_tokens=100)
    [asked] = node.asked
    assert (asked["max_tokens"], asked["min_tokens"]) == (30, 30)
    assert "max_completion_tokens" not in asked
    assert sum((await agent.trace()).branches[0].mask) == 30


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
async def test_nodes_nonsense_is_rejected(
    world: World, monkeypatch: pytest.MonkeyPatch, function: str, broken: Any
) -> None:
    real, answers = getattr(fake_vllm, function), iter([broken])
    monkeypatch.setattr(fake_vllm, function, lambda body: next(answers, None) or real(body))
    await world.node("a")
    await world.node("b")
    agent = await Agent(world).open()
    await agent.turn()


async def test_sampling_that_cannot_be_recorded_is_refused(world: World) -> None:
    answer = await world.http.put(f"{SESSIONS}/s", json={**OPEN, "sampling": {"top_k": 10**24}})
    assert answer.status_code == 400
    assert "sampling" in answer.json()["error"]["message"]
    check_empty(world)


async def test_turn_placed_as_its_session_ends_leaves_no_pin(world: World) -> None:
    node = await world.node("a", max_requests=1, stalls=3)
    first, second = await Agent(world, sampling={}).open(), await Agent(world, "second", sampling={}).open()
    asking = [asyncio.ensure_future(agent.ask(max_tokens=20)) for agent in (first, second)]
    await world.until(lambda: node.stalled and world.members.places.waiting.count == 1)
    waiting = next(name for name in ("second", first.name) if name not in world.members.table.session_nodes)
    world.gateway.sessions.drop(waiting)
    node.row.max_requests = node.row.allowed = 2
    world.members.places.assign()
    await world.until(lambda: len(world.gateway.sessions.turn_tasks) == 1)
    assert waiting not in world.members.table.session_nodes
    for name in {first.name, "second"} - {waiting}:
        world.gateway.sessions.drop(name)
    await asyncio.gather(*asking)
    await world.until(lambda: not world.gateway.sessions.turn_tasks)
    check_empty(world)


async def test_turn_made_as_its_session_ends_is_not_recorded(world: World) -> None:
    await world.node("a")
    gate: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    real, made = world.completer.complete, list[Job]()

    async def complete(job: Job) -> Finished:
        finished = await real(job)
        made.append(job)
        await gate
        return finished

    world.completer.complete = complete  # type: ignore[method-assign]
    agent = await Agent(world).open()
    asking = asyncio.ensure_future(agent.ask())
    await world.until(lambda: made)
    gate.set_result(None)
    world.gateway.sessions.drop(agent.name)
    assert (await asking).status_code == 404
    await world.until(lambda: not world.gateway.sessions.turn_tasks)
    check_empty(world)
    assert (world.ledger.delivered, world.ledger.discarded) == (0, len(made[0].token_ids))


async def test_part_of_a_turn_that_started_over_is_whole(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    node = await world.node("a", stalls=3)
    agent = await Agent(world, sampling={}).open()
    jobs = world.note_jobs()
    asking = asyncio.ensure_future(agent.ask(max_tokens=20))
    await world.until(lambda: [len(job.token_ids) for job in jobs] == [5])
    [job] = jobs
    records: list[Any] = []
    monkeypatch.setattr(world.session_log, "append", records.append)
    world.gateway.sessions.record_parts()
    job.start_over()
    job.token_ids += range(6)
    job.logprobs += [0.0] * 6
    world.gateway.sessions.record_parts()
    world.gateway.sessions.record_parts()
    assert [(one.start, len(one.token_ids)) for one in records] == [(0, 5), (0, 6)]
    assert node.stalled
    asking.cancel()


async def test_node_that_fails_to_render_is_chosen_last(world: World) -> None:
    a, b = await world.node("a"), await world.node("b")
    asked = list[str]()

    def fails(body: dict[str, Any]) -> bool:
        if "prompt" in body:
            return False
        asked.append("a")
        raise ConnectionError

    a.change(refuses=fails)
    agent = await Agent(world).open()
    for _ in range(4):
        b.row.outstanding += 1  # a is the one with least to do
        await agent.turn()
    assert len(asked) == 1
    b.lose()
    a.change(refuses=lambda _: False)
    await agent.turn()


async def test_refusal_in_invalid_text_is_the_agents_error(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    node = await world.node("a", refuses=lambda _: True)
    real, odd = fake_vllm.http_response, b'{"error":{"message":"\xff"}}'
    monkeypatch.setattr(fake_vllm, "http_response", lambda status, body=b"": real(status, odd if body else body))
    answer = await (await Agent(world).open()).ask()
    assert answer.status_code == 400
    assert node.translated == 1
