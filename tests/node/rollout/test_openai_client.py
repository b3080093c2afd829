"""OpenAI's own client at the gateway: what it makes of answers, streams and errors."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import openai
import pytest

from grpo_orch.policies.serving.wire import HEADER_POLICY
from tests.rigs.gateway_world import TOKEN, World, serve
from tests.stand_ins.fake_vllm import completion, prompt_of, texts

MESSAGES = [{"role": "user", "content": "how are you?"}]


@asynccontextmanager
async def client(served: World, key: str = TOKEN) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key=key, max_retries=0) as ai:
        yield ai


def said(seed: int, max_tokens: int) -> str:
    prompt = prompt_of({"messages": MESSAGES})
    return "".join(texts(completion({"seed": seed, "max_tokens": max_tokens}, prompt)[0]))


def test_models_and_chats() -> None:
    async def story(served: World) -> None:
        for name in ("a", "b"):
            await served.node(name)
        async with client(served) as ai:
            [model] = [one async for one in ai.models.list()]
            assert (await ai.models.retrieve(model.id)).id == model.id
            chat = await ai.chat.completions.create(
                model=model.id,
                messages=MESSAGES,
                n=2,
                seed=4,
                max_completion_tokens=9,
                logprobs=True,
                stop=["never"],
            )
            assert [one.message.content for one in chat.choices] == [said(4, 9), said(5, 9)]
            assert chat.system_fingerprint == "0-0"
            assert chat.usage is not None
            assert chat.usage.completion_tokens == 18
            assert chat.choices[0].finish_reason == "length"
            assert chat.choices[0].logprobs is not None
            assert len(chat.choices[0].logprobs.content or ()) == 9

    serve(story)


def test_a_stream_is_text_reason_and_usage() -> None:
    async def story(served: World) -> None:
        await served.node("a")
        async with client(served) as ai:
            more = {"model": "policy", "seed": 8, "max_tokens": 40, "stream_options": {"include_usage": True}}
            stream = await ai.chat.completions.create(messages=MESSAGES, stream=True, **more)
            text, usage, reasons = "", None, []
            async for chunk in stream:
                assert chunk.system_fingerprint == "0-0"
                usage = chunk.usage or usage
                for choice in chunk.choices:
                    text += choice.delta.content or ""
                    reasons.append(choice.finish_reason)
        assert text == said(8, 40)
        assert reasons == ["length"]
        assert usage is not None
        assert usage.completion_tokens == 40

    serve(story)


def test_errors_have_the_types_of_openais_client() -> None:
    async def story(served: World) -> None:
        await served.node("a", policy="0-7")
        async with client(served) as ai, client(served, "another key") as stranger:
            with pytest.raises(openai.AuthenticationError):
                await stranger.models.list()
            with pytest.raises(openai.NotFoundError) as missing:
                await ai.chat.completions.create(model="gpt-9", messages=MESSAGES)
            assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
            with pytest.raises(openai.BadRequestError) as bad:
                await ai.chat.completions.create(model="policy", messages=MESSAGES, max_tokens=-1)
            assert (bad.value.param, bad.value.type) == ("max_tokens", "invalid_request_error")
            named = await ai.chat.completions.with_raw_response.create(
                model="policy", messages=MESSAGES, max_tokens=9, extra_headers={HEADER_POLICY: "0-7"}
            )
            assert named.headers[HEADER_POLICY] == named.parse().system_fingerprint == "0-7"

    serve(story)
