"""Convert chat requests to jobs: one per choice, with consecutive seeds as in vLLM."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias

import msgspec

from grpo_orch.orchestrator.gateway.job import Job
from grpo_orch.orchestrator.gateway.surface import admission
from grpo_orch.orchestrator.gateway.surface.admission import SEED_END, ApiError
from grpo_orch.policies.serving.wire import HEADER_POLICY, MODEL

CHOICES_MAX = 1024  # per request

Limit: TypeAlias = Annotated[int, msgspec.Meta(ge=1, lt=2**31)]
# With these vLLM answers in formats that are not supported here, or from more than one completion.
_UNSUPPORTED = (
    "audio",
    "continue_final_message",
    "echo",
    "function_call",
    "functions",
    "prompt_embeds",
    "prompt_logprobs",
    "top_logprobs",
    "use_beam_search",
)
# Parameters of a chat that affect only its prompt or the parsing of its answer, and OpenAI's that have no effect.
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
    "verbosity",
)
_GATEWAY_PARAMETERS = ("model", "n", "stream", "stream_options", "return_token_ids", "max_completion_tokens")


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class _Parameters(msgspec.Struct, kw_only=True):
    messages: Annotated[list[dict[str, Any]], msgspec.Meta(min_length=1)]
    tools: list[dict[str, Any]] | None = None
    logprobs: bool | None = None
    model: str | None = None
    n: Annotated[int, msgspec.Meta(ge=1, le=CHOICES_MAX)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    seed: Annotated[int, msgspec.Meta(ge=0, le=SEED_END - 1)] | None = None
    max_tokens: Limit | None = None
    max_completion_tokens: Limit | None = None
    min_tokens: Annotated[int, msgspec.Meta(ge=0, lt=2**31)] | None = None
    return_token_ids: bool | None = None


_parameters = msgspec.json.Decoder(_Parameters)
_json_object = msgspec.json.Decoder(dict[str, Any])


@dataclass(frozen=True, slots=True)
class Chat:
    """A chat request.

    Args:
        parameters: those that the gateway reads.
        document: the whole request, for vLLM's renderer and parsers.
        sampling: vLLM's completion parameters, without the token limit.
    """

    parameters: _Parameters
    document: dict[str, Any]
    sampling: dict[str, Any]


def read_chat(body: bytes | bytearray) -> Chat:
    """Read the body of `POST /v1/chat/completions`. Raises ApiError."""
    parameters = admission.decode(body, _parameters, "chat request")
    vllm_parameters = _vllm_parameters(body, parameters)
    document = {**vllm_parameters, "model": MODEL}
    if parameters.max_completion_tokens or parameters.max_tokens:
        document["max_tokens"] = parameters.max_completion_tokens or parameters.max_tokens
    sampling = {
        name: value
        for name, value in vllm_parameters.items()
        if name not in _CHAT_PARAMETERS and name != "max_tokens"
    }
    return Chat(parameters, document, sampling)


def jobs_of(chat: Chat, prompt: list[int], sampling: dict[str, Any], policy: str) -> list[Job]:
    """Return a job for each choice of a chat. `sampling` includes the token limit. Raises ApiError."""
    n, seed = chat.parameters.n or 1, chat.parameters.seed
    if seed is None:
        seed = secrets.randbits(62)
    if seed + n > SEED_END:
        raise ApiError(400, "seed + n must be at most 2**63", "seed")
    return [
        Job(
            body={**sampling, "prompt": prompt, "seed": seed + i},
            policy=policy,
            group=hash(tuple(prompt)),
        )
        for i in range(n)
    ]


def check_turn(chat: Chat) -> None:
    """Raise ApiError for a chat that cannot be recorded as a turn of a session."""
    if (chat.parameters.n or 1) != 1:
        raise ApiError(400, "a turn of a session has one choice; remove `n`", "n", "unsupported_parameter")
    if chat.document.get("truncate_prompt_tokens") is not None:
        name = "truncate_prompt_tokens"
        raise ApiError(400, f"a session records whole prompts; remove `{name}`", name, "unsupported_parameter")
    try:
        msgspec.msgpack.encode(chat.document["messages"])
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ApiError(400, f"the messages cannot be recorded: {error}", "messages") from error


def _vllm_parameters(body: bytes | bytearray, parameters: _Parameters) -> dict[str, Any]:
    """Return the parameters that are passed on to vLLM. Raises ApiError for unsupported ones."""
    if parameters.model is not None and parameters.model != MODEL:
        message = f"the only model is `{MODEL}`, of the version in {HEADER_POLICY}, not {parameters.model[:40]!a}"
        raise ApiError(404, message, "model", "model_not_found")
    document = admission.decode(body, _json_object, "JSON object")
    for name in _UNSUPPORTED:
        if document.get(name) not in (None, False, "", [], {}, "none"):
            raise ApiError(400, f"{name} is not supported", name, "unsupported_parameter")
        document.pop(name, None)
    for name in _GATEWAY_PARAMETERS:
        document.pop(name, None)
    return document
