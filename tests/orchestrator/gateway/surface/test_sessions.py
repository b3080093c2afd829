"""Sessions of agents, against stand-in nodes whose template never spells an answer as it was made."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import Any

import msgspec
import pytest

from grpo_orch.checkpoint.store import layout
from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.policies.serving.membership import EASE_IN_REQUESTS
from grpo_orch.policies.serving.wire import (
    CHAT,
    HEADER_REQUEST,
    HEADER_SESSION,
    LIMIT_CODE,
    LOST_CODE,
    SESSIONS,
    Branch,
    Trace,
)
from tests.rigs.gateway_world import Node, World, events_of
from tests.stand_ins.fake_vllm import END, FOREVER, VOCABULARY, completion, rendered

OPEN: dict[str, Any] = {
    "policy": {"version": "0-0", "prefix": "policies/0-0"},
    "seed": 5,
    "sampling": {"stop_token_ids": [END]},
}
USER = {"role": "user", "content": "hello"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


class Agent:
    """One agent's session: what it was answered, and what it says next."""

    def __init__(self, world: World, name: str = "0-1-0-0-0", **opening: Any) -> None:
        self.world, self.name, self.opening = world, name, {**OPEN, **opening}
        self.messages: list[dict[str, Any]] = [dict(USER)]
        self.more: dict[str, Any] = {}

    async def open(self) -> Agent:
        answer = await self.world.http.put(f"{SESSIONS}/{self.name}", json=self.opening)
        assert answer.status_code == 204, answer.text
        return self

    async def ask(self, messages: list[dict[str, Any]] | None = None, **more: Any) -> Any:
        body = {"messages": messages or self.messages, **self.more, **more}
        return await self.world.http.post(f"{SESSIONS}/{self.name}{CHAT}", json=body)

    async def turn(self, **more: Any) -> dict[str, Any]:
        """Ask, and continue the conversation: with the tools' results, or with another question."""
        answer = await self.ask(**more)
        assert answer.status_code == 200, answer.text
        message: dict[str, Any] = answer.json()["choices"][0]["message"]
        self.messages.append(message)
        if calls := message.get("tool_calls"):
            self.messages += [{"role": "tool", "tool_call_id": call["id"], "content": "4"} for call in calls]
        else:
            self.messages.append({"role": "user", "content": f"and {len(self.messages)}?"})
        return message

    async def trace(self) -> Trace:
        answer = await self.world.http.get(f"{SESSIONS}/{self.name}")
        return msgspec.json.decode(answer.content, type=Trace)


async def talk(world: World, turns: int = 4, tools: bool = True, **opening: Any) -> tuple[Agent, Trace]:
    """A whole session."""
    agent = await Agent(world, **opening).open()
    agent.more = {"tools": [TOOL]} if tools else {}
    for _ in range(turns):
        await agent.turn()
    return agent, await agent.trace()


async def half_made(world: World, **opening: Any) -> tuple[Node, Agent, asyncio.Task[Any]]:
    """A session's first turn, asked for, which stalls on the only node."""
    node = await world.node("a", stalls=3)
    agent = await Agent(world, sampling={}, **opening).open()
    asking = asyncio.ensure_future(agent.ask(max_tokens=20))
    await world.until(lambda: node.stalled)
    return node, agent, asking


def check_branch(branch: Branch) -> None:
    """Each answer is what the model makes of exactly the tokens before it."""
    assert len(branch.mask) == len(branch.logprobs) == len(branch.token_ids)
    assert branch.prompt_tokens == branch.turns[0].start
    made = set()
    for turn in branch.turns:
        assert branch.token_ids[turn.end - 1] == END or turn.finish_reason == "length"
        made |= set(range(turn.start, turn.end))
    assert {place for place, one in enumerate(branch.mask) if one} <= made
    assert all(value == 0.0 for value, one in zip(branch.logprobs, branch.mask, strict=True) if not one)


