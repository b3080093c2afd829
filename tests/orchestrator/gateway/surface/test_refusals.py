"""Requests that a node will not take: one of them is told, and is the fault of nobody else."""

from __future__ import annotations

import asyncio
from array import array

import msgspec
import pytest

from grpo_orch.orchestrator.gateway.job import Finished, Job, RequestRefused
from grpo_orch.orchestrator.gateway.surface.admission import Prompt
from grpo_orch.orchestrator.gateway.surface.batch import BatchRun
from grpo_orch.policies.serving.wire import (
    REFUSED,
    Batch,
    BatchLine,
    Completion,
    CompletionRequest,
    PolicyRef,
    Sample,
)
from tests.rigs.gateway_world import World, job, undisturbed

_SAID = (
    b'{"error":{"message":"This model\'s maximum context length is 4096 tokens. However, your prompt contains '
    b'5000 input tokens, which is too long. (parameter=input_tokens, value=5000)","code":400}}'
)
TOO_LONG = b"HTTP/1.1 400 Bad Request\r\nContent-Length: %d\r\n\r\n%b" % (len(_SAID), _SAID)


async def test_requests_own_fault_is_reported_once_all_nodes_refused(world: World) -> None:
    for name in ("first", "second", "third"):
        (await world.node(name)).raw = TOO_LONG
    with pytest.raises(RequestRefused, match="maximum context") as caught:
        await world.ask(job())
    assert caught.value.limit_tokens == 4096
    assert [len(node.asked) for node in world.nodes] == [1, 1, 1]
    assert not any(node.row.is_suspected for node in world.nodes)
    assert world.ledger.handovers == 0
    assert world.ledger.refused == 1


async def test_prompt_too_long_for_one_node_goes_to_a_larger_one(world: World) -> None:
    for name in ("first", "second"):
        (await world.node(name)).raw = TOO_LONG
    await world.node("large")
    jobs = [job(group="one prompt") for _ in range(4)]
    for one, asked in [(one, world.ask(one)) for one in jobs]:
        assert (await asked).token_ids == undisturbed(one)[0]
    assert world.ledger.refused == 0


async def test_request_refused_by_all_waits_only_for_loading_members(world: World) -> None:
    world.want("0-0")
    small = await world.node("small", refuses=lambda body: len(body["prompt"]) > 100)
    large = await world.node("large", policy="0-9")
    await world.node("lost", policy="0-9")

    async def refused(prompt: list[int]) -> tuple[Job, asyncio.Task[Finished]]:
        one = job(prompt=prompt)
        asked = world.ask(one)
        await world.until(lambda: asked.done() or (one.refused_by and one.is_waiting))
        assert (asked.done(), world.members.places.waiting.count, small.row.running) == (False, 1, 0)
        return one, asked

    one, asked = await refused([1] * 200)
    assert (await world.ask(job())).node == "small"
    world.members.remove("lost")
    large.change(policy="0-0")
    large.announce()
    got = await asked
    assert (got.node, got.token_ids, one.is_waiting) == ("large", undisturbed(one)[0], False)
    large.change(policy="0-9")
    large.announce()
    await world.until(lambda: large.row.policy == "0-9")
    _, asked = await refused([1] * 200)
    world.members.remove("large")
    with pytest.raises(RequestRefused):
        await asked
    await world.node("other", policy="0-9")
    _, asked = await refused([1] * 200)
    world.want("0-10")  # that is what it loads now
    with pytest.raises(RequestRefused):
        await asked
    waiting = world.members.places.waiting
    assert (world.ledger.refused, waiting.count, waiting.size_bytes) == (2, 0, 0)


def run_of(batch: Batch, world: World) -> BatchRun:
    prompts = [Prompt(array("I", one.prompt_token_ids), [Sample(one.index, one.seed)]) for one in batch.requests]
    return BatchRun(batch, prompts, world.members, world.ledger, world.gateway.orphans)


async def test_refused_prompt_is_reported_and_others_complete(world: World) -> None:
    await world.node("first", refuses=lambda body: len(body["prompt"]) > 100)
    prompts = [[1] * (200 if index == 7 else 5) for index in range(16)]
    requests = [CompletionRequest(index, prompt, index) for index, prompt in enumerate(prompts)]
    batch = Batch(PolicyRef("0-0", "p"), {"max_tokens": 16, "temperature": 1.0}, requests, 30.0)
    said = b""
    async for chunk in run_of(batch, world).chunks():
        said += chunk
    lines = [msgspec.json.decode(line, type=BatchLine) for line in said.splitlines()]
    got = {line.completion.index: line.completion for line in lines if line.completion is not None}
    assert lines[-1].end is not None
    assert got.keys() == set(range(16))
    assert got.pop(7) == Completion(7, [], [], REFUSED, "0-0", "first", refused="vLLM answered 400: no")
    assert all(len(one.token_ids) == 16 and not one.refused for one in got.values())


async def test_weights_that_compute_no_numbers_are_no_prompts_fault(world: World) -> None:
    for name in ("first", "second"):
        nothing = b'data: {"choices": [{"token_ids": [1], "logprobs": {"token_logprobs": [null]}}]}\n\n'
        (await world.node(name)).breaks = nothing
    batch = Batch(PolicyRef("0-0", "p"), {"max_tokens": 16}, [CompletionRequest(0, [1], 0)], 30.0)
    said = [msgspec.json.decode(chunk, type=BatchLine) async for chunk in run_of(batch, world).chunks()]
    assert said[-1].error is not None
    assert "may contain NaN" in said[-1].error
