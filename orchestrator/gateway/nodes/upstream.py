"""The link to one member during one term, and attempts at jobs over it.

Tokens go into the job as they arrive, so that a lost connection loses none of them. Any failure of the node raises
NodeFailed, and the job moves to another member; vLLM's errors about the request itself raise RequestRefused.
Invalid responses never raise anything else.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any

import msgspec

from grpo_orch.orchestrator.gateway.job import Finished, Job, RequestRefused, WeightsRefused
from grpo_orch.orchestrator.gateway.nodes.connection import Connection, Pool
from grpo_orch.orchestrator.gateway.time_slices import TimeSlices
from grpo_orch.policies.serving import recovery
from grpo_orch.policies.serving.sharing import single_request_rate
from grpo_orch.policies.serving.silence_limits import SilenceLimits
from grpo_orch.policies.serving.wire import COMPLETIONS, HEADER_BOOT, HEADER_POLICY, MODEL

PROBE_S = 1.5  # a burst of 256 requests has kept vLLM's server busy for half a second
REQUEST_TIMEOUT_S = 30.0  # rendering a prompt of a million tokens takes seconds
ANSWER_SIZE_MAX = 64 * 1024 * 1024
PEAK_DECAY = 0.99  # factor on the peak prompt speed, with each measurement
SPEED_SHARE = 0.3  # weight of a new measurement in the mean speed
_HEADER_SAFE = re.compile(r"[\x21-\x7e]*")
# Parameters that the gateway sets, so a batch or session must not.
RESERVED = frozenset({"model", "prompt", "seed", "stream", "stream_options", "n", "logprobs", "return_token_ids"})
EVENT_SIZE_MAX = 16 * 1024 * 1024  # the first event repeats the prompt: a million tokens are 8 MB
REFUSAL_SIZE_MAX = 2000  # of an error's text
# `list` encodes prompts of batches, which are arrays.
_encode = msgspec.json.Encoder(enc_hook=list).encode
_UNFINISHED = frozenset({"abort", "error"})
# vLLM's messages for a prompt that is too long, and for too many tokens (`renderers/params.py`).
_TOO_LONG = re.compile(r"(?:maximum context length is |max_tokens=\d+ cannot be greater than \w+=)(\d+)")
RETRYABLE = frozenset({401, 404, 408, 409, 425, 429})  # 4xx, but the node's fault or temporary

Token = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]  # so that no node's data causes an error later


class EngineError(msgspec.Struct, gc=False):
    """vLLM's error, also as an event for a failure after it has answered 200."""

    message: str = ""
    code: int = 500


class _Logprobs(msgspec.Struct, gc=False):
    token_logprobs: list[float | None] = []


class _Choice(msgspec.Struct, gc=False):
    """What is read of an event. It costs least to decode."""

    token_ids: list[Token] | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class _Event(msgspec.Struct, gc=False):
    """One event of vLLM's `/v1/completions`."""

    choices: list[_Choice] = []
    error: EngineError | None = None


_read = msgspec.json.Decoder(_Event).decode


class HandoverReason(StrEnum):
    """Why a job left a member unfinished."""

    LOST = "lost"  # the connection broke or could not be made
    CLOSED = "closed"  # connection refused: no process listens there
    REFUSED = "refused"  # the node answered with an error
    BROKEN = "broken"  # the node sent invalid data
    SILENT = "silent"
    TERM_ENDED = "term_ended"  # the member's term ended
    DRAINED = "drained"
    REBALANCED = "rebalanced"  # moved to a member with less load


