"""What an OpenAI client asks for, as jobs: one for each choice, with seeds that count up as vLLM's do."""

from __future__ import annotations

import secrets
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias

import msgspec

from orchestrator.gateway.job import Job
from orchestrator.gateway.surface import admission
from orchestrator.gateway.surface.admission import SEED_END, ApiError
from policies.serving.wire import HEADER_POLICY, MODEL

CHOICES_MAX = 1024  # of one request: its prompts times `n`
LIMIT_DEFAULT = 16  # tokens of a completion; OpenAI's, and vLLM's
BYTES_A_TOKEN = 4  # of text, where only a node can count

Token: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
Limit: TypeAlias = Annotated[int, msgspec.Meta(ge=1, lt=2**31)]
# vLLM would answer in forms that are not kept here, or from more than one completion.
_UNSUPPORTED = (
    "audio",
    "best_of",
    "continue_final_message",
    "echo",
    "function_call",
    "functions",
    "prompt_embeds",
    "prompt_logprobs",
    "suffix",
    "use_beam_search",
)
# A chat's parameters that make its prompt, or read its answer; and those of OpenAI that mean nothing here.
_CHAT_PARAMETERS = (
    "add_generation_prompt",
    "add_special_tokens",
    "chat_template",
    "chat_template_kwargs",
    "documents",
    "include_reasoning",
    "logprobs",
    "messages",
    "metadata",
    "modalities",
    "parallel_tool_calls",
    "prediction",
    "prompt_cache_key",
    "prompt_cache_retention",
    "reasoning",
    "reasoning_effort",
    "response_format",
    "safety_identifier",
    "service_tier",
    "store",
    "structured_outputs",
    "tool_choice",
    "tools",
    "top_logprobs",
    "verbosity",
)
_GATEWAY_PARAMETERS = ("model", "n", "stream", "stream_options", "return_token_ids", "max_completion_tokens")


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
    tools: list[dict[str, Any]] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, msgspec.Meta(ge=0)] | None = None


_completion, _chat = msgspec.json.Decoder(_Completion), msgspec.json.Decoder(_Chat)
_whole = msgspec.json.Decoder(dict[str, Any])


@dataclass(frozen=True, slots=True)
class Chat:
    """A chat as it was asked for.

    Args:
        said: the parameters that are read here.
        document: the whole request, for vLLM's renderer and for its parsers.
        sampling: vLLM's parameters of a completion, without a limit to its tokens.
    """

    parameters: _Chat
    document: dict[str, Any]
    sampling: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ClientRequest:
    """A client's request. `jobs` are in the order of their choices, `n` to a prompt."""

    jobs: list[Job]
    n: int
    chat: Chat | None
    stream: bool
    usage: bool  # at the end of a stream
    logprobs: bool
    token_ids: bool


def read_completion(body: bytes | bytearray, policy: str) -> ClientRequest:
    """Read the body of `POST /v1/completions`. `policy`: the label that is to make it. Raises ApiError."""
    said = admission.decode(body, _completion, "a completion request")
    rest = _vllm_parameters(body, said, (*_UNSUPPORTED, "tool_choice", "tools"))
    rest["max_tokens"] = said.max_completion_tokens or said.max_tokens or LIMIT_DEFAULT
    prompts = [{"prompt": prompt} for prompt in _prompts(said.prompt)]
    return _client_request(said, rest, prompts, policy, said.logprobs is not None)


def read_chat(body: bytes | bytearray) -> Chat:
    """Read the body of `POST /v1/chat/completions`. Raises ApiError."""
    said = admission.decode(body, _chat, "a chat request")
    if said.top_logprobs and not said.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs to be true", "top_logprobs")
    rest = _vllm_parameters(body, said, _UNSUPPORTED)
    document = {**rest, "model": MODEL}
    if said.max_completion_tokens or said.max_tokens:
        document["max_tokens"] = said.max_completion_tokens or said.max_tokens
    sampling = {
        name: value for name, value in rest.items() if name not in _CHAT_PARAMETERS and name != "max_tokens"
    }
    if said.top_logprobs:
        sampling["logprobs"] = said.top_logprobs
    return Chat(said, document, sampling)


def from_chat(chat: Chat, prompt: list[int], sampling: dict[str, Any], policy: str) -> ClientRequest:
    """The request of a chat whose prompt is known. `sampling`: with its limit. Raises ApiError."""
    prompts = [{"prompt": prompt}]
    return _client_request(chat.parameters, sampling, prompts, policy, bool(chat.parameters.logprobs), chat)


