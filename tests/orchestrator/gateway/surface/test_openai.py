"""The gateway as an OpenAI server, against stand-in nodes that are killed in mid sentence."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from grpo_orch.orchestrator.gateway.surface import openai
from grpo_orch.policies.serving.wire import CHAT, HEADER_POLICY
from tests.rigs.gateway_world import World, events_of, serve
from tests.stand_ins.fake_vllm import FOREVER, completion, prompt_of, texts

MESSAGES = [{"role": "user", "content": "how are you?"}]
PROMPT = prompt_of({"messages": MESSAGES})


async def post(world: World, headers: dict[str, str] | None = None, **more: Any) -> httpx.Response:
    return await world.http.post(CHAT, json={"messages": MESSAGES, **more}, headers=headers)


def undisturbed(seed: int, max_tokens: int) -> tuple[list[int], list[float], str]:
    return completion({"seed": seed, "max_tokens": max_tokens}, PROMPT)


def message_of(seed: int, max_tokens: int) -> dict[str, Any]:
    return {"role": "assistant", "content": "".join(texts(undisturbed(seed, max_tokens)[0]))}


async def test_chat_is_whole_and_names_its_policy(world: World) -> None:
    await world.node("a")
    options: dict[str, Any] = {"logprobs": True, "return_token_ids": True, "model": "policy"}
    response = await post(world, seed=7, max_completion_tokens=20, **options)
    assert response.headers[HEADER_POLICY] == "0-0"
    found = response.json()
    tokens, logprobs, reason = undisturbed(7, 20)
    [choice] = found["choices"]
    assert choice["token_ids"] == tokens
    assert [one["logprob"] for one in choice["logprobs"]["content"]] == logprobs
    assert (choice["message"], choice["finish_reason"]) == (message_of(7, 20), reason)
    assert found["prompt_token_ids"] == PROMPT
    counts = {"completion_tokens": len(tokens), "total_tokens": len(PROMPT) + len(tokens)}
    assert found["usage"] == {"prompt_tokens": len(PROMPT), **counts}
    assert (found["object"], found["model"], found["system_fingerprint"]) == ("chat.completion", "policy", "0-0")


async def test_choices_have_consecutive_seeds_and_one_prompt(world: World) -> None:
    for name in ("a", "b"):
        await world.node(name)
    found = (await post(world, n=3, seed=40, max_tokens=8, return_token_ids=True)).json()
    assert [one["token_ids"] for one in found["choices"]] == [undisturbed(40 + i, 8)[0] for i in range(3)]
    assert [one["index"] for one in found["choices"]] == list(range(3))
    assert found["usage"]["prompt_tokens"] == len(PROMPT)
    assert all(one["logprobs"] is None for one in found["choices"])


@pytest.mark.parametrize("stop", [None, ["never"]], ids=["continued", "started over"])
async def test_stream_is_whole_after_a_killed_node(world: World, stop: list[str] | None) -> None:
    a, b = [await world.node(name, stalls=9) for name in ("a", "b")]
    body: dict[str, Any] = {"seed": 11, "max_tokens": 40, "n": 2, "stop": stop, "return_token_ids": True}
    asking = asyncio.ensure_future(post(world, **body, stream=True, stream_options={"include_usage": True}))
    await world.until(lambda: a.stalled + b.stalled == 2)
    first, other = (a, b) if a.running else (b, a)
    other.change(stalls=FOREVER)
    first.kill()
    *events, last = events_of(await asking)
    assert world.ledger.handovers >= 1
    for index, [choice] in enumerate(event["choices"] for event in events):
        tokens, _, reason = undisturbed(11 + index, 40)
        assert (choice["index"], choice["token_ids"], choice["finish_reason"]) == (index, tokens, reason)
        assert choice["delta"] == message_of(11 + index, 40)
    assert (len(events), last["choices"], last["usage"]["completion_tokens"]) == (2, [], 80)


async def test_disconnected_client_frees_its_place_and_tokens(world: World) -> None:
    node = await world.node("a", stalls=9)
    asking = asyncio.ensure_future(post(world, seed=1, max_tokens=40))
    await world.until(lambda: node.stalled)
    asking.cancel()
    await world.until(lambda: node.aborted == 1)
    await world.until(lambda: world.gateway.status().tokens_discarded == 9)
    assert world.gateway.status().tokens_delivered == 0
    assert node.row.running == 0


async def test_vllms_refusal_is_the_clients_error_and_no_suspicion(world: World) -> None:
    node = await world.node("a")
    said = b'{"error":{"message":"too long","code":400}}'
    node.raw = b"HTTP/1.1 400 Bad\r\nContent-Length: %d\r\n\r\n%b" % (len(said), said)
    for streams in (False, True):
        response = await post(world, stream=streams)
        assert response.status_code == 400
        assert "too long" in response.json()["error"]["message"]
        assert response.json()["error"]["type"] == "invalid_request_error"
    assert not node.row.is_suspected


async def test_named_policy_is_served_only_by_its_holders(world: World) -> None:
    old, new = await world.node("old", policy="0-1"), await world.node("new", policy="0-0")
    for label in ("0-1", "0-0"):
        response = await post(world, {HEADER_POLICY: label}, max_tokens=16)
        assert response.json()["system_fingerprint"] == response.headers[HEADER_POLICY] == label
    assert (len(old.asked), len(new.asked)) == (1, 1)


def test_with_no_wanted_policy_there_is_one_clear_error() -> None:
    async def story(world: World) -> None:
        response = await post(world)
        assert (response.status_code, response.json()["error"]["type"]) == (503, "server_error")

    serve(story, policy="")


@pytest.mark.parametrize("policy", [None, "0-1"], ids=["no member", "a member with another policy"])
async def test_a_request_waits_for_its_first_node(world: World, policy: str | None) -> None:
    if policy is not None:
        await world.node("other", policy=policy)
    asking = asyncio.ensure_future(post(world, seed=2, max_tokens=5))
    await world.until(lambda: policy is None or world.members.places.waiting.count == 1)
    await world.node("late")
    assert (await asking).json()["choices"][0]["message"] == message_of(2, 5)


async def test_silent_request_is_abandoned_with_an_error(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openai, "SILENCE_TIMEOUT_S", 0.1)

    async def error_of(**more: Any) -> str:
        response = await post(world, **more)
        assert (response.status_code, response.json()["error"]["type"]) == (504, "server_error")
        return str(response.json()["error"]["message"])

    assert await error_of() == "no node rendered the messages within 0.1 s"
    node = await world.node("a", stalls=9)
    while not node.asked:  # a pause of this process may abandon a request before the node has read it
        found = await error_of(seed=1, max_tokens=40)
    assert "no token of policy 0-0 arrived within 0.1 s" in found
    assert world.members.places.waiting.count == 0
    await world.until(lambda: node.aborted == len(node.asked))


async def test_request_beyond_the_queue_limit_is_told_to_retry(world: World) -> None:
    world.members.places.waiting.jobs_max = 1
    await world.node("other", policy="0-1")
    first = asyncio.ensure_future(post(world))
    await world.until(lambda: world.members.places.waiting.count == 1)
    assert (await post(world)).status_code == 503
    await world.node("a")
    assert (await first).status_code == 200


async def test_model_list_has_one_entry(world: World) -> None:
    listed = (await world.http.get("/v1/models")).json()
    assert [one["id"] for one in listed["data"]] == ["policy"]
    assert (await world.http.get("/v1/models/policy")).json() == listed["data"][0]
    other = await world.http.get("/v1/models/gpt-9")
    assert (other.status_code, other.json()["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": 10**30}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"n": 1025}, "n"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**63 - 1, "n": 2}, "seed"),
        ({"logprobs": 1}, "logprobs"),
        ({"logprobs": True, "top_logprobs": 3}, "top_logprobs"),
        ({"stream": "yes"}, "stream"),
        ({"echo": True}, "echo"),
        ({"tools": {"type": "function"}}, "tools"),
        ({"functions": [{"name": "f"}]}, "functions"),
    ],
    ids=str,
)
async def test_invalid_request_is_refused_with_its_parameter(
    world: World, body: dict[str, Any], param: str
) -> None:
    node = await world.node("a")
    response = await post(world, **body)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param)
    assert "\n" not in error["message"]
    assert node.asked == []


async def test_parameters_that_are_off_are_no_reason_to_refuse(world: World) -> None:
    """Clients send their defaults."""
    node = await world.node("a")
    off: dict[str, Any] = {"echo": False, "prompt_logprobs": None, "tools": [], "top_logprobs": 0}
    response = await post(world, tool_choice="none", max_tokens=16, **off)
    assert response.status_code == 200, response.text
    assert not {"tool_choice", *off} & set(node.asked[0])
    assert node.asked[0]["max_tokens"] == 16
