"""Streams over nodes that differ in the last bits of what they compute, as GPUs do whose sums follow the batch."""

from __future__ import annotations

import asyncio
import json
from functools import partial
from typing import Any, Literal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from grpo_orch.orchestrator.gateway.job import Job
from grpo_orch.orchestrator.gateway.surface.admission import ApiError
from grpo_orch.orchestrator.gateway.surface.openai import AnswerFormat, StreamState, _Run, error_document
from grpo_orch.orchestrator.gateway.surface.openai_request import from_chat, read_chat, read_completion
from tests.rigs.gateway_world import World, serve
from tests.stand_ins.fake_vllm import CONTEXT, FOREVER, completion, expected, prompt_of, rendered

PROMPT = [1, 2, 3]
CHAT = {"messages": [{"role": "user", "content": "hello"}]}
# In the order of what a seam means to them: nothing, or that they start over first.
KINDS: dict[str, dict[str, Any]] = {
    "plain": {"prompt": PROMPT, "max_tokens": 40},
    "stop": {"prompt": PROMPT, "max_tokens": 40, "stop": ["zzz"]},
    "penalty": {"prompt": PROMPT, "max_tokens": 40, "presence_penalty": 0.5},
    "chat": {**CHAT, "max_tokens": 40},
    "chat without a limit": {**CHAT, "stop_token_ids": list(range(0, 1000, 25))},
    "chat, its tokens as well": {**CHAT, "max_tokens": 40, "return_token_ids": True, "stop": "zzz"},
    "grammar": {"prompt": PROMPT, "max_tokens": 40, "structured_outputs": {"regex": "x*"}},
}


class Client:
    """Streams one request; keeps what it was told."""

    def __init__(self, world: World, body: dict[str, Any]) -> None:
        self.world, self.text, self.token_ids = world, "", list[int]()
        said = json.dumps({"stream": True, **body}).encode()
        if "messages" in body:
            chat = read_chat(said)
            prompt, limit = rendered(body), body.get("max_tokens", CONTEXT - len(rendered(body)))
            self.asked = from_chat(chat, prompt, {**chat.sampling, "max_tokens": limit}, "0-0")
        else:
            self.asked = read_completion(said, "0-0")

    @property
    def job(self) -> Job:
        return self.asked.jobs[0]

    async def stream(self) -> str | None:
        """To its end. Returns the finish reason. Raises ApiError."""
        form, told = AnswerFormat(self.asked, "0-0"), StreamState()
        async with _Run(self.asked.jobs, self.world.completer, self.world.ledger) as at_work:
            while True:
                answer = at_work.completion(0)
                if (chunk := form.chunk(0, told, answer)) is not None:
                    choice = chunk["choices"][0]
                    self.text += choice["delta"]["content"] if self.asked.chat else choice["text"]
                    self.token_ids += choice.get("token_ids", [])
                if answer is not None:
                    return answer.finish_reason
                await at_work.until_news()


async def streamed(world: World, client: Client, cuts: list[int]) -> str | None:
    """The stream, over a node for each stretch; each but the last is lost after so many tokens of the request."""
    streaming = asyncio.ensure_future(client.stream())
    for number, stalls in enumerate([*cuts, FOREVER]):
        node = await world.node(f"n{number}", unequal=f"n{number}", stalls=stalls)
        if number:
            world.nodes[number - 1].lose()
        await world.until(lambda node=node: streaming.done() or node.stalled)  # type: ignore[misc]
        if streaming.done():
            break
    return await streaming


