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


def said(seed: int, max_tokens: int, prompt: list[int]) -> str:
    return "".join(texts(completion({"seed": seed, "max_tokens": max_tokens}, prompt)[0]))


def test_models_completions_and_chats() -> None:
    async def story(served: World) -> None:
        for name in ("a", "b"):
            await served.node(name)
        async with client(served) as ai:
            [model] = [one async for one in ai.models.list()]
            assert (await ai.models.retrieve(model.id)).id == model.id
            made = await ai.completions.create(
                model=model.id, prompt=[1, 2, 3], n=2, seed=4, max_tokens=9, logprobs=0, stop=["never"]
            )
            assert [one.text for one in made.choices] == [said(4, 9, [1, 2, 3]), said(5, 9, [1, 2, 3])]
            assert made.system_fingerprint == "0-0"
            assert made.usage is not None
            assert (made.usage.prompt_tokens, made.usage.completion_tokens) == (3, 18)
            logprobs = made.choices[0].logprobs
            assert logprobs is not None
            assert len(logprobs.token_logprobs or ()) == len(logprobs.text_offset or ()) == 9
            chat = await ai.chat.completions.create(
                model=model.id, messages=MESSAGES, seed=4, max_completion_tokens=9, logprobs=True, top_logprobs=2
            )
            assert chat.choices[0].message.content == said(4, 9, prompt_of({"messages": MESSAGES}))
            assert chat.choices[0].finish_reason == "length"
            assert chat.choices[0].logprobs is not None
            assert len(chat.choices[0].logprobs.content or ()) == 9

    serve(story)


@pytest.mark.parametrize("chat", [False, True], ids=["completion", "chat"])
def test_a_stream_is_text_reason_and_usage(chat: bool) -> None:
    async def story(served: World) -> None:
        await served.node("a")
        async with client(served) as ai:
            more = {"model": "policy", "seed": 8, "max_tokens": 40, "stream_options": {"include_usage": True}}
            if chat:
                stream = await ai.chat.completions.create(messages=MESSAGES, stream=True, **more)
            else:
                stream = await ai.completions.create(prompt="once", stream=True, **more)
            text, usage, reasons = "", None, []
            async for chunk in stream:
                assert chunk.system_fingerprint == "0-0"
                usage = chunk.usage or usage
                for choice in chunk.choices:
                    text += (choice.delta.content or "") if chat else choice.text
                    reasons.append(choice.finish_reason)
        prompt = prompt_of({"messages": MESSAGES} if chat else {"prompt": "once"})
        assert text == said(8, 40, prompt)
        assert reasons == ["length"]
        assert usage is not None
        assert (usage.prompt_tokens, usage.completion_tokens) == (len(prompt), 40)

    serve(story)


def test_errors_have_the_types_of_openais_client() -> None:
    async def story(served: World) -> None:
        await served.node("a", policy="0-7")
        async with client(served) as ai, client(served, "another key") as stranger:
            with pytest.raises(openai.AuthenticationError):
                await stranger.models.list()
            with pytest.raises(openai.NotFoundError) as missing:
                await ai.completions.create(model="gpt-9", prompt="a")
            assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
            with pytest.raises(openai.BadRequestError) as bad:
                await ai.completions.create(model="policy", prompt="a", max_tokens=-1)
            assert (bad.value.param, bad.value.type) == ("max_tokens", "invalid_request_error")
            named = await ai.completions.with_raw_response.create(
                model="policy", prompt="a", extra_headers={HEADER_POLICY: "0-7"}
            )
            assert named.headers[HEADER_POLICY] == named.parse().system_fingerprint == "0-7"

    serve(story)
