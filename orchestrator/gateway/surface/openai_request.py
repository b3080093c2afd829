"""What an OpenAI client asks for, as jobs: one for each choice, with seeds that count up as vLLM's do."""

from __future__ import annotations

import secrets
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias

import msgspec

from orchestrator.gateway.job import Job
from orchestrator.gateway.surface import admission
from orchestrator.gateway.surface.admission import SEED_END, Refused
from policies.serving.wire import CHAT, COMPLETIONS, HEADER_POLICY, MODEL

CHOICES_MAX = 1024  # of one request: its prompts times `n`
LIMIT_DEFAULT = 16  # tokens of a completion; OpenAI's, and vLLM's
BYTES_A_TOKEN = 4  # of text, where only a node can count

Token: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
Limit: TypeAlias = Annotated[int, msgspec.Meta(ge=1, lt=2**31)]
# vLLM would answer in forms that are not kept here, or from more than one completion.
_REFUSED = (
    "best_of",
    "echo",
    "function_call",
    "functions",
    "prompt_embeds",
    "prompt_logprobs",
    "suffix",
    "tool_choice",
    "tools",
    "use_beam_search",
)
_OURS = ("model", "n", "stream", "stream_options", "return_token_ids", "max_completion_tokens")


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class _Common(msgspec.Struct):
    model: str | None = None
    n: Annotated[int, msgspec.Meta(ge=1, le=CHOICES_MAX)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    seed: Annotated[int, msgspec.Meta(ge=0, le=SEED_END - 1)] | None = None
    max_tokens: Limit | None = None
    max_completion_tokens: Limit | None = None
    min_tokens: Annotated[int, msgspec.Meta(ge=0, lt=2**31)] | None = None
    return_token_ids: bool | None = None


class _Completion(_Common, kw_only=True):
    prompt: str | list[Token | str | list[Token]]
    logprobs: Annotated[int, msgspec.Meta(ge=0)] | None = None


class _Chat(_Common, kw_only=True):
    messages: Annotated[list[dict[str, Any]], msgspec.Meta(min_length=1)]
    logprobs: bool | None = None
    top_logprobs: Annotated[int, msgspec.Meta(ge=0)] | None = None


_completion, _chat = msgspec.json.Decoder(_Completion), msgspec.json.Decoder(_Chat)
_whole = msgspec.json.Decoder(dict[str, Any])


@dataclass(frozen=True, slots=True)
class Asked:
    """A client's request. `jobs` are in the order of their choices, `n` to a prompt."""

    jobs: list[Job]
    n: int
    chat: bool
    stream: bool
    usage: bool  # at the end of a stream
    logprobs: bool
    token_ids: bool


def read_completion(body: bytes | bytearray, policy: str) -> Asked:
    """Read the body of `POST /v1/completions`. `policy`: the label that is to make it. Raises Refused."""
    said = admission.decode(body, _completion, "a completion request")
    rest = _rest(body, said)
    rest["max_tokens"] = said.max_completion_tokens or said.max_tokens or LIMIT_DEFAULT
    prompts = [{"prompt": prompt} for prompt in _prompts(said.prompt)]
    return _asked(said, COMPLETIONS, rest, prompts, policy, said.logprobs is not None)


def read_chat(body: bytes | bytearray, policy: str) -> Asked:
    """Read the body of `POST /v1/chat/completions`. Raises Refused."""
    said = admission.decode(body, _chat, "a chat request")
    if said.top_logprobs and not said.logprobs:
        raise Refused(400, "top_logprobs needs logprobs to be true", "top_logprobs")
    rest = _rest(body, said)
    limit = said.max_completion_tokens or said.max_tokens
    if limit is not None:
        rest["max_tokens"] = limit
    prompt = {"messages": rest.pop("messages")}
    return _asked(said, CHAT, rest, [prompt], policy, bool(said.logprobs))


def _rest(body: bytes | bytearray, said: _Common) -> dict[str, Any]:
    """The parameters that go to vLLM as they are. Raises Refused for those that cannot be kept."""
    if said.model is not None and said.model != MODEL:
        message = f"there is one model, `{MODEL}`, of the version in {HEADER_POLICY}, not {said.model[:40]!a}"
        raise Refused(404, message, "model", "model_not_found")
    whole = admission.decode(body, _whole, "a JSON object")
    for name in _REFUSED:
        if whole.get(name) not in (None, False, "", [], {}, "none") and (name, whole[name]) != ("best_of", 1):
            raise Refused(400, f"{name} is not supported", name, "unsupported_parameter")
        whole.pop(name, None)
    for name in _OURS:
        whole.pop(name, None)
    return whole


def _prompts(prompt: str | list[int | str | list[int]]) -> list[str | list[int]]:
    """One prompt or several, each text or token ids."""
    if isinstance(prompt, str):
        return [prompt]
    ids = [one for one in prompt if isinstance(one, int)]
    texts = [one for one in prompt if isinstance(one, str)]
    lists = [one for one in prompt if isinstance(one, list)]
    if not prompt or (lists and not all(lists)):
        raise Refused(400, "the prompt is empty", "prompt")
    if len(ids) == len(prompt):
        return [ids]
    if len(texts) == len(prompt):
        return [*texts]
    if len(lists) == len(prompt):
        return [*lists]
    raise Refused(400, "the prompt mixes text and token ids", "prompt")


def _asked(
    said: _Common, path: str, rest: dict[str, Any], prompts: list[dict[str, Any]], policy: str, logprobs: bool
) -> Asked:
    n, seed = said.n or 1, secrets.randbits(62) if said.seed is None else said.seed
    if n * len(prompts) > CHOICES_MAX:
        raise Refused(400, f"{n} choices for {len(prompts)} prompts: at most {CHOICES_MAX} in all", "n")
    if seed + n > SEED_END:
        raise Refused(400, "seed and n reach beyond 2**63", "seed")
    jobs: list[Job] = []
    for prompt in prompts:
        group, tokens, ids = _describe(prompt)
        jobs += [
            Job(
                body={**rest, **prompt, "seed": seed + i},
                policy=policy,
                group=group,
                prompt_tokens=tokens,
                path=path,
                keep_text=True,
                prompt_token_ids=ids,
            )
            for i in range(n)
        ]
    options = said.stream_options or StreamOptions()
    return Asked(
        jobs=jobs,
        n=n,
        chat=path == CHAT,
        stream=bool(said.stream),
        usage=bool(options.include_usage),
        logprobs=logprobs,
        token_ids=bool(said.return_token_ids),
    )


def _describe(prompt: dict[str, Any]) -> tuple[Hashable, int, list[int] | None]:
    """The group of a prompt, its number of tokens or a guess, and its token ids where they are known."""
    said = prompt.get("prompt")
    if isinstance(said, list):
        return hash(tuple(said)), len(said), said
    text = said.encode() if isinstance(said, str) else msgspec.json.encode(prompt)
    return hash(text), 1 + len(text) // BYTES_A_TOKEN, None
