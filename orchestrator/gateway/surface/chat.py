"""Chats: their requests, and the translation between messages and tokens by a member's vLLM.

A chat has one job per choice, with consecutive seeds as in vLLM. The gateway has no tokenizer, chat template or
parser. vLLM's `/render` and `/derender` have them, need no weights, and give the same result on every member.
"""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias, TypeVar

import msgspec
import structlog

from grpo_orch.orchestrator.gateway.job import VLLM_DEFAULT_TOKENS, Finished, Job
from grpo_orch.orchestrator.gateway.nodes.upstream import RETRYABLE, EngineError, NodeFailed, Token
from grpo_orch.orchestrator.gateway.routing.gateway_members import Members
from grpo_orch.orchestrator.gateway.surface import admission
from grpo_orch.orchestrator.gateway.surface.admission import SEED_END, ApiError
from grpo_orch.policies.serving.wire import DERENDER, HEADER_POLICY, MODEL, RENDER

INVALID_RESPONSES_MAX = 5  # from any members; another version of vLLM would never send a valid one
# Responses with status 500. No engine takes part, so the chat is at fault, such as one on which the template
# fails. 502 to 504 mean that the server is down for now.
SERVER_ERRORS_MAX = 3
RETRY_S = 0.2  # after all members have failed
AVOID_S = 60.0  # how long a member that failed is tried last; it may take REQUEST_TIMEOUT_S to fail again
REFUSAL_SIZE_MAX = 2000
log = structlog.get_logger()
_encode = msgspec.json.Encoder().encode
T = TypeVar("T")

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


class _Sampling(msgspec.Struct):
    # vLLM omits parameters that have its defaults.
    max_tokens: Annotated[int, msgspec.Meta(ge=0, lt=2**31)] = VLLM_DEFAULT_TOKENS
    structured_outputs: dict[str, Any] | None = None
    stop_token_ids: list[int] | None = None


class _Rendered(msgspec.Struct):
    token_ids: list[Token]
    sampling_params: _Sampling
    features: dict[str, Any] | None = None


class _Message(msgspec.Struct):
    role: str = "assistant"
    content: str | None = None
    reasoning: str | None = None
    tool_calls: list[dict[str, Any]] = []


class _Choice(msgspec.Struct):
    message: _Message
    logprobs: dict[str, Any] | None = None


class _Derendered(msgspec.Struct):
    choices: Annotated[list[_Choice], msgspec.Meta(min_length=1, max_length=1)]


class _Errors(msgspec.Struct):
    error: EngineError


