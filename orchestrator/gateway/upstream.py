"""One completion from one vLLM, streamed: tokens are counted as they come, and a cut is seen at the token it came.

Only `/v1/completions` events are known here. Whatever keeps the node from finishing is NodeFailed, and the request
may be made elsewhere with the same seed; what vLLM finds wrong with the request itself is RequestRefused.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec

from policies.wire import HEADER_BOOT, HEADER_POLICY, CompletionRequest

# A request may wait in vLLM's queue and then for its prompt to be computed before its first token comes. A node
# that is gone is known from its silence long before; these limits are for a server that hangs beside a living
# agent.
FIRST_TOKEN_S = 120.0
NEXT_TOKEN_S = 60.0
CONNECT_S = 3.0

# Ours to set: whoever asks for a batch may not.
RESERVED = frozenset({"model", "prompt", "seed", "stream", "stream_options", "n", "logprobs", "return_token_ids"})
MODEL = "policy"  # the name under which every node serves
_UNFINISHED = frozenset({"abort", "error"})
_RETRYABLE = frozenset({401, 404, 408, 409, 425, 429})  # the node's fault or a passing one, although 4xx


class NodeFailed(Exception):
    """The node did not finish the request; another one may."""


class RequestRefused(Exception):
    """The request cannot be served by any node."""


class _LogProbs(msgspec.Struct):
    token_logprobs: list[float | None] = []


class _Choice(msgspec.Struct):
    token_ids: list[int] | None = None
    logprobs: _LogProbs | None = None
    finish_reason: str | None = None


class _Error(msgspec.Struct):
    message: str = ""
    code: int = 500


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    error: _Error | None = None


_events = msgspec.json.Decoder(_Event)


@dataclass(frozen=True, slots=True)
class Answer:
    """A finished completion."""

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str


async def complete(
    session: aiohttp.ClientSession,
    url: str,
    headers: dict[str, str],
    body: dict[str, Any],
    arrived: Callable[[int], None],
) -> Answer:
    """Return the whole completion, telling `arrived` the number of tokens of each event.

    Raises NodeFailed, RequestRefused. Leaving early, by an error or a cancellation, closes the connection, which
    makes vLLM abort the request.
    """
    try:
        async with (
            asyncio.timeout(FIRST_TOKEN_S) as limit,
            session.post(url, json=body, headers=headers) as response,
        ):
            try:
                await _check(response)
                return await _collect(response, arrived, limit)
            except BaseException:
                response.close()
                raise
    except (aiohttp.ClientError, OSError) as error:
        raise NodeFailed(f"connection: {str(error) or type(error).__name__}") from error
    except TimeoutError as error:
        raise NodeFailed("it was silent for too long") from error


def body_of(request: CompletionRequest, sampling: dict[str, Any]) -> dict[str, Any]:
    """vLLM's request for one completion: token ids in, token ids and their log-probabilities out."""
    return {
        **sampling,
        "model": MODEL,
        "prompt": request.prompt_token_ids,
        "seed": request.seed,
        "stream": True,
        "n": 1,
        "logprobs": 0,  # of the sampled token alone
        "return_token_ids": True,
    }


def headers_of(token: str, boot_id: str, policy: str) -> dict[str, str]:
    """What a node demands before it answers: see `policies.wire`."""
    return {"Authorization": f"Bearer {token}", HEADER_BOOT: boot_id, HEADER_POLICY: policy}


async def _check(response: aiohttp.ClientResponse) -> None:
    if response.status == 200:
        return
    said = (await response.content.read(2000)).decode(errors="replace")
    if 400 <= response.status < 500 and response.status not in _RETRYABLE:
        raise RequestRefused(f"vLLM answered {response.status}: {said}")
    raise NodeFailed(f"it answered {response.status}: {said[:200]}")


async def _collect(
    response: aiohttp.ClientResponse, arrived: Callable[[int], None], limit: asyncio.Timeout
) -> Answer:
    loop = asyncio.get_running_loop()
    token_ids: list[int] = []
    logprobs: list[float] = []
    finish_reason: str | None = None
    async for data in _data(response):
        limit.reschedule(loop.time() + NEXT_TOKEN_S)
        event = _decode(data)
        for choice in event.choices:
            new = choice.token_ids or []
            token_ids += new
            logprobs += _logprobs(choice, len(new))
            arrived(len(new))
            finish_reason = choice.finish_reason or finish_reason
    if finish_reason is None or finish_reason in _UNFINISHED:
        raise NodeFailed(f"it stopped after {len(token_ids)} tokens, {finish_reason or 'without saying why'}")
    return Answer(token_ids, logprobs, finish_reason)


def _decode(data: bytes) -> _Event:
    try:
        event = _events.decode(data)
    except msgspec.DecodeError as error:
        raise NodeFailed(f"it sent {data[:80]!r}: {error}") from error
    if event.error is not None:
        if 400 <= event.error.code < 500 and event.error.code not in _RETRYABLE:
            raise RequestRefused(f"vLLM said {event.error.code}: {event.error.message}")
        raise NodeFailed(f"it said {event.error.code}: {event.error.message}")
    return event


def _logprobs(choice: _Choice, tokens: int) -> list[float]:
    found = [] if choice.logprobs is None else choice.logprobs.token_logprobs
    if len(found) != tokens:
        raise NodeFailed(f"it sent {tokens} tokens with {len(found)} log-probabilities")
    if None in found:
        # vLLM's JSON has no NaN. Every node with these weights would say the same.
        raise RequestRefused("vLLM's log-probabilities are not numbers; the policy's weights may hold NaN")
    return [value for value in found if value is not None]


async def _data(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Yield the payload of each server-sent event. Reads to the end, so that the connection can be used again."""
    rest = b""
    while chunk := await response.content.readany():
        *events, rest = (rest + chunk).split(b"\n\n")
        for event in events:
            if event.startswith(b"data: ") and event != b"data: [DONE]":
                yield event[6:]
