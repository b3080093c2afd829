"""Client of `POST /v1/rollouts`: send a batch, return all its completions.

Losing a gateway or a node is a wait, not an error: the client keeps what has arrived and requests the rest again,
at the gateway address that the store then holds.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import groupby

import httpx
import msgspec
import structlog

from grpo_orch.checkpoint.records import documents
from grpo_orch.checkpoint.security import identity
from grpo_orch.checkpoint.store.codec import to_json
from grpo_orch.checkpoint.store.errors import Corrupt, NotFound
from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.policies.serving.trainer_requests import split_batches
from grpo_orch.policies.serving.wire import (
    REFUSED,
    ROLLOUTS,
    Batch,
    BatchLine,
    Completion,
    CompletionRequest,
    Progress,
    PromptLine,
    Sample,
)
from grpo_orch.tasks.storing.heartbeat import Heartbeat

log = structlog.get_logger()

RETRY_S = 0.5  # between attempts to reach a gateway
SILENCE_TIMEOUT_S = 10.0  # the gateway reports several times a second; after this silence it is gone
LOG_WAITING_S = 10.0
PIECE_SIZE = 256 * 1024  # bytes of a batch per write
FATAL_STATUS = frozenset({400, 401, 403, 413, 415, 422})  # the gateway understood; a retry will not help

_decoder = msgspec.json.Decoder(BatchLine)
NO_NODE = ""  # the node of a completion that no node made
NO_PROGRESS = Progress(tokens=0, discarded=0, members=0, waiting=0)


class GenerationFailed(Exception):
    """The batch cannot be completed: the gateway refused it, or nothing moved until the deadline."""


class GatewayLost(Exception):
    """The gateway is gone or sends an invalid answer; retry."""


@dataclass(frozen=True, slots=True)
class Generated:
    """A finished batch, in the order of its requests, with its losses."""

    completions: list[Completion]
    discarded: int  # tokens
    wait_s: float  # seconds in which no node could serve


class GatewayClient:
    """Complete batches through the run's gateway.

    Args:
        store: holds the gateway's address.
        token: the run's secret.
        heartbeat: reports whether the trainer waits or generates; ends a wait when a newer trainer appears.
        interrupt: raises LeaveNow when the trainer must leave its machine.
    """

    def __init__(
        self, store: Store, token: str, heartbeat: Heartbeat, interrupt: Callable[[], None] = lambda: None
    ) -> None:
        self._store = store
        self._interrupt = interrupt
        # One client for all batches, because creating one takes 25 ms. The gateway runs next to the trainer, so
        # ignore the environment's proxies.
        headers = {"Authorization": f"Bearer {token}"}
        timeout = httpx.Timeout(SILENCE_TIMEOUT_S, connect=5.0)
        tls = identity.client_context(token)
        self._http = httpx.Client(headers=headers, timeout=timeout, trust_env=False, verify=tls)
        self._heartbeat = heartbeat
        self._say: Callable[[str], None] = heartbeat.update

    def complete(self, batch: Batch, on_completion: Callable[[Completion], None] = lambda _: None) -> Generated:
        """Return once every request of the batch is finished; call `on_completion` with each finished completion.

        A batch above the gateway's limits, such as an evaluation, is sent in parts. An empty prompt is refused
        here, because the gateway would refuse the whole batch.

        Raises GenerationFailed after `batch.deadline_s` without a token or a node that makes progress, or when
        the gateway refuses the batch; Fenced; LeaveNow; StoreError.
        """
        sendable = [request for request in batch.requests if request.prompt_token_ids]
        made = [self._complete(replace(batch, requests=piece), on_completion) for piece in split_batches(sendable)]
        found = {completion.index: completion for part in made for completion in part.completions}
        label = batch.policy.label
        return Generated(
            [found.get(request.index) or _refused(request, label) for request in batch.requests],
            sum(part.discarded for part in made),
            sum(part.wait_s for part in made),
        )

    def complete_in_background(
        self, batch: Batch, on_completion: Callable[[Completion], None], report_activity: Callable[[str], None]
    ) -> Generated:
        """Complete a batch in a thread next to the trainer's.

        Reports to `report_activity` instead of the heartbeat; only a newer trainer interrupts it.
        """
        background = copy.copy(self)
        background._say, background._interrupt = report_activity, lambda: None
        return background.complete(batch, on_completion)

    def _complete(self, batch: Batch, arrived: Callable[[Completion], None]) -> Generated:
        call = GatewayCall(batch, arrived)
        while not call.finished:
            try:
                for line in self._lines(documents.gateway_url(self._store), call):
                    call.process(line)
                    self._report(call)
                    if line.end is not None:  # its counts are final; all completions may arrive before it
                        break
                else:
                    raise GatewayLost("it ended its answer early")
            except (GatewayLost, NotFound, Corrupt, httpx.TransportError) as error:
                call.cut()
                if not call.finished:
                    self._report(call, error)
                    self._heartbeat.wait(RETRY_S)
        return call.result()

    def _lines(self, url: str, call: GatewayCall) -> Iterator[BatchLine]:
        """Request the missing completions and yield the lines of the answer.

        Raises GatewayLost, GenerationFailed, httpx.TransportError.
        """
        endpoint = f"{url.rstrip('/')}{ROLLOUTS}"
        body = body_of(call.missing())
        size = {"Content-Length": str(len(body))}
        with self._http.stream("POST", endpoint, content=_pieces(body), headers=size) as answer:
            if answer.status_code in FATAL_STATUS:
                raise GenerationFailed(
                    f"the gateway answered {answer.status_code}: {answer.read().decode(errors='replace')[:500]}"
                )
            if answer.status_code != 200:
                raise GatewayLost(f"it answered {answer.status_code}")
            call.connected()
            for line in _split(answer.iter_bytes()):
                try:
                    yield _decoder.decode(line)
                except (ValueError, RecursionError) as error:  # DecodeError and UnicodeDecodeError are ValueErrors
                    raise GatewayLost(f"it sent {line[:80]!r}: {error}") from error

    def _report(self, call: GatewayCall, error: Exception | None = None) -> None:
        self._heartbeat.check()
        self._interrupt()
        self._say("generating" if call.served else "waiting")
        if call.idle_s > call.batch.deadline_s:
            raise GenerationFailed(
                f"no token for {call.idle_s:.0f} s; `rollout.deadline_s` allows {call.batch.deadline_s:.0f}"
            )
        if not call.served and call.is_log_due():
            log.info(
                "waiting_for_rollout_nodes",
                idle_s=round(call.idle_s, 1),
                missing=len(call.batch.requests) - len(call.done),
                gateway="answers" if error is None else str(error) or type(error).__name__,
            )


class GatewayCall:
    """The state of one batch over all its connections."""

    def __init__(
        self,
        batch: Batch,
        arrived: Callable[[Completion], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.batch = batch
        self._clock = clock
        self._arrived = arrived
        self.done: dict[int, Completion] = {}
        self.served = True  # whether a node can serve it, by the latest report
        self._discarded = 0  # over the finished connections
        self._wait_s = 0.0
        self._counted_s = self._progress_s = self._logged_s = clock()
        self._latest = NO_PROGRESS  # of this connection
        self._lost = (0, 0)  # of the previous connection: tokens reported as discarded, tokens in flight
        self._moves = 0  # kept across connections, because a new connection is no progress
        self._finished_tokens = 0  # of this connection

    @property
    def finished(self) -> bool:
        return len(self.done) == len(self.batch.requests)

    @property
    def idle_s(self) -> float:
        """Seconds since the last token, or the last progress of a joining node."""
        return self._clock() - self._progress_s

    def missing(self) -> Batch:
        """Return the batch with only the unfinished requests."""
        missing = [request for request in self.batch.requests if request.index not in self.done]
        return replace(self.batch, requests=missing)

    def connected(self) -> None:
        """Handle a new connection: assume nodes, because the gateway soon reports if it has none."""
        self._count_wait()
        self.served = True

    def process(self, line: BatchLine) -> None:
        """Process one line of the answer. Raises GenerationFailed, GatewayLost."""
        self._count_wait()
        if line.error is not None:
            raise GenerationFailed(f"the gateway gave up: {line.error}")
        if line.completion is not None:
            self._accept(line.completion)
        elif (progress := line.end or line.progress) is not None:
            if progress.tokens > self._latest.tokens or progress.joining_events > self._moves:
                self._progress_s = self._counted_s
            self._latest, self._moves = progress, progress.joining_events
            self.served = progress.members > 0
            if line.end is not None and not self.finished:
                raise GatewayLost("it ended the batch with completions missing")

    def cut(self) -> None:
        """Handle a lost connection. Tokens in flight are lost unless the gateway keeps them."""
        self._count_wait()
        self._count_losses()
        self._lost = self._latest.discarded, max(0, self._latest.tokens - self._finished_tokens)
        self._latest, self._finished_tokens, self.served = NO_PROGRESS, 0, False

    def _count_losses(self) -> None:
        """Count the losses of the previous connection.

        A gateway that kept something also reports what it discarded.
        """
        (discarded, in_flight), kept = self._lost, self._latest.reused
        self._discarded += max(0, in_flight - kept) + (0 if kept else discarded)
        self._lost = 0, 0

    def result(self) -> Generated:
        self._count_losses()
        completions = [self.done[request.index] for request in self.batch.requests]
        return Generated(completions, self._discarded + self._latest.discarded, self._wait_s)

    def is_log_due(self) -> bool:
        """Return whether to log again that the batch waits, at most once in LOG_WAITING_S."""
        is_due = self._counted_s - self._logged_s >= LOG_WAITING_S
        if is_due:
            self._logged_s = self._counted_s
        return is_due

    def _count_wait(self) -> None:
        """Count the time since the gateway's last line as a wait if no node could serve."""
        now_s = self._clock()
        self._wait_s += 0.0 if self.served else now_s - self._counted_s
        self._counted_s = now_s

    def _check(self, completion: Completion) -> None:
        wanted = self.batch.policy.label
        if completion.policy != wanted:
            raise GenerationFailed(
                f"node {completion.node} answered from policy {completion.policy}, not {wanted}"
            )
        if len(completion.logprobs) != len(completion.token_ids):
            raise GenerationFailed(f"node {completion.node} sent tokens without their log-probabilities")

    def _accept(self, completion: Completion) -> None:
        self._check(completion)
        self._progress_s = self._counted_s
        self.served = True
        self._finished_tokens += len(completion.token_ids)
        if completion.index not in self.done:
            self.done[completion.index] = completion
            self._arrived(completion)


def _refused(request: CompletionRequest, policy: str) -> Completion:
    return Completion(request.index, [], [], REFUSED, policy, NO_NODE, "the prompt is empty")


def body_of(batch: Batch) -> bytes:
    """Encode the batch, with each prompt once for all its samples."""
    lines = [to_json(replace(batch, requests=[]))]
    for prompt, requests in groupby(batch.requests, key=lambda request: request.prompt_token_ids):
        samples = [Sample(request.index, request.seed) for request in requests]
        lines.append(to_json(PromptLine(prompt, samples)))
    return b"\n".join(lines)


def _pieces(body: bytes) -> Iterator[bytes]:
    """Yield the body in pieces: a whole body would be copied again for every partial socket write."""
    for start in range(0, len(body), PIECE_SIZE):
        yield body[start : start + PIECE_SIZE]


def _split(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Yield the complete lines of a byte stream; drop an unfinished last line."""
    rest = b""
    for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        yield from (line for line in lines if line)