class NodeFailed(Exception):
    """The node did not finish the request; another node may."""

    def __init__(self, reason: HandoverReason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class _Measurement:
    """A link's counts at the start of a measurement."""

    at_s: float
    received_tokens: int
    prompt_tokens: int
    started_requests: int  # running requests that have tokens


@dataclass(slots=True, eq=False)
class Link:
    """The link to one member during one term. Times are on the event loop's clock."""

    node: str
    boot_id: str
    term: int
    address: str
    token: str
    pool: Pool
    silence_limits: SilenceLimits
    time_slices: TimeSlices
    running: set[Attempt] = field(default_factory=set)
    last_event_s: float = 0.0  # of any request; or when a request was sent to the idle member
    last_work_s: float = 0.0  # when the engine last reported new tokens, received here or not
    newest_started_s: float = 0.0  # when the newest request that has a first token was sent
    last_probe_s: float = 0.0
    probe: asyncio.Task[None] | None = None
    received_tokens: int = 0  # of all requests so far
    prompt_tokens: int = 0  # of all requests that got a first token here
    peak_prompt_tokens_s: float = 0.0  # recent peak of prompt tokens per second; prompts are computed in batches
    speed_tokens_s: float = 0.0  # of a request that runs alone; 0 while unknown
    _measurement: _Measurement | None = None
    _head_cache: tuple[str, str, str] = ("", "", "")  # path, policy, and the head up to the size

    def head(self, method: str, path: str, policy: str, size: int) -> bytes:
        """Return a request's head, with the headers of `policies.serving.wire`. Raises NodeFailed."""
        if self._head_cache[:2] != (path, policy):
            if not all(map(_HEADER_SAFE.fullmatch, (self.address, self.boot_id, policy))):
                raise NodeFailed(HandoverReason.BROKEN, "announced an address or boot that is no valid header")
            head = (
                f"{method} {path} HTTP/1.1\r\nHost: {self.address}\r\nAuthorization: Bearer {self.token}\r\n"
                f"{HEADER_BOOT}: {self.boot_id}\r\n{HEADER_POLICY}: {policy}\r\n"
                "Content-Type: application/json\r\nContent-Length: "
            )
            self._head_cache = (path, policy, head)
        return f"{self._head_cache[2]}{size}\r\n\r\n".encode()

    def silence_limit_s(self) -> float:
        """Return how long all requests of a member that answers probes may be silent."""
        if any(attempt.first_token_at_s is not None for attempt in self.running):
            return self.silence_limits.hard_s
        longest = max(attempt.job.prompt_tokens for attempt in self.running)
        return self.silence_limits.first_token_s(longest)

    def may_be_queued(self, attempt: Attempt) -> bool:
        """Return whether a silent request may be waiting in the engine's queue.

        An engine takes requests in order, preempted ones first. So no request that was sent after this one's last
        event can have a token while it waits.
        """
        return self.newest_started_s <= attempt.last_event_s

    def measure(self, now_s: float) -> None:
        """Measure the member's speed since the last call that saw new tokens.

        Events may be further apart than calls.
        """
        started, since = sum(attempt.first_token_at_s is not None for attempt in self.running), self._measurement
        if since is not None:
            took_s = now_s - since.at_s
            prompts_tokens_s = (self.prompt_tokens - since.prompt_tokens) / took_s
            self.peak_prompt_tokens_s = max(prompts_tokens_s, self.peak_prompt_tokens_s * PEAK_DECAY)
            if started and since.started_requests:
                if self.received_tokens == since.received_tokens:
                    return
                requests = (started + since.started_requests) / 2
                speed = single_request_rate(
                    (self.received_tokens - since.received_tokens) / requests / took_s, requests
                )
                self.speed_tokens_s = moving_mean(self.speed_tokens_s, speed, SPEED_SHARE)
        self._measurement = _Measurement(now_s, self.received_tokens, self.prompt_tokens, started)

    def fail_attempts(self, reason: HandoverReason, message: str) -> None:
        """End every attempt that runs here, so that the jobs move to other members."""
        for attempt in list(self.running):
            attempt.fail(NodeFailed(reason, message))

    def close(self, why: str) -> None:
        """End the attempts and connections, because the term has ended."""
        self.fail_attempts(HandoverReason.TERM_ENDED, why)
        self.pool.close()
        if self.probe is not None:
            self.probe.cancel()

    async def check_health(self) -> str | None:
        """Request the member's /health. Returns None if it is healthy, else what is wrong."""
        try:
            status, _ = await self._exchange("GET", "/health", b"", PROBE_S)
        except NodeFailed as error:
            return str(error)
        return None if status == 200 else f"answered {status}"

    async def request(self, path: str, body: bytes) -> tuple[int, bytes]:
        """Send a small request; return status and body. Raises NodeFailed."""
        return await self._exchange("POST", path, body, REQUEST_TIMEOUT_S)

    async def _exchange(self, method: str, path: str, body: bytes, limit_s: float) -> tuple[int, bytes]:
        response = _ResponseReader()
        try:
            async with asyncio.timeout(limit_s):
                connection = self.pool.take() or await self.pool.connect(limit_s)
                connection.send([self.head(method, path, "", len(body)), body], response)
                try:
                    return await response.complete
                except asyncio.CancelledError:
                    connection.cancel(response)
                    raise
        except TimeoutError as error:
            raise NodeFailed(HandoverReason.SILENT, f"no answer within {limit_s:g} s") from error
        except OSError as error:
            raise NodeFailed(HandoverReason.LOST, str(error) or type(error).__name__) from error


def moving_mean(mean: float, value: float, share: float) -> float:
    """Return the mean with `value` added at this weight. A mean of 0 means that there is no value yet."""
    return value if not mean else mean + share * (value - mean)


class _ResponseReader:
    """Collects one response."""

    def __init__(self) -> None:
        self.complete: asyncio.Future[tuple[int, bytes]] = asyncio.get_running_loop().create_future()
        self._status, self._body = 0, bytearray()

    def head(self, status: int) -> None:
        self._status = status

    def body(self, data: bytes) -> None:
        self._body += data
        if len(self._body) > ANSWER_SIZE_MAX:
            self.lost(f"response over {ANSWER_SIZE_MAX >> 20} MiB")

    def end(self) -> None:
        if not self.complete.done():
            self.complete.set_result((self._status, bytes(self._body)))

    def lost(self, why: str) -> None:
        if not self.complete.done():
            self.complete.set_exception(NodeFailed(HandoverReason.LOST, why))


class Attempt:
    """One attempt at a job over a link. Times are on the event loop's clock.

    Args:
        job: gets the tokens as they arrive.
        link: the member.
        on_first_token: called when the first token arrives.

    Attributes:
        max_tokens: the job's limit.
        sent_s: when the request was sent.
        first_token_at_s: when the first token arrived; None before.
        last_event_s: when the last event arrived; `sent_s` before the first.
        last_queued_s: when it last may have been waiting in the engine's queue.
    """

    def __init__(self, job: Job, link: Link, on_first_token: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()
        self.job, self.link, self.max_tokens = job, link, job.max_tokens
        self._on_first_token, self._now = on_first_token, loop.time
        self._tokens_before = len(job.token_ids)
        self._done: asyncio.Future[Finished] = loop.create_future()
        self.sent_s = self.last_event_s = loop.time()
        self.first_token_at_s: float | None = None
        self.last_queued_s = 0.0
        self._connection: Connection | None = None
        self._unparsed = bytearray()
        self._error_body = b""
        self._status = 0

    @property
    def is_continuation(self) -> bool:
        """Whether it continues from tokens that another member made."""
        return self._tokens_before > 0

    @property
    def tokens(self) -> int:
        """Number of tokens this attempt has added to the job."""
        return len(self.job.token_ids) - self._tokens_before

    @property
    def is_movable(self) -> bool:
        """Whether the job loses no tokens when it moves to another member."""
        return not self.job.token_ids or self.job.can_continue()

    def fail(self, error: Exception) -> None:
        """End this attempt with an error, unless it has ended."""
        if not self._done.done():
            self._done.set_exception(error)

    async def run(self) -> Finished:
        """Return how the completion ended. Raises NodeFailed, RequestRefused.

        An error or a cancellation closes the connection, which makes vLLM abort the request.
        """
        link = self.link
        if not link.running:
            link.last_event_s = self.sent_s
        link.running.add(self)
        try:
            await link.time_slices.take()
            if self._done.done():
                return self._done.result()
            self.sent_s = self.last_event_s = self._now()
            request = self._request()
            self._connection = self.link.pool.take() or await self._connect()
            if not self._done.done():
                self._connection.send(request, self)
            return await self._done
        finally:
            self.link.running.discard(self)
            if not self._done.done() or self._done.cancelled() or self._done.exception() is not None:
                self._done.cancel()
                if self._connection is not None:
                    self._connection.cancel(self)

    def head(self, status: int) -> None:
        self._status = status

    def body(self, data: bytes) -> None:
        if self._done.done():
            return
        if self._status != 200:
            self._error_body = (self._error_body + data)[:REFUSAL_SIZE_MAX]
        elif self._unparsed or not self._read_event(data):
            self._read_pieces(data)

    def _read_event(self, data: bytes) -> bool:
        """Read data that is one whole event, as nearly always. Returns False for anything else."""
        if not (data.startswith(b"data: ") and data.endswith(b"\n\n")):
            return False
        try:
            event = _read(data[6:])
        except (msgspec.MsgspecError, ValueError, RecursionError):  # RecursionError: nested too deeply
            return False
        self._apply(event)
        return True

    def _read_pieces(self, data: bytes) -> None:
        """Read data that is part of an event, or several events."""
        searched = max(0, len(self._unparsed) - 1)
        self._unparsed += data
        if self._unparsed.find(b"\n\n", searched) < 0:
            if len(self._unparsed) > EVENT_SIZE_MAX:
                self._fail_broken(f"sent an event over {EVENT_SIZE_MAX >> 20} MiB")
            return
        *events_data, rest = bytes(self._unparsed).split(b"\n\n")
        self._unparsed = bytearray(rest)
        for event in events_data:
            if self._done.done():
                return
            if event.startswith(b"data: ") and event != b"data: [DONE]" and not self._read_event(event + b"\n\n"):
                self._fail_broken(f"sent an invalid event: {event[6:86]!r}")

    def end(self) -> None:
        if self._status != 200:
            self._refuse(self._status, f"answered {self._status}: {self._error_body.decode(errors='replace')}")
        elif not self._done.done():
            self._fail_broken(f"stream ended after {self.tokens} tokens without a finish reason")

    def lost(self, why: str) -> None:
        self.fail(NodeFailed(HandoverReason.LOST, why))

    def _request(self) -> list[bytes]:
        try:
            encoded = _encode(_body_of(self.job))
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise RequestRefused(f"the request cannot be encoded for a node: {error}") from error
        return [self.link.head("POST", COMPLETIONS, self.job.policy, len(encoded)), encoded]

    async def _connect(self) -> Connection:
        """Connect, unless this attempt ends first."""
        connecting = asyncio.ensure_future(self.link.pool.connect_throttled(self.link.silence_limits.connect_s))
        try:
            both: set[asyncio.Future[Any]] = {connecting, self._done}
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if self._done.done():
                self._done.result()  # raises: without a connection it can only have failed
            return await connecting
        except TimeoutError as error:
            raise NodeFailed(HandoverReason.LOST, "connecting timed out") from error
        except ConnectionRefusedError as error:
            raise NodeFailed(HandoverReason.CLOSED, "connection refused") from error
        except OSError as error:
            raise NodeFailed(
                HandoverReason.LOST, f"connecting failed: {str(error) or type(error).__name__}"
            ) from error
        finally:
            if not connecting.cancel() and self._done.done() and connecting.exception() is None:
                self.link.pool.keep(connecting.result())

    def _apply(self, event: _Event) -> None:
        if event.error is not None:
            self._refuse(event.error.code, f"reported {event.error.code}: {event.error.message}")
        elif event.choices:
            choice = event.choices[0]
            logprobs = [] if choice.logprobs is None else choice.logprobs.token_logprobs
            if not self._add_tokens(choice.token_ids or [], logprobs):
                return
            if choice.finish_reason is not None:
                self._finish(choice.finish_reason, choice.stop_reason)

    def _add_tokens(self, token_ids: list[int], logprobs: list[float | None]) -> bool:
        """Add tokens to the job. Returns False if they are invalid, which ends the attempt."""
        if len(logprobs) != len(token_ids):
            self._fail_broken(f"sent {len(token_ids)} tokens with {len(logprobs)} log-probabilities")
            return False
        if None in logprobs:
            # vLLM writes NaN as null. Every node with these weights would send the same.
            message = "vLLM's log-probabilities are not numbers; the policy's weights may contain NaN"
            self.fail(WeightsRefused(message, 422))
            return False
        job, link, now_s = self.job, self.link, self._now()
        job.token_ids += token_ids
        job.logprobs += logprobs  # type: ignore[arg-type]  # checked above
        link.last_event_s = now_s
        link.received_tokens += len(token_ids)
        if self.first_token_at_s is not None:
            link.silence_limits.record_gap(now_s - self.last_event_s)
        elif token_ids:
            self.first_token_at_s = now_s
            if job.first_token_at_s is None:
                job.first_token_at_s = now_s
            link.newest_started_s = max(link.newest_started_s, self.sent_s)
            link.prompt_tokens += job.prompt_tokens + self._tokens_before
            link.silence_limits.record_first_token(now_s - self.sent_s, job.prompt_tokens)
            self._on_first_token()
        self.last_event_s = now_s
        if len(job.token_ids) > self.max_tokens:
            self._fail_broken(f"sent {len(job.token_ids)} tokens, more than the limit of {self.max_tokens}")
            return False
        return True

    def _finish(self, finish_reason: str, stop_reason: int | str | None) -> None:
        """End the attempt at an event with a finish reason, even if the connection breaks after it."""
        if finish_reason in _UNFINISHED:
            self.fail(NodeFailed(HandoverReason.REFUSED, f"stopped after {self.tokens} tokens: {finish_reason}"))
            return
        assert self._connection is not None
        self._connection.detach(self.last_event_s)
        self._done.set_result(Finished(self.job, finish_reason, stop_reason, self.link.node))

    def _refuse(self, status: int, answer: str) -> None:
        if 400 <= status < 500 and status not in RETRYABLE:
            limit = _TOO_LONG.search(answer)
            self.fail(RequestRefused(f"vLLM {answer}", status, None if limit is None else int(limit[1])))
        else:
            self.fail(NodeFailed(HandoverReason.REFUSED, answer[:200]))

    def _fail_broken(self, what: str) -> None:
        self.fail(NodeFailed(HandoverReason.BROKEN, what))


def _body_of(job: Job) -> dict[str, Any]:
    """Return vLLM's request body, for the whole completion or for the rest after the tokens that arrived."""
    fixed = {"model": MODEL, "stream": True, "n": 1, "return_token_ids": True, "logprobs": 0}
    if not job.token_ids:
        return {**job.body, **fixed}
    prompt = [*job.prompt, *job.token_ids]
    rest = recovery.remaining_parameters(job.body, len(job.token_ids))
    return {**rest, **fixed, "prompt": prompt, "seed": job.body["seed"]}
