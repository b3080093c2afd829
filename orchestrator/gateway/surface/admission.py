"""What the gateway takes from those who ask: so much, within such a time, and only what makes sense.

All else is ApiError, which becomes a 4xx with one line. What is decoded here may come from anyone who has the run's
secret, by mistake or not.
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

from orchestrator.gateway.nodes.upstream import RESERVED
from orchestrator.gateway.turns import TimeSlices
from policies.model.vocabulary import PolicyVersion
from policies.serving.joining import Stage
from policies.serving.sessions import OpenSession
from policies.serving.wire import Announce, Batch, PolicyRef, PromptLine, Sample

T = TypeVar("T")
_batch, _prompt_line = msgspec.json.Decoder(Batch), msgspec.json.Decoder(PromptLine)

BATCH_SIZE_MAX = 512 * 1024 * 1024  # 4,096 prompts of 16,384 tokens are 450 MB of JSON
BATCH_LINE_SIZE_MAX = 8 * 1024 * 1024  # one prompt of a million tokens
OPENAI_SIZE_MAX = 32 * 1024 * 1024  # a million tokens as ids are 7 MB
ANNOUNCE_SIZE_MAX = 64 * 1024
# A body must be there within this and a second more for each MiB.
BODY_S = 30.0
REQUESTS_MAX = 65_536  # in a batch; each is a task and a place in the queue
SEED_END = 2**63  # vLLM's seeds are signed 64-bit numbers
PARTS_MAX = 16  # of a node's joining
NUMBER_END = 2**63
NAME_SIZE_MAX = 200
LINE_SIZE_MAX = 1000  # of an agent's words
# What goes into headers, logs and metrics.
_NAME = re.compile(rf"[A-Za-z0-9@._:+-]{{1,{NAME_SIZE_MAX}}}")
_ADDRESS = re.compile(r"([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):(\d{1,5})")


class ApiError(Exception):
    """The answer is an error.

    Args:
        status: of HTTP.
        message: one line.
        param: the parameter at fault, if it is one.
        code: a word for programs, where OpenAI has one.
    """

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(" ".join(message.split()))
        self.status = status
        self.param = param
        self.code = code


async def read(request: web.Request, size_max: int) -> bytearray:
    """Return the body. Raises ApiError for one that is too long, too slow or compressed."""
    body = bytearray()
    async for piece in _pieces(request, size_max):
        body += piece
    return body


async def _pieces(request: web.Request, size_max: int) -> AsyncIterator[bytes]:
    if request.headers.get(hdrs.CONTENT_ENCODING, "identity") != "identity":
        raise ApiError(415, "a compressed body is not taken")
    told = request.content_length
    if told is not None and told > size_max:
        raise ApiError(413, f"a body of {told} bytes, and at most {size_max} are taken")
    size, limit_s = 0, BODY_S + (size_max if told is None else told) / 2**20
    ends_s = asyncio.get_running_loop().time() + limit_s
    try:
        while True:
            async with asyncio.timeout_at(ends_s):
                piece = await request.content.readany()
            if not piece:
                return
            size += len(piece)
            if size > size_max:
                raise ApiError(413, f"a body of more than {size_max} bytes")
            yield piece
    except TimeoutError:
        raise ApiError(408, f"the body was not there within {limit_s:.0f} s") from None
    except web.RequestPayloadError as error:
        raise ApiError(400, f"the body is not as the headers say: {error}") from error


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt of a batch, at 4 bytes a token, and what is asked of it."""

    token_ids: array[int]
    samples: list[Sample]


async def read_batch(request: web.Request, time_slices: TimeSlices) -> tuple[Batch, list[Prompt]]:
    """Return the batch and the prompts of all its lines, never kept as text. Raises ApiError."""
    batch, prompts, seen = None, list[Prompt](), set[int]()
    async with aclosing(_lines(request)) as lines:
        async for line in lines:
            await time_slices.take()
            if batch is None:
                batch = decode(line, _batch, "a Batch")
                check_batch(batch)
                for one in batch.requests:
                    prompts.append(_prompt(one.prompt_token_ids, [Sample(one.index, one.seed)], seen))
            elif line:
                said = decode(line, _prompt_line, "a PromptLine")
                prompts.append(_prompt(said.prompt_token_ids, said.samples, seen))
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
            raise ApiError(413, f"a line of more than {BATCH_LINE_SIZE_MAX} bytes")
    yield bytes(rest)


def _prompt(token_ids: list[int], samples: list[Sample], seen: set[int]) -> Prompt:
    """`seen`: the indexes of the batch so far. Raises ApiError."""
    for one in samples:
        if not 0 <= one.index < NUMBER_END:
            raise ApiError(400, "an index is outside [0, 2**63)")
        if one.index in seen:
            raise ApiError(400, "two requests have the same index")
        if not token_ids or not 0 <= one.seed < SEED_END:
            raise ApiError(400, f"request {one.index}: an empty prompt, or a seed outside [0, 2**63)")
        seen.add(one.index)
    if len(seen) > REQUESTS_MAX:
        raise ApiError(400, f"{len(seen)} requests, and a batch has at most {REQUESTS_MAX}")
    try:
        return Prompt(array("I", token_ids), samples)
    except OverflowError:
        raise ApiError(400, "a prompt has a number that is no token") from None