def from_turn(chat: Chat, job: Job) -> ClientRequest:
    """The request of a turn that is made."""
    return ClientRequest(
        [job],
        1,
        chat,
        bool(chat.parameters.stream),
        _wants_usage(chat.parameters),
        bool(chat.parameters.logprobs),
        _wants_token_ids(chat.parameters),
    )


def check_turn(chat: Chat) -> None:
    """Raise ApiError for what cannot be recorded as a turn of a session."""
    if (chat.parameters.n or 1) != 1:
        raise ApiError(400, "a turn of a session has one choice: leave `n` out", "n", "unsupported_parameter")
    if chat.parameters.top_logprobs:
        message = "a session records the log-probability of each token that was made, and no others"
        raise ApiError(400, f"{message}: leave `top_logprobs` out", "top_logprobs", "unsupported_parameter")
    if chat.document.get("truncate_prompt_tokens") is not None:
        name = "truncate_prompt_tokens"
        raise ApiError(400, f"a session records whole prompts: leave `{name}` out", name, "unsupported_parameter")
    try:
        msgspec.msgpack.encode(chat.document["messages"])
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ApiError(400, f"messages that cannot be recorded: {error}", "messages") from error


def _wants_usage(said: _Common) -> bool:
    return said.stream_options is not None and bool(said.stream_options.include_usage)


def _wants_token_ids(said: _Common) -> bool:
    return bool(said.return_token_ids)


def _vllm_parameters(body: bytes | bytearray, said: _Common, refused: Sequence[str]) -> dict[str, Any]:
    """The parameters that go to vLLM as they are. Raises ApiError for those that cannot be kept."""
    if said.model is not None and said.model != MODEL:
        message = f"there is one model, `{MODEL}`, of the version in {HEADER_POLICY}, not {said.model[:40]!a}"
        raise ApiError(404, message, "model", "model_not_found")
    whole = admission.decode(body, _whole, "a JSON object")
    for name in refused:
        if whole.get(name) not in (None, False, "", [], {}, "none") and (name, whole[name]) != ("best_of", 1):
            raise ApiError(400, f"{name} is not supported", name, "unsupported_parameter")
        whole.pop(name, None)
    for name in _GATEWAY_PARAMETERS:
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
        raise ApiError(400, "the prompt is empty", "prompt")
    if len(ids) == len(prompt):
        return [ids]
    if len(texts) == len(prompt):
        return [*texts]
    if len(lists) == len(prompt):
        return [*lists]
    raise ApiError(400, "the prompt mixes text and token ids", "prompt")


def _client_request(
    said: _Common,
    rest: dict[str, Any],
    prompts: list[dict[str, Any]],
    policy: str,
    logprobs: bool,
    chat: Chat | None = None,
) -> ClientRequest:
    n, seed = said.n or 1, secrets.randbits(62) if said.seed is None else said.seed
    if n * len(prompts) > CHOICES_MAX:
        raise ApiError(400, f"{n} choices for {len(prompts)} prompts: at most {CHOICES_MAX} in all", "n")
    if seed + n > SEED_END:
        raise ApiError(400, "seed and n reach beyond 2**63", "seed")
    jobs: list[Job] = []
    for prompt in prompts:
        group, tokens, ids = _prompt_facts(prompt)
        jobs += [
            Job(
                body={**rest, **prompt, "seed": seed + i},
                policy=policy,
                group=group,
                prompt_tokens=tokens,
                keep_text=True,
                prompt_token_ids=ids,
            )
            for i in range(n)
        ]
    return ClientRequest(
        jobs=jobs,
        n=n,
        chat=chat,
        stream=bool(said.stream),
        usage=_wants_usage(said),
        logprobs=logprobs,
        token_ids=_wants_token_ids(said),
    )


def _prompt_facts(prompt: dict[str, Any]) -> tuple[Hashable, int, list[int] | None]:
    """The group of a prompt, its number of tokens or a guess, and its token ids where they are known."""
    said = prompt.get("prompt")
    if isinstance(said, list):
        return hash(tuple(said)), len(said), said
    text = said.encode() if isinstance(said, str) else msgspec.json.encode(prompt)
    return hash(text), 1 + len(text) // BYTES_A_TOKEN, None
