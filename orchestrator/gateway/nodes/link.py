"""The gateway's link to one member during one term, and its attempts at jobs: their progress and their end."""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass, field
from enum import StrEnum

from grpo_orch.orchestrator.gateway.job import Job
from grpo_orch.orchestrator.gateway.nodes.connection import Pool
from grpo_orch.orchestrator.gateway.time_slices import TimeSlices
from grpo_orch.policies.serving.sharing import single_request_rate
from grpo_orch.policies.serving.silence_limits import SilenceLimits
from grpo_orch.policies.serving.wire import HEADER_BOOT, HEADER_POLICY

PROBE_S = 1.5  # a burst of 256 requests has kept vLLM's server busy for half a second
REQUEST_TIMEOUT_S = 30.0  # rendering a prompt of a million tokens takes seconds
ANSWER_SIZE_MAX = 64 * 1024 * 1024
PEAK_DECAY = 0.99  # factor on the peak prompt speed, with each measurement
SPEED_SHARE = 0.3  # weight of a new measurement in the mean speed
_HEADER_SAFE = re.compile(r"[\x21-\x7e]*")


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
class End:
    """How a completion ended."""

    finish_reason: str
    stop_reason: int | str | None


class Attempt:
    """One attempt. Times are on the event loop's clock.

    Attributes:
        job: gets the tokens as they arrive.
        max_tokens: the job's limit.
        sent_s: when the request was sent.
        first_token_at_s: when the first token arrived; None before.
        last_event_s: when the last event arrived; `sent_s` before the first.
        last_queued_s: when it last may have been waiting in the engine's queue.
    """

    __slots__ = (
        "_done",
        "_tokens_before",
        "first_token_at_s",
        "job",
        "last_event_s",
        "last_queued_s",
        "max_tokens",
        "sent_s",
    )

    def __init__(self, job: Job) -> None:
        loop = asyncio.get_running_loop()
        self.job, self.max_tokens = job, job.max_tokens
        self._tokens_before = len(job.token_ids)
        self._done: asyncio.Future[End] = loop.create_future()
        self.sent_s = self.last_event_s = loop.time()
        self.first_token_at_s: float | None = None
        self.last_queued_s = 0.0

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
