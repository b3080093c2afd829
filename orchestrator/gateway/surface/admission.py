"""Request limits: size, time and validity.

Violations raise ApiError, which becomes a response with one line of text. A sender that has the run's secret may
still send invalid data, by mistake or on purpose.
"""

from __future__ import annotations

import asyncio
import math
import re
from array import array
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import TypeVar

import msgspec
from aiohttp import hdrs, web

from grpo_orch.orchestrator.gateway.nodes.upstream import RESERVED
from grpo_orch.orchestrator.gateway.time_slices import TimeSlices
from grpo_orch.policies.model.vocabulary import PolicyVersion
from grpo_orch.policies.serving.joining import Stage
from grpo_orch.policies.serving.wire import (
    HEADER_OPENING,
    Announce,
    Batch,
    OpenSession,
    PolicyRef,
    PromptLine,
    Sample,
)

T = TypeVar("T")
_batch, _prompt_line = msgspec.json.Decoder(Batch), msgspec.json.Decoder(PromptLine)

BATCH_SIZE_MAX = 512 * 1024 * 1024  # 4,096 prompts of 16,384 tokens are 450 MB of JSON
BATCH_LINE_SIZE_MAX = 8 * 1024 * 1024  # one prompt of a million tokens
OPENAI_SIZE_MAX = 32 * 1024 * 1024  # a million tokens as ids are 7 MB
ANNOUNCE_SIZE_MAX = 64 * 1024
# A body must arrive within this, plus one second per MiB.
BODY_S = 30.0
REQUESTS_MAX = 65_536  # in a batch; each is a task and a place in the queue
NUMBER_END = 2**63
SEED_END = NUMBER_END  # vLLM's seeds are signed 64-bit numbers
NAME_SIZE_MAX = 200
LINE_SIZE_MAX = 1000  # of an agent's messages
# Names go into headers, logs and metrics.
_NAME = re.compile(rf"[A-Za-z0-9@._:+-]{{1,{NAME_SIZE_MAX}}}")
_ADDRESS = re.compile(r"([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):(\d{1,5})")


class ApiError(Exception):
    """The response is an error.

    Args:
        status: the HTTP status.
        message: one line.
        param: the parameter at fault, if any.
        code: OpenAI's error code, if any.
    """

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(" ".join(message.split()))
        self.status = status
        self.param = param
        self.code = code


async def read(request: web.Request, size_max: int) -> bytearray:
    """Return the body. Raises ApiError if it is too large, too slow or compressed."""
    body = bytearray()
    async for piece in _pieces(request, size_max):
        body += piece
    return body


async def read_json(request: web.Request, decoder: msgspec.json.Decoder[T], name: str) -> T:
    """Read and decode a small body. `name` is what the sender should have sent, for the error. Raises ApiError."""
    return decode(await read(request, ANNOUNCE_SIZE_MAX), decoder, name)


