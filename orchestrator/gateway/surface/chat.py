"""Chats as tokens: any member's vLLM renders messages into a prompt and parses an answer into a message.

The gateway has no tokenizer, no chat template and no parser. vLLM's `/render` and `/derender` have them all,
need no weights, and give the same at every member.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import msgspec
import structlog

from orchestrator.gateway.job import VLLM_DEFAULT_TOKENS, Finished
from orchestrator.gateway.nodes.attempt import NodeFailed
from orchestrator.gateway.nodes.upstream import RETRYABLE
from orchestrator.gateway.routing.members import Members
from orchestrator.gateway.surface.admission import ApiError
from orchestrator.gateway.surface.openai_request import Chat, Token
from policies.serving.wire import DERENDER, MODEL, RENDER

INVALID_RESPONSES_MAX = 5  # answers that make no sense, from any members: another version of vLLM gives them all
# Answers of 500: no engine takes part, so the chat is at fault, as where a template fails over it. 502 to 504 are
# a server that is not there, and pass.
SERVER_ERRORS_MAX = 3
RETRY_S = 0.2  # after every member has failed at it
AVOID_S = 60.0  # that one is asked last after it has failed: it may take ASK_S to fail again
REFUSAL_SIZE_MAX = 2000
log = structlog.get_logger()
_encode = msgspec.json.Encoder().encode
T = TypeVar("T")


class _Sampling(msgspec.Struct):
    # vLLM leaves out what is its default.
    max_tokens: Annotated[int, msgspec.Meta(ge=0, lt=2**31)] = VLLM_DEFAULT_TOKENS
    structured_outputs: dict[str, Any] | None = None
    stop_token_ids: list[int] | None = None


class _Rendered(msgspec.Struct):
    token_ids: list[Token]
    sampling_params: _Sampling
    features: dict[str, Any] | None = None
    reasoning_parser_kwargs: dict[str, Any] | None = None


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


class _Error(msgspec.Struct):
    message: str = ""


class _Errors(msgspec.Struct):
    error: _Error


_rendered, _derendered = msgspec.json.Decoder(_Rendered), msgspec.json.Decoder(_Derendered)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A chat's prompt.

    Args:
        token_ids: of all messages, up to where the answer begins.
        max_tokens: that the answer may get: as many as the chat asks for, or as the model's context has room for.
        sampling: vLLM's parameters that follow from the chat: of a grammar for its answer, of where it stops.
        is_parsed: whether the answer's text is more than a message's content.
    """

    token_ids: list[int]
    max_tokens: int
    sampling: dict[str, Any]
    is_parsed: bool


@dataclass(frozen=True, slots=True)
class Answer:
    """What the model said, in OpenAI's form: a message, and the log-probabilities where they were asked for."""

    message: dict[str, Any]
    finish_reason: str
    logprobs: dict[str, Any] | None = None


class Translator:
    """Has chats rendered and parsed by the members, whichever answers."""

    def __init__(self, members: Members) -> None:
        self._members = members
        self._failed: dict[str, float] = {}  # members, and when they last did

    async def prompt(self, chat: Chat) -> Prompt:
        """Return the prompt of a chat, however long there is no member. Raises ApiError for one that has none."""
        found = await self._render(chat.document)
        if found.features is not None:
            raise ApiError(400, "messages are text: images and sound are not supported", "messages")
        params = found.sampling_params
        limits = {name: value for name, value in (params.structured_outputs or {}).items() if _is_set(name, value)}
        sampling: dict[str, Any] = {"structured_outputs": limits} if limits else {}
        if params.stop_token_ids:
            sampling["stop_token_ids"] = params.stop_token_ids
        is_parsed = bool(chat.parameters.tools) or found.reasoning_parser_kwargs is not None
        return Prompt(found.token_ids, params.max_tokens, sampling, is_parsed)

    async def tokens(self, chat: Chat, messages: list[dict[str, Any]]) -> list[int]:
        """Return the tokens of other messages under the same chat's template, without the beginning of an answer.

        Raises ApiError.
        """
        document = {**chat.document, "messages": messages, "add_generation_prompt": False}
        return (await self._render(document)).token_ids

    async def answer(self, chat: Chat, prompt: list[int], got: Finished) -> Answer:
        """Return the message that an answer's tokens are. Raises ApiError."""
        # As its engine does, vLLM's parsers do not see the token that ended the answer.
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
            choice["logprobs"] = {"content": [{"token_id": one, "logprob": value} for one, value in content]}
        asked = {
            "model": MODEL,
            "generate_response": {"request_id": "answer", "choices": [choice], "prompt_token_ids": prompt},
            "chat_request": chat.document,
        }
        [found] = (await self._request(DERENDER, asked, _derendered)).choices
        message: dict[str, Any] = {"role": "assistant", "content": found.message.content}
        if isinstance(got.stop_reason, str) and found.message.content:
            message["content"] = found.message.content.partition(got.stop_reason)[0]
        if found.message.reasoning is not None:
            message["reasoning"] = found.message.reasoning
        if found.message.tool_calls:
            message["tool_calls"] = found.message.tool_calls
        calls = found.message.tool_calls and got.finish_reason == "stop"
        return Answer(message, "tool_calls" if calls else got.finish_reason, found.logprobs)

    async def _render(self, document: dict[str, Any]) -> _Rendered:
        return await self._request(RENDER, document, _rendered)

    async def _request(self, path: str, document: dict[str, Any], decoder: msgspec.json.Decoder[T]) -> T:
        """What the first member answers that does. Raises ApiError for what vLLM finds wrong with the chat."""
        try:
            body = _encode(document)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise ApiError(400, f"it cannot be sent to a node: {error}") from error
        now = asyncio.get_running_loop().time
        self._failed = {node: at_s for node, at_s in self._failed.items() if now() - at_s < AVOID_S}
        failed, again, invalid_responses, server_errors = set(self._failed), False, 0, 0
        while True:
            link = await self._members.any_link_except(failed)
            if link is None:
                failed.clear()
                await asyncio.sleep(RETRY_S if again else 0.0)
                again = True
                continue
            try:
                status, said = await link.request(path, body)
                if status == 200:
                    found = decoder.decode(said)
                    self._failed.pop(link.node, None)
                    return found
            except NodeFailed:
                status = 0
            except (msgspec.MsgspecError, ValueError, RecursionError) as error:
                status, invalid_responses = 0, invalid_responses + 1
                log.warning(
                    "chat_response_invalid", node=link.node, path=path, error=str(error)[:REFUSAL_SIZE_MAX]
                )
                if invalid_responses == INVALID_RESPONSES_MAX:
                    raise ApiError(502, f"{link.node} answered {path} with what is no answer: {error}") from error
            if 400 <= status < 500 and status not in RETRYABLE:
                raise ApiError(status, _why(said))
            if status == 500:
                server_errors += 1
                if server_errors == SERVER_ERRORS_MAX:
                    raise ApiError(422, f"no node can read the chat: {_why(said)}")
            failed.add(link.node)
            self._failed[link.node] = now()


def _is_set(name: str, value: Any) -> bool:
    return not name.startswith("_") and value not in (None, False)


def _why(said: bytes) -> str:
    try:
        return msgspec.json.decode(said, type=_Errors).error.message[:REFUSAL_SIZE_MAX]
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return said[:REFUSAL_SIZE_MAX].decode(errors="replace")