async def test_session_is_one_row_although_answers_are_respelled(world: World) -> None:
    node = await world.node("a")
    agent, trace = await talk(world, 5)
    [branch] = trace.branches
    check_branch(branch)
    assert len(branch.turns) == 5
    assert sum(branch.mask) == sum(one.end - one.start for one in branch.turns)
    assert any("tool_calls" in one for one in branch.messages), "no tool was called"
    assert any(one["role"] == "user" for one in branch.messages[1:]), "only tools were called"
    assert branch.messages == agent.messages[:-1] or branch.messages == agent.messages[: len(branch.messages)]
    for turn, asked in zip(branch.turns, node.asked, strict=True):
        prompt = branch.token_ids[: turn.start]
        assert asked["prompt"] == prompt
        tokens, logprobs, reason = completion(asked, prompt)
        assert branch.token_ids[turn.start : turn.end] == tokens
        assert branch.logprobs[turn.start : turn.end] == logprobs
        assert (turn.finish_reason, turn.node) == (reason, "a")
    seeds = [asked["seed"] for asked in node.asked]
    assert len(set(seeds)) == len(seeds)


async def test_context_between_answers_is_what_the_template_prints(world: World) -> None:
    await world.node("a")
    agent, trace = await talk(world, 2, tools=False)
    [branch] = trace.branches
    between = branch.token_ids[branch.turns[0].end : branch.turns[1].start]
    question = agent.messages[2]
    assert between == [*rendered({"messages": [question], "add_generation_prompt": False}), VOCABULARY]


async def test_rewritten_history_begins_a_branch_and_both_are_kept(world: World) -> None:
    await world.node("a")
    agent = await Agent(world).open()
    await agent.turn()
    await agent.turn()
    shortened = [USER, {"role": "assistant", "content": "I said something"}, {"role": "user", "content": "so?"}]
    assert (await agent.ask(shortened)).status_code == 200
    first, second = (await agent.trace()).branches
    assert (len(first.turns), len(second.turns)) == (2, 1)
    assert second.prompt_tokens == len(rendered({"messages": shortened}))
    assert second.messages[:-1] == shortened
    for branch in (first, second):
        check_branch(branch)


async def test_two_branches_with_a_common_turn_train_on_it_once(world: World) -> None:
    await world.node("a")
    agent = await Agent(world).open()
    await agent.turn()
    fork = list(agent.messages)
    await agent.turn()
    await agent.ask([*fork[:-1], {"role": "user", "content": "another question"}])
    first, second = (await agent.trace()).branches
    shared = first.turns[0].end
    assert first.token_ids[:shared] == second.token_ids[:shared]
    assert first.mask[first.turns[0].start : shared] == [1] * (shared - first.turns[0].start)
    assert second.mask[: second.turns[1].start] == [0] * second.turns[1].start
    assert sum(second.mask) == second.turns[1].end - second.turns[1].start


OTHER_TOOL = {"type": "function", "function": {"name": "subtract", "parameters": {"type": "object"}}}


@pytest.mark.parametrize(
    ("first", "second", "branches"),
    [
        ({"tools": [TOOL]}, {"tools": [TOOL]}, 1),
        ({"tools": [TOOL]}, {"tools": [OTHER_TOOL]}, 2),  # the template prints them before all messages
        ({"reasoning_effort": "high"}, {"reasoning_effort": "high"}, 1),
        ({"reasoning_effort": "low"}, {"reasoning_effort": "high"}, 2),
    ],
)
async def test_what_the_template_prints_otherwise_begins_a_branch(
    world: World, first: dict[str, Any], second: dict[str, Any], branches: int
) -> None:
    await world.node("a")
    agent = await Agent(world).open()
    await agent.turn(**first)
    await agent.turn(**second)
    assert len((await agent.trace()).branches) == branches


async def test_reencoded_arguments_are_the_same_call(world: World) -> None:
    await world.node("a")
    agent = await Agent(world).open()
    agent.more = {"tools": [TOOL]}
    for seed in itertools.count():
        message = await agent.turn(seed=seed)
        if message.get("tool_calls"):
            break
    function = agent.messages[-2]["tool_calls"][0]["function"]
    function["arguments"] = msgspec.json.format(function["arguments"], indent=4)
    agent.messages[-2] = {"content": None, "refusal": None, **agent.messages[-2]}
    await agent.turn()
    assert len((await agent.trace()).branches) == 1


