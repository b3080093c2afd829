"""The gateway as an OpenAI server, against stand-in nodes that are killed in mid sentence."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from grpo_orch.orchestrator.gateway.surface import openai
from grpo_orch.policies.serving.wire import CHAT, COMPLETIONS, HEADER_POLICY
from tests.rigs.gateway_world import World, events_of, serve
from tests.stand_ins.fake_vllm import FOREVER, completion, prompt_of, texts

MESSAGES = [{"role": "user", "content": "how are you?"}]
PROMPT = [1, 2, 3]


async def post(world: World, path: str, headers: dict[str, str] | None = None, **body: Any) -> httpx.Response:
    return await world.http.post(path, json=body, headers=headers)


def undisturbed(seed: int, max_tokens: int, prompt: Any = PROMPT) -> tuple[list[int], list[float], str]:
    return completion({"seed": seed, "max_tokens": max_tokens}, prompt)


def texts_of(seed: int, max_tokens: int, prompt: list[int] = PROMPT) -> str:
    return "".join(texts(undisturbed(seed, max_tokens, prompt)[0]))


async def test_completion_is_whole_and_names_its_policy(world: World) -> None:
    await world.node("a")
    options: dict[str, Any] = {"max_tokens": 20, "logprobs": 0, "return_token_ids": True, "model": "policy"}
    response = await post(world, COMPLETIONS, prompt=PROMPT, seed=7, **options)
    assert response.headers[HEADER_POLICY] == "0-0"
    found = response.json()
    tokens, logprobs, reason = undisturbed(7, 20)
    [choice] = found["choices"]
    assert (choice["token_ids"], choice["logprobs"]["token_logprobs"]) == (tokens, logprobs)
    assert (choice["text"], choice["finish_reason"]) == (texts_of(7, 20), reason)
    assert choice["prompt_token_ids"] == PROMPT
    for start, text in zip(choice["logprobs"]["text_offset"], choice["logprobs"]["tokens"], strict=True):
        assert choice["text"][start:].startswith(text)
    counts = {"prompt_tokens": 3, "completion_tokens": len(tokens), "total_tokens": 3 + len(tokens)}
    assert found["usage"] == counts
    assert (found["object"], found["model"], found["system_fingerprint"]) == ("text_completion", "policy", "0-0")


async def test_choices_have_consecutive_seeds_and_prompts_count_once(world: World) -> None:
    for name in ("a", "b"):
        await world.node(name)
    prompts = [[1, 2], [3, 4, 5]]
    options: dict[str, Any] = {"n": 3, "seed": 40, "max_tokens": 8, "return_token_ids": True}
    found = (await post(world, COMPLETIONS, prompt=prompts, **options)).json()
    expected = [undisturbed(40 + i, 8, prompt)[0] for prompt in prompts for i in range(3)]
    assert [one["token_ids"] for one in found["choices"]] == expected
    assert [one["index"] for one in found["choices"]] == list(range(6))
    assert found["usage"]["prompt_tokens"] == 5
    assert all(one["logprobs"] is None for one in found["choices"])


async def test_a_chat_has_a_message_and_its_logprobs(world: World) -> None:
    await world.node("a")
    body: dict[str, Any] = {"messages": MESSAGES, "seed": 3, "max_completion_tokens": 9, "logprobs": True}
    found = (await post(world, CHAT, **body)).json()
    prompt = prompt_of({"messages": MESSAGES})
    tokens, logprobs, reason = undisturbed(3, 9, prompt)
    [choice] = found["choices"]
    assert choice["message"] == {"role": "assistant", "content": texts_of(3, 9, prompt)}
    assert [one["logprob"] for one in choice["logprobs"]["content"]] == logprobs
    assert choice["finish_reason"] == reason
    assert found["usage"]["completion_tokens"] == len(tokens)


@pytest.mark.parametrize(
    ("path", "more"),
    [(COMPLETIONS, {"prompt": PROMPT}), (CHAT, {"messages": MESSAGES}), (COMPLETIONS, {"prompt": "text"})],
    ids=["tokens", "chat", "text"],
)
@pytest.mark.parametrize("stop", [None, ["never"]], ids=["continued", "started over"])
async def test_stream_is_whole_after_a_killed_node(
    world: World, path: str, more: dict[str, Any], stop: list[str] | None
) -> None:
    a, b = [await world.node(name, stalls=9) for name in ("a", "b")]
    body: dict[str, Any] = {"seed": 11, "max_tokens": 40, "n": 2, "stop": stop, "return_token_ids": True, **more}
    asking = asyncio.ensure_future(post(world, path, **body, stream=True, stream_options={"include_usage": True}))
    await world.until(lambda: a.stalled + b.stalled == 2)
    first, other = (a, b) if a.running else (b, a)
    other.change(stalls=FOREVER)
    first.kill()
    *events, last = events_of(await asking)
    assert world.ledger.handovers >= 1
    prompt = prompt_of(more)
    for index, [choice] in enumerate(event["choices"] for event in events):
        tokens, _, reason = undisturbed(11 + index, 40, prompt)
        assert (choice["index"], choice["token_ids"], choice["finish_reason"]) == (index, tokens, reason)
        said = {"role": "assistant", "content": texts_of(11 + index, 40, prompt)}
        assert (choice["delta"] if path == CHAT else choice["text"]) == (said if path == CHAT else said["content"])
    assert (len(events), last["choices"], last["usage"]["completion_tokens"]) == (2, [], 80)


async def test_disconnected_client_frees_its_place_and_tokens(world: World) -> None:
    node = await world.node("a", stalls=9)
    asking = asyncio.ensure_future(post(world, COMPLETIONS, prompt=PROMPT, seed=1, max_tokens=40))
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
        response = await post(world, COMPLETIONS, prompt=PROMPT, stream=streams)
        assert response.status_code == 400
        assert "too long" in response.json()["error"]["message"]
        assert response.json()["error"]["type"] == "invalid_request_error"
    assert not node.row.is_suspected


async def test_named_policy_is_served_only_by_its_holders(world: World) -> None:
    old, new = await world.node("old", policy="0-1"), await world.node("new", policy="0-0")
    for label in ("0-1", "0-0"):
        response = await post(world, COMPLETIONS, {HEADER_POLICY: label}, prompt=PROMPT)
        assert response.json()["system_fingerprint"] == response.headers[HEADER_POLICY] == label
    assert (len(old.asked), len(new.asked)) == (1, 1)


def test_with_no_wanted_policy_there_is_one_clear_error() -> None:
    async def story(world: World) -> None:
        response = await post(world, COMPLETIONS, prompt=PROMPT)
        assert (response.status_code, response.json()["error"]["type"]) == (503, "server_error")

    serve(story, policy="")


async def test_a_request_waits_for_its_first_node(world: World) -> None:
    asking = asyncio.ensure_future(post(world, COMPLETIONS, prompt=PROMPT, seed=2, max_tokens=5))
    await world.until(lambda: world.members.places.waiting.count == 1)
    await world.node("late")
    assert (await asking).json()["choices"][0]["text"] == texts_of(2, 5)


async def test_silent_request_is_abandoned_with_an_error(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openai, "SILENCE_TIMEOUT_S", 0.1)
    for streams in (False, True):
        response = await post(world, COMPLETIONS, prompt=PROMPT, stream=streams)
        assert (response.status_code, response.json()["error"]["type"]) == (504, "server_error")
        assert "no token of policy 0-0 arrived within 0.1 s" in response.json()["error"]["message"]
    assert world.members.places.waiting.count == 0
    node = await world.node("a", stalls=9)
    while not node.asked:  # a pause of this process may abandon a request before the node has read it
        assert (await post(world, COMPLETIONS, prompt=PROMPT, seed=1, max_tokens=40)).status_code == 504
    await world.until(lambda: node.aborted == len(node.asked))


async def test_request_beyond_the_queue_limit_is_told_to_retry(world: World) -> None:
    world.members.places.waiting.jobs_max = 1
    first = asyncio.ensure_future(post(world, COMPLETIONS, prompt=PROMPT))
    await world.until(lambda: world.members.places.waiting.count == 1)
    assert (await post(world, COMPLETIONS, prompt=PROMPT)).status_code == 503
    await world.node("a")
    assert (await first).status_code == 200


async def test_model_list_has_one_entry(world: World) -> None:
    listed = (await world.http.get("/v1/models")).json()
    assert [one["id"] for one in listed["data"]] == ["policy"]
    assert (await world.http.get("/v1/models/policy")).json() == listed["data"][0]
    other = await world.http.get("/v1/models/gpt-9")
    assert (other.status_code, other.json()["error"]["code"]) == (404, "model_not_found")


BAD: list[tuple[str, dict[str, Any], str | None]] = [
    (COMPLETIONS, {}, None),
    (COMPLETIONS, {"prompt": []}, "prompt"),
    (COMPLETIONS, {"prompt": [[1], []]}, "prompt"),
    (COMPLETIONS, {"prompt": [1, "a"]}, "prompt"),
    (COMPLETIONS, {"prompt": [-1]}, "prompt"),
    (COMPLETIONS, {"prompt": [2**40]}, "prompt"),
    (COMPLETIONS, {"prompt": [True]}, "prompt"),
    (COMPLETIONS, {"prompt": "a", "max_tokens": 0}, "max_tokens"),
    (COMPLETIONS, {"prompt": "a", "max_tokens": -1}, "max_tokens"),
    (COMPLETIONS, {"prompt": "a", "max_tokens": 1.5}, "max_tokens"),
    (COMPLETIONS, {"prompt": "a", "max_tokens": 10**30}, "max_tokens"),
    (COMPLETIONS, {"prompt": "a", "n": 0}, "n"),
    (COMPLETIONS, {"prompt": ["a"] * 33, "n": 32}, "n"),
    (COMPLETIONS, {"prompt": "a", "seed": -1}, "seed"),
    (COMPLETIONS, {"prompt": "a", "seed": 2**63 - 1, "n": 2}, "seed"),
    (COMPLETIONS, {"prompt": "a", "logprobs": True}, "logprobs"),
    (COMPLETIONS, {"prompt": "a", "stream": "yes"}, "stream"),
    (COMPLETIONS, {"prompt": "a", "echo": True}, "echo"),
    (COMPLETIONS, {"prompt": "a", "best_of": 3}, "best_of"),
    (COMPLETIONS, {"prompt": "a", "suffix": "b"}, "suffix"),
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"messages": "hello"}, "messages"),
    (CHAT, {"messages": MESSAGES, "top_logprobs": 3}, "top_logprobs"),
    (COMPLETIONS, {"prompt": "a", "tools": [{"type": "function"}]}, "tools"),
    (CHAT, {"messages": MESSAGES, "tools": {"type": "function"}}, "tools"),
    (CHAT, {"messages": MESSAGES, "functions": [{"name": "f"}]}, "functions"),
]


async def test_invalid_request_is_refused_with_its_parameter(world: World) -> None:
    node = await world.node("a")
    for path, body, param in BAD:
        response = await post(world, path, **body)
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, param), (body, error)
        assert "\n" not in error["message"]
    assert node.asked == []


async def test_parameters_that_are_off_are_no_reason_to_refuse(world: World) -> None:
    """Clients send their defaults."""
    node = await world.node("a")
    off: dict[str, Any] = {"echo": False, "best_of": 1, "suffix": None, "tools": [], "tool_choice": "none"}
    response = await post(world, COMPLETIONS, prompt="a", **off)
    assert response.status_code == 200, response.text
    assert not {"echo", "best_of", "suffix", "tools", "tool_choice"} & set(node.asked[0])
    assert node.asked[0]["max_tokens"] == 16