def check(client: Client, reason: str | None) -> None:
    """What the client was told is one completion, and the job's."""
    job = client.job
    assert client.text == job.text == "".join(job.tokens)
    assert len(job.token_ids) == len(job.logprobs) == len(job.tokens) <= job.max_tokens
    if client.asked.include_token_ids:
        assert client.token_ids == job.token_ids
    stops = job.body.get("stop_token_ids", [])
    assert reason == ("stop" if job.token_ids[-1] in stops else "length")
    assert client.asked.chat is not None or len(job.token_ids) == 40


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "grammar"])
@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(seed=st.integers(0, 1000), cuts=st.lists(st.integers(1, 38), max_size=3))
def test_a_stream_goes_on_over_nodes_that_compute_other_last_bits(kind: str, seed: int, cuts: list[int]) -> None:
    async def story(world: World) -> None:
        client = Client(world, {**KINDS[kind], "seed": seed})
        check(client, await streamed(world, client, cuts))
        delivered, discarded = world.ledger.delivered, world.ledger.discarded
        assert (delivered, discarded) == (0, client.job.discarded + len(client.job.token_ids))

    serve(story)


async def test_what_was_told_before_the_seam_stays_and_the_rest_is_the_other_nodes(world: World) -> None:
    seed = next(
        seed
        for seed in range(1000)
        if completion({"seed": seed, "max_tokens": 9}, PROMPT, "n0")[0]
        != completion({"seed": seed, "max_tokens": 9}, PROMPT, "n1")[0]
    )
    client = Client(world, {**KINDS["stop"], "seed": seed, "return_token_ids": True})
    assert await streamed(world, client, [9]) == "length"
    before = completion({"seed": seed, "max_tokens": 9}, PROMPT, "n0")[0]
    after = completion({"seed": seed, "max_tokens": 31}, [*PROMPT, *before], "n1")[0]
    assert client.token_ids == [*before, *after]
    asked = [(len(body["prompt"]), body["max_tokens"], body["stop"]) for body in world.nodes[1].asked]
    assert asked == [(3, 40, ["zzz"]), (12, 31, ["zzz"])]  # from its start, and then from what was told


async def test_a_stream_that_ends_elsewhere_before_it_is_where_it_was_goes_on_from_there(world: World) -> None:
    logprobs: dict[str, list[Any]] = {"token_logprobs": [], "tokens": [], "top_logprobs": []}
    choice = {"text": "", "token_ids": [], "logprobs": logprobs, "finish_reason": "length"}
    ends = b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"
    client = Client(world, {**KINDS["stop"], "seed": 3})
    streaming = asyncio.ensure_future(client.stream())
    first = await world.node("first", stalls=9)
    await world.until(lambda: first.stalled)
    await world.node("second", breaks=ends)  # the first token of each answer, and then no more
    first.kill()
    assert await streaming == "length"
    assert client.text == client.job.text
    assert client.job.token_ids == expected(3, PROMPT, 10)[0]


@pytest.mark.parametrize(("kind", "recovery"), [("grammar", "continue"), ("stop", "exact")])
def test_a_stream_that_cannot_go_on_ends_with_an_error_that_says_so(
    kind: str, recovery: Literal["continue", "exact"]
) -> None:
    async def story(world: World, seed: int) -> ApiError | None:
        client = Client(world, {**KINDS[kind], "seed": seed})
        client.job.recovery = recovery
        try:
            check(client, await streamed(world, client, [30]))
        except ApiError as error:
            return error
        return None

    ends = [serve(partial(story, seed=seed)) for seed in range(12)]
    errors = [one for one in ends if one is not None]
    assert 0 < len(errors) < len(ends)  # the others happened to agree
    for error in errors:
        said = error_document(error)["error"]
        assert (error.status, said["type"], said["code"]) == (503, "server_error", "stream_diverged")
        assert "VLLM_BATCH_INVARIANT=1" in said["message"]


@pytest.mark.parametrize("prompt", [CHAT, {"prompt": PROMPT}], ids=["chat", "tokens"])
async def test_what_is_not_streamed_is_made_whole_by_one_node(world: World, prompt: dict[str, Any]) -> None:
    client = Client(world, {**prompt, "max_tokens": 40, "stop": "zzz", "seed": 3, "stream": False})
    first, asked = await world.node("n0", unequal="n0", stalls=9), world.ask(client.job)
    await world.until(lambda: first.stalled)
    await world.node("n1", unequal="n1")
    first.kill()
    got = await asked
    assert got.token_ids == completion(client.job.body, prompt_of(client.job.body), "n1")[0]