async def test_missing_reasoning_begins_a_branch(world: World) -> None:
    await world.node("a")
    agent = await Agent(world).open()
    assert (await agent.turn(reasoning_effort="high"))["reasoning"]
    del agent.messages[1]["reasoning"]
    await agent.turn(reasoning_effort="high")
    assert len((await agent.trace()).branches) == 2


@pytest.mark.parametrize("cut", [1, 5, 9])
async def test_a_turn_survives_its_node_and_is_the_same(world: World, cut: int) -> None:
    expected = await undisturbed()
    a = await world.node("a", stalls=cut)
    agent = await Agent(world).open()
    agent.more = {"tools": [TOOL]}
    asking = asyncio.ensure_future(agent.turn())
    await world.until(lambda: a.stalled)
    await world.node("b")
    a.lose()
    await asking
    for _ in range(3):
        await agent.turn()
    trace = await agent.trace()
    assert contents(trace) == contents(expected)
    assert trace.discarded == 0
    assert world.ledger.discarded == 0
    assert [one.node for one in trace.branches[0].turns[0].handed_over] == ["a"]


async def undisturbed(turns: int = 4, **opening: Any) -> Trace:
    async with World() as quiet:
        await quiet.node("quiet")
        return (await talk(quiet, turns, **opening))[1]


def contents(trace: Trace) -> list[Any]:
    """What is trained on."""
    return [(one.token_ids, one.mask, one.logprobs, one.messages) for one in trace.branches]


async def test_reopened_session_replays_recorded_turns(world: World) -> None:
    node = await world.node("a")
    agent, before = await talk(world)
    asked = len(node.asked)
    again = await Agent(world).open()
    assert (await again.trace()).branches == []
    again.more = agent.more
    for _ in range(4):
        await again.turn()
    assert again.messages == agent.messages
    assert contents(await again.trace()) == contents(before)
    assert len(node.asked) == asked, "a token was made again"


async def test_unrepeated_turns_are_in_no_row(world: World) -> None:
    """A tool that answers otherwise after a restart: what follows from its first answer is not trained on."""
    node = await world.node("a")
    agent = await Agent(world).open()
    await agent.turn()
    await agent.turn()
    again = await Agent(world).open()
    await again.turn()
    again.messages[-1] = {"role": "user", "content": "something else"}
    await again.turn()
    [branch] = (await again.trace()).branches
    assert branch.messages[2]["content"] == "something else"
    assert len(node.asked) == 3


async def test_another_policy_or_seed_has_no_recorded_turn(world: World) -> None:
    node = await world.node("a")
    agent = await Agent(world).open()
    await agent.turn()
    openings: list[dict[str, Any]] = [{"seed": 6}, {"seed": 6, "sampling": {**OPEN["sampling"], "top_p": 0.9}}]
    for count, opening in enumerate(openings, 2):
        again = await Agent(world, **opening).open()
        await again.turn()
        assert len(node.asked) == count


async def test_killed_gateway_loses_no_finished_turn(tmp_path: Path) -> None:
    expected = await undisturbed()
    async with World(folder=tmp_path) as world:
        await world.node("a")
        agent, _ = await talk(world, 2)
        # Nothing of it is closed or flushed: the file alone is there.
        saved = (tmp_path / "turns").read_bytes()
    (tmp_path / "turns").write_bytes(saved)
    async with World(folder=tmp_path) as world:
        node = await world.node("a")
        agent.world = world  # it was never told
        for _ in range(2):
            await agent.turn()
        assert contents(await agent.trace()) == contents(expected)
        again = await Agent(world).open()
        again.more = agent.more
        for _ in range(4):
            await again.turn()
        assert contents(await again.trace()) == contents(expected)
        assert len(node.asked) == 2