_rendered, _derendered = msgspec.json.Decoder(_Rendered), msgspec.json.Decoder(_Derendered)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A chat's prompt.

    Args:
        token_ids: of all messages, up to the beginning of the answer.
        max_tokens: the answer's limit: the chat's own, or what the model's context leaves.
        sampling: vLLM's parameters that follow from the chat: the answer's grammar and stop tokens.
    """

    token_ids: list[int]
    max_tokens: int
    sampling: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Answer:
    """The model's answer in OpenAI's format: a message, and log-probabilities if requested."""

    message: dict[str, Any]
    finish_reason: str
    logprobs: dict[str, Any] | None = None


class Translator:
    """Lets the members render and parse chats, retrying until one answers."""

    def __init__(self, members: Members) -> None:
        self._members = members
        self._failed: dict[str, float] = {}  # when each member last failed

    async def prompt(self, chat: Chat) -> Prompt:
        """Return a chat's prompt, waiting while there are no members. Raises ApiError for an invalid chat."""
        rendered = await self._render(chat.document)
        if rendered.features is not None:
            raise ApiError(400, "only text messages are supported, no images or audio", "messages")
        params = rendered.sampling_params
        grammar = {
            name: value for name, value in (params.structured_outputs or {}).items() if _is_set(name, value)
        }
        sampling: dict[str, Any] = {"structured_outputs": grammar} if grammar else {}
        if params.stop_token_ids:
            sampling["stop_token_ids"] = params.stop_token_ids
        return Prompt(rendered.token_ids, params.max_tokens, sampling)

    async def tokens(self, chat: Chat, messages: list[dict[str, Any]]) -> list[int]:
        """Return the tokens of other messages under the chat's template, without the answer's beginning.

        Raises ApiError.
        """
        document = {**chat.document, "messages": messages, "add_generation_prompt": False}
        return (await self._render(document)).token_ids

    async def answer(self, chat: Chat, got: Finished) -> Answer:
        """Parse an answer's tokens into a message. Raises ApiError."""
        # vLLM's parsers do not get the token that ended the answer, as in its own server.
        ended = got.finish_reason == "stop" and not isinstance(got.stop_reason, str)
        token_ids = got.token_ids[:-1] if ended else got.token_ids
        if not token_ids:
            return Answer(
                {"role": "assistant", "content": ""},
                got.finish_reason,
                {"content": []} if chat.parameters.logprobs else None,
            )
        choice: dict[str, Any] = {"index": 0, "token_ids": token_ids, "finish_reason": got.finish_reason}
        if chat.parameters.logprobs:
            content = zip(got.token_ids, got.logprobs, strict=True)
            choice["logprobs"] = {"content": [{"token_id": token, "logprob": value} for token, value in content]}
        document = {
            "model": MODEL,
            "generate_response": {
                "request_id": "answer",
                "choices": [choice],
                "prompt_token_ids": list(got.job.prompt),
            },
            "chat_request": chat.document,
        }
        [derendered] = (await self._request(DERENDER, document, _derendered)).choices
        parsed = derendered.message
        message: dict[str, Any] = {"role": "assistant", "content": parsed.content}
        if isinstance(got.stop_reason, str) and parsed.content:
            message["content"] = parsed.content.partition(got.stop_reason)[0]
        if parsed.reasoning is not None:
            message["reasoning"] = parsed.reasoning
        if parsed.tool_calls:
            message["tool_calls"] = parsed.tool_calls
        calls_tools = parsed.tool_calls and got.finish_reason == "stop"
        return Answer(message, "tool_calls" if calls_tools else got.finish_reason, derendered.logprobs)

    async def _render(self, document: dict[str, Any]) -> _Rendered:
        return await self._request(RENDER, document, _rendered)

    async def _request(self, path: str, document: dict[str, Any], decoder: msgspec.json.Decoder[T]) -> T:
        """Return the first valid response of any member. Raises ApiError if vLLM rejects the chat."""
        try:
            body = _encode(document)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise ApiError(400, f"the chat cannot be encoded for a node: {error}") from error
        now = asyncio.get_running_loop().time
        self._failed = {node: at_s for node, at_s in self._failed.items() if now() - at_s < AVOID_S}
        failed, has_paused = set(self._failed), False
        invalid_responses, server_errors = 0, 0
        while True:
            link = await self._members.any_link_except(failed)
            if link is None:
                failed.clear()
                await asyncio.sleep(RETRY_S if has_paused else 0.0)
                has_paused = True
                continue
            try:
                status, response = await link.request(path, body)
                if status == 200:
                    decoded = decoder.decode(response)
                    self._failed.pop(link.node, None)
                    return decoded
            except NodeFailed:
                status = 0
            except (msgspec.MsgspecError, ValueError, RecursionError) as error:
                status, invalid_responses = 0, invalid_responses + 1
                log.warning(
                    "chat_response_invalid", node=link.node, path=path, error=str(error)[:REFUSAL_SIZE_MAX]
                )
                if invalid_responses == INVALID_RESPONSES_MAX:
                    raise ApiError(502, f"{link.node} sent an invalid response to {path}: {error}") from error
            if 400 <= status < 500 and status not in RETRYABLE:
                raise ApiError(status, _error_message(response))
            if status == 500:
                server_errors += 1
                if server_errors == SERVER_ERRORS_MAX:
                    raise ApiError(422, f"the nodes fail on this chat: {_error_message(response)}")
            failed.add(link.node)
            self._failed[link.node] = now()


def _is_set(name: str, value: Any) -> bool:
    return not name.startswith("_") and value not in (None, False)


def _error_message(response: bytes) -> str:
    try:
        return msgspec.json.decode(response, type=_Errors).error.message[:REFUSAL_SIZE_MAX]
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return response[:REFUSAL_SIZE_MAX].decode(errors="replace")