def decode(body: bytes | bytearray, decoder: msgspec.json.Decoder[T], name: str) -> T:
    """Decode JSON; `name` is what the sender should have sent. Raises ApiError."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        found = re.search(r" - at `\$\.([a-z_]+)", str(error))
        raise ApiError(400, f"not {name}: {error}", found and found[1]) from error
    except RecursionError:
        raise ApiError(400, f"not {name}: it is nested too deeply") from None
    except (msgspec.DecodeError, ValueError) as error:
        raise ApiError(400, f"not {name}: {error}") from error


def name_of(what: str, text: str) -> str:
    """Return the text if it is a name. Raises ApiError."""
    if not _NAME.fullmatch(text):
        raise ApiError(400, f"{what} is {_shown(text)}: expected at most {NAME_SIZE_MAX} of A-Za-z0-9@._:+-")
    return text


def check_announce(said: Announce) -> None:
    """Raise ApiError for what no agent would say."""
    name_of("boot_id", said.boot_id)
    if said.policy is not None:
        name_of("policy", said.policy)
    _check_address(said.address)
    if len(said.unfit) > LINE_SIZE_MAX or not said.unfit.isprintable():
        raise ApiError(400, f"unfit must be one printable line of at most {LINE_SIZE_MAX} characters")
    if not 0 < said.max_requests < NUMBER_END:
        raise ApiError(400, "max_requests must be at least 1")
    if not 0 < said.engines < NUMBER_END:
        raise ApiError(400, "engines must be at least 1")
    if not 0 <= said.kv_tokens < NUMBER_END:
        raise ApiError(400, "kv_tokens must be at least 0")
    if said.engine is not None:
        one = said.engine
        counts = (one.running, one.waiting, one.preemptions, one.tokens)
        if not (all(0 <= count < NUMBER_END for count in counts) and 0.0 <= one.kv_usage <= 1.0):
            raise ApiError(400, "engine must be counts of at least 0, and kv_usage a share")
    took = said.stages
    times = [*said.join_s.values(), *((took.fetch_s, took.load_s, took.fetched_bytes) if took is not None else ())]
    if not all(0 <= time < NUMBER_END for time in times) or len(said.join_s) > PARTS_MAX:
        raise ApiError(400, f"stages and join_s must be at least 0, and of at most {PARTS_MAX} parts")
    if said.stage is not None:
        check_stage(said.stage)


def check_stage(said: Stage) -> None:
    """Raise ApiError for what no agent would say."""
    if len(said.name) > LINE_SIZE_MAX or not said.name.isprintable():
        raise ApiError(400, f"a stage is one printable line of at most {LINE_SIZE_MAX} characters")
    if not (0 <= said.done_bytes < NUMBER_END and 0 <= said.total_bytes < NUMBER_END):
        raise ApiError(400, "done_bytes and total_bytes must be at least 0")


def _check_address(address: str) -> None:
    """Raise ApiError unless it is one that can be connected to."""
    found = _ADDRESS.fullmatch(address)
    if found is None or not 0 < int(found[2]) < 2**16:
        raise ApiError(400, f"address is {_shown(address)}: expected HOST:PORT")


def check_batch(batch: Batch) -> None:
    """Raise ApiError for what no node could do; its prompts are checked as they come."""
    _check_policy(batch.policy)
    _check_sampling(batch.sampling)
    if not (math.isfinite(batch.deadline_s) and batch.deadline_s > 0):
        raise ApiError(400, f"deadline_s must be above 0, not {batch.deadline_s}")
    if batch.patience_s is not None and not batch.patience_s >= 0:
        raise ApiError(400, f"patience_s must be at least 0, not {batch.patience_s}")


def check_session(said: OpenSession) -> None:
    """Raise ApiError for a session that could have no turn."""
    _check_policy(said.policy)
    _check_sampling(said.sampling)
    try:
        msgspec.msgpack.encode(said.sampling)
    except (ValueError, OverflowError, RecursionError) as error:
        raise ApiError(400, f"sampling that cannot be recorded: {error}") from error
    if not 0 <= said.seed < SEED_END:
        raise ApiError(400, "seed is outside [0, 2**63)")
    for name, value in (("turns_max", said.turns_max), ("tokens_max", said.tokens_max)):
        if not 0 < value < NUMBER_END:
            raise ApiError(400, f"{name} must be at least 1")


def _check_policy(policy: PolicyRef) -> None:
    """Raise ApiError for a name that is no version's: the newest of them could not be found any more."""
    try:
        PolicyVersion.parse(policy.version)
    except ValueError as error:
        raise ApiError(400, str(error)) from error
    name_of("policy", policy.label)


def _check_sampling(sampling: dict[str, object]) -> None:
    if reserved := sorted(RESERVED.intersection(sampling)):
        raise ApiError(400, f"sampling may not set {', '.join(reserved)}: the gateway does")
    for name, least in (("max_tokens", 1), ("max_completion_tokens", 1), ("min_tokens", 0)):
        value = sampling.get(name)
        if value is not None and not (type(value) is int and least <= value < NUMBER_END):
            raise ApiError(400, f"sampling.{name} must be a whole number of at least {least}")


def _shown(text: str) -> str:
    """Its beginning, fit for a line of UTF-8."""
    return ascii(text[:80])