async def test_repeated_request_name_gets_the_same_turn(tmp_path: Path) -> None:
    """What a gateway told an agent in its last moment may not have come there."""
    headers = {HEADER_REQUEST: "request-1"}
    async with World(folder=tmp_path) as world:
        await world.node("a")
        agent = await Agent(world).open()
        url = f"{SESSIONS}/{agent.name}{CHAT}"
        first = (await world.http.post(url, json={"messages": [USER]}, headers=headers)).json()
        again = (await world.http.post(url, json={"messages": [USER]}, headers=headers)).json()
        assert again["choices"] == first["choices"]
        saved = (tmp_path / "turns").read_bytes()
    (tmp_path / "turns").write_bytes(saved)
    async with World(folder=tmp_path) as world:
        node = await world.node("a")
        again = (await world.http.post(url, json={"messages": [USER]}, headers=headers)).json()
        assert again["choices"] == first["choices"]
        other = (await world.http.post(url, json={"messages": [USER]}, headers={HEADER_REQUEST: "2"})).json()
        assert other["choices"] != first["choices"]
        agent.world = world
        assert len((await agent.trace()).branches) == 2
        assert len(node.asked) == 1


async def test_a_record_that_was_cut_off_is_none(tmp_path: Path) -> None:
    async with World(folder=tmp_path) as world:
        await world.node("a")
        await talk(world, 2)
        saved = (tmp_path / "turns").read_bytes()
    expected, again = contents(await undisturbed(2)), set()
    for size in range(0, len(saved), len(saved) // 12):
        (tmp_path / "turns").write_bytes(saved[:size])
        async with World(folder=tmp_path) as world:
            node = await world.node("a")
            assert contents((await talk(world, 2))[1]) == expected
            again.add(len(node.asked))
    assert again == {0, 1, 2}


async def test_unfinished_turn_continues_in_the_next_gateway(tmp_path: Path) -> None:
    async with World(folder=tmp_path) as world:
        node = await world.node("a", stalls=5)
        agent = await Agent(world, sampling={}).open()
        jobs = world.note_jobs()
        asking = asyncio.ensure_future(agent.ask(max_tokens=20))
        await world.until(lambda: [len(job.token_ids) for job in jobs] == [5])
        world.gateway.sessions.close()
        saved = (tmp_path / "turns").read_bytes()
        asking.cancel()
    (tmp_path / "turns").write_bytes(saved)
    async with World(folder=tmp_path) as world:
        node = await world.node("a")
        agent = await Agent(world, sampling={}).open()
        await agent.turn(max_tokens=20)
        [asked] = node.asked
        assert len(asked["prompt"]) == len(rendered({"messages": [USER]})) + 5
        [branch] = (await agent.trace()).branches
    async with World() as quiet:
        await quiet.node("quiet")
        agent = await Agent(quiet, sampling={}).open()
        await agent.turn(max_tokens=20)
        [expected] = (await agent.trace()).branches
    assert (branch.token_ids, branch.logprobs) == (expected.token_ids, expected.logprobs)


async def test_lost_machine_loses_only_what_the_store_lacks(tmp_path: Path) -> None:
    store = Store((tmp_path / "store").as_uri())
    async with World(folder=tmp_path, store=store) as world:
        await world.node("a")
        await talk(world, 2)
        await world.session_log.flush()
        agent = await Agent(world, "another").open()
        await agent.turn()
        await world.session_log.flush()
        agent, _ = await talk(world, 3)  # the third turn is not stored
    (tmp_path / "turns").unlink()
    async with World(folder=tmp_path, store=store) as world:
        node = await world.node("a")
        _, trace = await talk(world, 3)
        assert contents(trace) == contents(await undisturbed(3))
        assert len(node.asked) == 1
        await world.session_log.flush()
        assert len(store.entries(layout.SESSIONS)) == 1, "what was stored anew is still there"
        for name in ("0-1-0-0-0", "another"):
            await Agent(world, name).open()
            assert (await world.http.delete(f"{SESSIONS}/{name}")).status_code == 204
        await world.session_log.flush()
        assert store.entries(layout.SESSIONS) == []


async def test_disconnected_agent_does_not_end_its_turn(world: World) -> None:
    node, agent, asking = await half_made(world)
    asking.cancel()
    node.change(stalls=FOREVER)
    await agent.turn(max_tokens=20)
    assert len(node.asked) == 1
    assert node.aborted == 0


async def test_the_same_request_twice_at_a_time_is_two_turns(world: World) -> None:
    node = await world.node("a")
    agent = await Agent(world).open()
    answers = await asyncio.gather(agent.ask(), agent.ask())
    texts = {answer.json()["choices"][0]["message"]["content"] for answer in answers}
    assert len(texts) == 2
    assert len(node.asked) == 2
    again = await Agent(world).open()
    answers = await asyncio.gather(again.ask(), again.ask())
    assert {answer.json()["choices"][0]["message"]["content"] for answer in answers} == texts
    assert len(node.asked) == 2


async def test_limits_are_the_sessions_and_no_agent_gets_beyond_them(world: World) -> None:
    await world.node("a")
    agent = await Agent(world, turns_max=2, sampling={}, tokens_max=30).open()
    await agent.turn(max_tokens=20)
    await agent.turn(max_tokens=4000)
    refused = await agent.ask()
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, LIMIT_CODE)
    trace = await agent.trace()
    assert sum(map(sum, (one.mask for one in trace.branches))) == 30
    assert "2" in trace.limit