async def _pieces(request: web.Request, size_max: int) -> AsyncIterator[bytes]:
    if request.headers.get(hdrs.CONTENT_ENCODING, "identity") != "identity":
        raise ApiError(415, "compressed bodies are not supported")
    length = request.content_length
    if length is not None and length > size_max:
        raise ApiError(413, f"the body has {length} bytes; the limit is {size_max}")
    size, limit_s = 0, BODY_S + (size_max if length is None else length) / 2**20
    deadline_s = asyncio.get_running_loop().time() + limit_s
    try:
        while True:
            async with asyncio.timeout_at(deadline_s):
                piece = await request.content.readany()
            if not piece:
                return
            size += len(piece)
            if size > size_max:
                raise ApiError(413, f"the body exceeds the limit of {size_max} bytes")
            yield piece
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {limit_s:.0f} s") from None
    except web.RequestPayloadError as error:
        raise ApiError(400, f"the body does not match the headers: {error}") from error


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt of a batch, at 4 bytes a token, and the samples requested of it."""

    token_ids: array[int]
    samples: list[Sample]


async def read_batch(request: web.Request, time_slices: TimeSlices) -> tuple[Batch, list[Prompt]]:
    """Read a batch and the prompts of its lines, without keeping the text. Raises ApiError."""
    batch, prompts, seen = None, list[Prompt](), set[int]()
    async with aclosing(_lines(request)) as lines:
        async for line in lines:
            await time_slices.take()
            if batch is None:
                batch = decode(line, _batch, "batch")
                check_batch(batch)
                for item in batch.requests:
                    prompts.append(_prompt(item.prompt_token_ids, [Sample(item.index, item.seed)], seen))
            elif line:
                prompt = decode(line, _prompt_line, "prompt line")
                prompts.append(_prompt(prompt.prompt_token_ids, prompt.samples, seen))
    assert batch is not None
    return batch, prompts


async def _lines(request: web.Request) -> AsyncGenerator[bytes, None]:
    rest = bytearray()
    async for piece in _pieces(request, BATCH_SIZE_MAX):
        rest += piece
        if b"\n" in piece:
            *lines, last = rest.split(b"\n")
            rest = last
            for line in lines:
                yield bytes(line)
        if len(rest) > BATCH_LINE_SIZE_MAX:
            raise ApiError(413, f"a line exceeds the limit of {BATCH_LINE_SIZE_MAX} bytes")
    yield bytes(rest)


def _prompt(token_ids: list[int], samples: list[Sample], seen: set[int]) -> Prompt:
    """Check and pack one prompt. Adds its indexes to `seen`, those of the batch so far. Raises ApiError."""
    for sample in samples:
        if not 0 <= sample.index < NUMBER_END:
            raise ApiError(400, f"index must be in [0, 2**63), not {sample.index}")
        if sample.index in seen:
            raise ApiError(400, f"two requests have index {sample.index}")
        if not token_ids:
            raise ApiError(400, f"request {sample.index}: the prompt is empty")
        if not 0 <= sample.seed < SEED_END:
            raise ApiError(400, f"request {sample.index}: seed must be in [0, 2**63), not {sample.seed}")
        seen.add(sample.index)
    if len(seen) > REQUESTS_MAX:
        raise ApiError(400, f"a batch may have at most {REQUESTS_MAX} requests")
    try:
        return Prompt(array("I", token_ids), samples)
    except OverflowError:
        raise ApiError(400, "prompt_token_ids must be in [0, 2**32)") from None


def decode(body: bytes | bytearray, decoder: msgspec.json.Decoder[T], name: str) -> T:
    """Decode JSON. `name` is what the sender should have sent, for the error. Raises ApiError."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        field = re.search(r" - at `\$\.([a-z_]+)", str(error))
        raise ApiError(400, f"invalid {name}: {error}", field and field[1]) from error
    except RecursionError:
        raise ApiError(400, f"invalid {name}: nested too deeply") from None
    except (msgspec.DecodeError, ValueError) as error:
        raise ApiError(400, f"invalid {name}: {error}") from error


def name_of(field: str, text: str) -> str:
    """Return the text if it is a valid name. Raises ApiError."""
    if not _NAME.fullmatch(text):
        raise ApiError(
            400, f"{field} must be 1 to {NAME_SIZE_MAX} characters of A-Za-z0-9@._:+-, not {_shown(text)}"
        )
    return text


def opening_of(request: web.Request) -> str:
    """Return which opening of its session a request names, if any. Raises ApiError."""
    header = request.headers.get(HEADER_OPENING)
    return "" if header is None else name_of(HEADER_OPENING, header)


def check_announce(announcement: Announce) -> None:
    """Raise ApiError for an invalid announcement."""
    name_of("boot_id", announcement.boot_id)
    if announcement.policy is not None:
        name_of("policy", announcement.policy)
    _check_address(announcement.address)
    _check_line("unfit", announcement.unfit)
    _check_counts(1, max_requests=announcement.max_requests, engines=announcement.engines)
    _check_counts(0, kv_tokens=announcement.kv_tokens)
    if (engine := announcement.engine) is not None:
        _check_counts(0, running=engine.running, waiting=engine.waiting, tokens=engine.tokens)
        _check_counts(0, preemptions=engine.preemptions)
        if not 0.0 <= engine.kv_usage <= 1.0:
            raise ApiError(400, f"kv_usage must be in [0, 1], not {engine.kv_usage}")
    if (stages := announcement.stages) is not None:
        _check_counts(0, fetch_s=stages.fetch_s, load_s=stages.load_s, fetched_bytes=stages.fetched_bytes)
    if announcement.stage is not None:
        check_stage(announcement.stage)


def check_stage(stage: Stage) -> None:
    """Raise ApiError for an invalid stage."""
    _check_line("name", stage.name)
    _check_counts(0, done_bytes=stage.done_bytes, total_bytes=stage.total_bytes)


def _check_line(name: str, text: str) -> None:
    if len(text) > LINE_SIZE_MAX or not text.isprintable():
        raise ApiError(400, f"{name} must be one printable line of at most {LINE_SIZE_MAX} characters")


def _check_counts(least: int, /, **counts: float) -> None:
    for name, count in counts.items():
        if not least <= count < NUMBER_END:
            raise ApiError(400, f"{_shown(name)} must be at least {least} and below 2**63, not {count}")


def _check_address(address: str) -> None:
    """Raise ApiError unless the address is HOST:PORT."""
    match = _ADDRESS.fullmatch(address)
    if match is None or not 0 < int(match[2]) < 2**16:
        raise ApiError(400, f"address must be HOST:PORT, not {_shown(address)}")


def check_batch(batch: Batch) -> None:
    """Raise ApiError for an invalid batch. Its prompts are checked as they arrive."""
    _check_policy(batch.policy)
    _check_sampling(batch.sampling)
    if not (math.isfinite(batch.deadline_s) and batch.deadline_s > 0):
        raise ApiError(400, f"deadline_s must be above 0, not {batch.deadline_s}")


def check_session(session: OpenSession) -> None:
    """Raise ApiError for a session that cannot have turns."""
    _check_policy(session.policy)
    if session.opening:
        name_of("opening", session.opening)
    _check_sampling(session.sampling)
    try:
        msgspec.msgpack.encode(session.sampling)
    except (ValueError, OverflowError, RecursionError) as error:
        raise ApiError(400, f"sampling cannot be recorded: {error}") from error
    _check_counts(0, seed=session.seed)
    _check_counts(1, turns_max=session.turns_max, tokens_max=session.tokens_max)


def _check_policy(policy: PolicyRef) -> None:
    """Raise ApiError for an invalid policy version, which could not be ordered with the others."""
    try:
        PolicyVersion.parse(policy.version)
    except ValueError as error:
        raise ApiError(400, str(error)) from error
    name_of("policy", policy.label)


def _check_sampling(sampling: dict[str, object]) -> None:
    if reserved := sorted(RESERVED.intersection(sampling)):
        raise ApiError(400, f"sampling must not set {', '.join(reserved)}, which the gateway sets")
    for name, least in (("max_tokens", 1), ("max_completion_tokens", 1), ("min_tokens", 0)):
        value = sampling.get(name)
        if value is not None and not (type(value) is int and least <= value < NUMBER_END):
            raise ApiError(400, f"sampling.{name} must be an integer of at least {least}")


def _shown(text: str) -> str:
    """Return the beginning of the text, in ASCII."""
    return ascii(text[:80])
