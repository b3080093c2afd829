"""Convert OpenAI requests to jobs: one per choice, with consecutive seeds as in vLLM."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias

import msgspec

from grpo_orch.orchestrator.gateway.job import Job
from grpo_orch.orchestrator.gateway.nodes.upstream import Token
from grpo_orch.orchestrator.gateway.surface import admission
from grpo_orch.orchestrator.gateway.surface.admission import SEED_END, ApiError
from grpo_orch.policies.serving.wire import HEADER_POLICY, MODEL

CHOICES_MAX = 1024  # per request: its prompts times `n`
LIMIT_DEFAULT = 16  # tokens of a completion, as in OpenAI and vLLM
BYTES_PER_TOKEN = 4  # estimate for text, whose tokens only a node can count

Limit: TypeAlias = Annotated[int, msgspec.Meta(ge=1, lt=2**31)]
# With these vLLM answers in formats that are not supported here, or from more than one completion.
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
_json_object = msgspec.json.Decoder(dict[str, Any])


@dataclass(frozen=True, slots=True)
class Chat:
    """A chat request.

    Args:
        parameters: those that the gateway reads.
        document: the whole request, for vLLM's renderer and parsers.
        sampling: vLLM's completion parameters, without the token limit.
    """

    parameters: _Chat
    document: dict[str, Any]
    sampling: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ClientRequest:
    """A client's request. `jobs` are in the order of their choices, `n` per prompt."""

    jobs: list[Job]
    parameters: _Completion | _Chat
    chat: Chat | None = None

    @property
    def n(self) -> int:
        """Number of choices per prompt."""
        return self.parameters.n or 1

    @property
    def stream(self) -> bool:
        """Whether the answer is a stream of events."""
        return bool(self.parameters.stream)

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with token counts."""
        options = self.parameters.stream_options
        return options is not None and bool(options.include_usage)

    @property
    def has_logprobs(self) -> bool:
        """Whether the answer has log-probabilities. 0 requests those of the generated tokens alone."""
        return self.parameters.logprobs is not None and self.parameters.logprobs is not False

    @property
    def include_token_ids(self) -> bool:
        """Whether the answer has token ids."""
        return bool(self.parameters.return_token_ids)


def read_completion(body: bytes | bytearray, policy: str) -> ClientRequest:
    """Read the body of `POST /v1/completions`. `policy` is the label of the version to use. Raises ApiError."""
    parameters = admission.decode(body, _completion, "completion request")
    sampling = _vllm_parameters(body, parameters, (*_UNSUPPORTED, "tool_choice", "tools"))
    sampling["max_tokens"] = parameters.max_completion_tokens or parameters.max_tokens or LIMIT_DEFAULT
    return ClientRequest(_jobs(parameters, sampling, _prompts(parameters.prompt), policy), parameters)


def read_chat(body: bytes | bytearray) -> Chat:
    """Read the body of `POST /v1/chat/completions`. Raises ApiError."""
    parameters = admission.decode(body, _chat, "chat request")
    if parameters.top_logprobs and not parameters.logprobs:
        raise ApiError(400, "top_logprobs requires logprobs to be true", "top_logprobs")
    vllm_parameters = _vllm_parameters(body, parameters, _UNSUPPORTED)
    document = {**vllm_parameters, "model": MODEL}
    if parameters.max_completion_tokens or parameters.max_tokens:
        document["max_tokens"] = parameters.max_completion_tokens or parameters.max_tokens
    sampling = {
        name: value
        for name, value in vllm_parameters.items()
        if name not in _CHAT_PARAMETERS and name != "max_tokens"
    }
    if parameters.top_logprobs:
        sampling["logprobs"] = parameters.top_logprobs
    return Chat(parameters, document, sampling)


def from_chat(chat: Chat, prompt: list[int], sampling: dict[str, Any], policy: str) -> ClientRequest:
    """Return the request of a chat whose prompt is known. `sampling` includes the limit. Raises ApiError."""
    return ClientRequest(_jobs(chat.parameters, sampling, [prompt], policy), chat.parameters, chat)


def check_turn(chat: Chat) -> None:
    """Raise ApiError for a chat that cannot be recorded as a turn of a session."""
    if (chat.parameters.n or 1) != 1:
        raise ApiError(400, "a turn of a session has one choice; remove `n`", "n", "unsupported_parameter")
    if chat.parameters.top_logprobs:
        message = "a session records log-probabilities of generated tokens only; remove `top_logprobs`"
        raise ApiError(400, message, "top_logprobs", "unsupported_parameter")
    if chat.document.get("truncate_prompt_tokens") is not None:
        name = "truncate_prompt_tokens"
        raise ApiError(400, f"a session records whole prompts; remove `{name}`", name, "unsupported_parameter")
    try:
        msgspec.msgpack.encode(chat.document["messages"])
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ApiError(400, f"the messages cannot be recorded: {error}", "messages") from error


def _vllm_parameters(body: bytes | bytearray, parameters: _Common, unsupported: Sequence[str]) -> dict[str, Any]:
    """Return the parameters that are passed on to vLLM. Raises ApiError for unsupported ones."""
    if parameters.model is not None and parameters.model != MODEL:
        message = f"the only model is `{MODEL}`, of the version in {HEADER_POLICY}, not {parameters.model[:40]!a}"
        raise ApiError(404, message, "model", "model_not_found")
    document = admission.decode(body, _json_object, "JSON object")
    for name in unsupported:
        if document.get(name) not in (None, False, "", [], {}, "none") and (name, document[name]) != (
            "best_of",
            1,
        ):
            raise ApiError(400, f"{name} is not supported", name, "unsupported_parameter")
        document.pop(name, None)
    for name in _GATEWAY_PARAMETERS:
        document.pop(name, None)
    return document


def _prompts(prompt: str | list[int | str | list[int]]) -> Sequence[str | list[int]]:
    """Return the prompts of a request, which has one or several, each text or token ids. Raises ApiError."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt or [] in prompt:
        raise ApiError(400, "the prompt is empty", "prompt")
    ids = [item for item in prompt if isinstance(item, int)]
    others = [item for item in prompt if not isinstance(item, int)]
    if len({type(item) for item in prompt}) > 1:
        raise ApiError(400, "the prompt mixes text and token ids", "prompt")
    return others or [ids]


def _jobs(
    parameters: _Common, sampling: dict[str, Any], prompts: Sequence[str | list[int]], policy: str
) -> list[Job]:
    """Return a job for each choice of each prompt. Raises ApiError."""
    n, seed = parameters.n or 1, secrets.randbits(62) if parameters.seed is None else parameters.seed
    if n * len(prompts) > CHOICES_MAX:
        raise ApiError(400, f"{n} choices for {len(prompts)} prompts exceed the limit of {CHOICES_MAX}", "n")
    if seed + n > SEED_END:
        raise ApiError(400, "seed + n must be at most 2**63", "seed")
    jobs: list[Job] = []
    for prompt in prompts:
        ids = None if isinstance(prompt, str) else prompt
        tokens = 1 + len(prompt.encode()) // BYTES_PER_TOKEN if isinstance(prompt, str) else len(prompt)
        group = hash(prompt if ids is None else tuple(ids))
        jobs += [
            Job(
                body={**sampling, "prompt": prompt, "seed": seed + i},
                policy=policy,
                group=group,
                prompt_tokens=tokens,
                keep_text=True,
                prompt_token_ids=ids,
            )
            for i in range(n)
        ]
    return jobs