async def test_the_sessions_sampling_takes_the_place_of_the_agents(world: World) -> None:
    node = await world.node("a")
    agent = await Agent(world, sampling={**OPEN["sampling"], "temperature": 0.7}).open()
    await agent.turn(temperature=0.0, metadata={"who": "cares"}, parallel_tool_calls=False)
    [asked] = node.asked
    assert asked["temperature"] == 0.7
    assert not {"metadata", "parallel_tool_calls", "messages", "tools"} & asked.keys()


async def test_session_stays_on_its_member_and_first_turns_spread(world: World) -> None:
    nodes = [await world.node(name) for name in "abc"]
    agents = [await Agent(world, f"s{number}").open() for number in range(9)]
    for _ in range(4):
        for agent in agents:
            await agent.turn()
    for agent in agents:
        [branch] = (await agent.trace()).branches
        assert len({turn.node for turn in branch.turns}) == 1
    assert [len(node.asked) for node in nodes] == [12, 12, 12]


async def test_member_new_to_others_keeps_its_sessions(world: World) -> None:
    """More sessions than a new member gets requests at a time, all at once."""
    nodes = [await world.node(name) for name in "ab"]
    agents = [await Agent(world, f"s{number}").open() for number in range(4 * EASE_IN_REQUESTS)]
    for _ in range(3):
        await asyncio.gather(*(agent.turn() for agent in agents))
    for agent in agents:
        for branch in (await agent.trace()).branches:
            assert len({turn.node for turn in branch.turns}) == 1
    assert abs(len(nodes[0].asked) - len(nodes[1].asked)) <= 3


async def test_a_stream_is_the_answer_at_once(world: World) -> None:
    await world.node("a")
    agent = await Agent(world).open()
    options: dict[str, Any] = {"tools": [TOOL], "stream_options": {"include_usage": True}, "logprobs": True}
    event, last = events_of(await agent.ask(stream=True, return_token_ids=True, **options))
    again = await Agent(world).open()
    again.more = {"tools": [TOOL]}
    message = await again.turn()
    [choice] = event["choices"]
    delta = choice["delta"]
    assert delta.get("content") == message.get("content")
    told = [{key: value for key, value in call.items() if key != "index"} for call in delta.get("tool_calls", [])]
    assert told == message.get("tool_calls", [])
    assert last["usage"]["completion_tokens"] == len(choice["token_ids"])


async def test_a_trace_in_openenvs_form_has_each_answer_once(world: World) -> None:
    node = await world.node("a")
    agent = await Agent(world).open()
    await agent.turn()
    fork = list(agent.messages)
    await agent.turn()
    await agent.ask([*fork[:-1], {"role": "user", "content": "another question"}])
    url = f"{SESSIONS}/{agent.name}"
    found = (await world.http.get(url, params={"form": "openenv"})).json()
    assert found["schema_version"] == 1
    assert [one["prompt_token_ids"] for one in found["turns"]] == [asked["prompt"] for asked in node.asked]
    for one, asked in zip(found["turns"], node.asked, strict=True):
        tokens, logprobs, _ = completion(asked, asked["prompt"])
        assert (one["completion_token_ids"], one["per_token_logps"]) == (tokens, logprobs)
        assert one["loss_mask"] == [0] * len(asked["prompt"]) + [1] * len(tokens)
    assert len({one["node_id"] for one in found["turns"]}) == 3
    assert (await world.http.get(url, params={"form": "other"})).status_code == 400


async def test_header_names_an_open_session_on_the_usual_path(world: World) -> None:
    await world.node("a")
    agent = await Agent(world).open()
    answer = await world.http.post(CHAT, json={"messages": [USER]}, headers={HEADER_SESSION: agent.name})
    assert answer.status_code == 200
    assert len((await agent.trace()).branches) == 1
    unknown = await world.http.post(CHAT, json={"messages": [USER]}, headers={HEADER_SESSION: "unknown"})
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, LOST_CODE)


async def test_unopened_session_does_not_exist(world: World) -> None:
    await world.node("a")
    for method, path in (("GET", ""), ("DELETE", ""), ("POST", CHAT)):
        answer = await world.http.request(method, f"{SESSIONS}/nobody{path}", json={"messages": [USER]})
        assert answer.status_code == 404
        assert "nobody" in answer.json()["error"]["message"]


async def test_a_closed_session_ends_its_turn_and_frees_its_place(world: World) -> None:
    node, agent, asking = await half_made(world)
    await world.http.delete(f"{SESSIONS}/{agent.name}")
    assert (await asking).status_code == 404
    await world.until(lambda: node.row.running == 0)
    assert world.ledger.discarded == 5


async def test_vllms_refusal_is_the_agents_error_and_no_turn(world: World) -> None:
    node = await world.node("a")
    node.refuses = lambda _: True
    agent = await Agent(world).open()
    answer = await agent.ask()
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, "no such template")
    node.refuses = lambda body: "prompt" in body
    assert (await agent.ask()).status_code == 400
    node.refuses = lambda _: False
    assert (await agent.ask()).status_code == 200
    assert len((await agent.trace()).branches) == 1


async def test_vllms_default_limit_counts_as_limit(world: World) -> None:
    node = await world.node("a")
    agent = await Agent(world, sampling={}).open()
    await agent.turn(max_tokens=16)
    assert node.asked[0]["max_tokens"] == 16


async def test_members_that_answer_nonsense_are_named(world: World) -> None:
    node = await world.node("a")
    node.nonsense = b'{"token_ids": "none"}'
    agent = await Agent(world).open()
    answer = await agent.ask()
    assert answer.status_code == 502
    assert "a sent an invalid response to /v1/chat/completions/render" in answer.json()["error"]["message"]
    node.nonsense = b""
    await agent.turn()


async def test_chat_that_fails_every_template_is_refused(world: World) -> None:
    a, b = await world.node("a"), await world.node("b")
    agent = await Agent(world).open()
    a.stumbles = lambda _: True
    await agent.turn()
    b.stumbles = lambda _: True
    answer = await agent.ask()
    assert answer.status_code == 422
    assert "the nodes fail on this chat: the template failed" in answer.json()["error"]["message"]
    assert len((await agent.trace()).branches) == 1


async def test_messages_are_read_by_any_member_that_answers(world: World) -> None:
    a, b = await world.node("a"), await world.node("b")
    a.kill()
    agent = await Agent(world).open()
    for _ in range(3):
        await agent.turn()
    assert b.translated
