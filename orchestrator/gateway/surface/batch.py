"""A trainer's batch: each request is a job, and the answer is written line by line as jobs finish.

If the trainer dies, its requests keep running. The restarted trainer makes the same requests, since they follow
from seed, data and policies, and takes them over (`orphaned_requests.py`).
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncGenerator
from functools import partial

import msgspec
import structlog

from grpo_orch.orchestrator.gateway.job import Finished, Job, RequestRefused, WeightsRefused
from grpo_orch.orchestrator.gateway.routing.dispatch import Ledger
from grpo_orch.orchestrator.gateway.routing.gateway_members import Members
from grpo_orch.orchestrator.gateway.surface.admission import Prompt
from grpo_orch.orchestrator.gateway.surface.orphaned_requests import (
    CHUNK_REQUESTS,
    BatchRequest,
    OrphanedRequests,
    cancel,
    group_of,
    job_of,
    key_of,
)
from grpo_orch.policies.serving.membership import Member
from grpo_orch.policies.serving.wire import REFUSED, Batch, BatchLine, Completion, Progress, Sample

log = structlog.get_logger()

PROGRESS_S = 0.25
PROMPT_TOKEN_SIZE = 4
_encode = msgspec.json.Encoder().encode


class BatchRun:
    """One running batch.

    Args:
        batch: the batch, without its prompts.
        prompts: the prompts.
        members: the gateway's.
        ledger: the gateway's counts; this batch reports and clears `unreported_discards`.
        orphans: requests that earlier batches left.
    """

    def __init__(
        self,
        batch: Batch,
        prompts: list[Prompt],
        members: Members,
        ledger: Ledger,
        orphans: OrphanedRequests,
    ) -> None:
        self._batch = batch
        self._policy = batch.policy.label
        self._members = members
        self._ledger = ledger
        self._prompts = prompts
        self._count = sum(len(prompt.samples) for prompt in prompts)
        self._orphans = orphans
        self._resumed_tokens = 0
        self._busy_elsewhere = 0  # times that no member served this policy while some finished another one
        self._requests: list[BatchRequest] = []
        self._sampling = msgspec.json.encode(batch.sampling)
        self._is_closed = False
        self._lines: list[BatchLine] = []
        self._news = asyncio.Event()
        self._unreported, ledger.unreported_discards = ledger.unreported_discards, 0
        self._is_complete = False

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """Yield the answer in whole lines: completions as they finish, progress in between, then `end` or `error`.

        Closing the iterator early leaves the requests for the next trainer that makes the same ones.
        """
        self._members.want(self._batch.policy, 0, self._batch.recovery)
        self._orphans.expire_superseded(self._policy)
        starting = asyncio.ensure_future(self._start())
        starting.add_done_callback(self._report_failure)
        loop = asyncio.get_running_loop()
        remaining, has_failed = self._count, False
        most_tokens, moves, moved_at_s = 0, 0, loop.time()
        progress_at_s = moved_at_s + PROGRESS_S
        try:
            while remaining and not has_failed:
                lines = await self._next(progress_at_s - loop.time())
                now_s, remaining = loop.time(), remaining - len(lines)
                has_failed = any(line.error is not None for line in lines)
                if lines:
                    moved_at_s = now_s
                if now_s >= progress_at_s and remaining and not has_failed:
                    progress = self._progress()
                    if progress.tokens > most_tokens or progress.joining_events != moves:
                        most_tokens, moves, moved_at_s = (
                            max(most_tokens, progress.tokens),
                            progress.joining_events,
                            now_s,
                        )
                    if now_s - moved_at_s > self._batch.deadline_s:
                        has_failed = True
                        lines.append(BatchLine(error=self._deadline_message()))
                    else:
                        lines.append(BatchLine(progress=progress))
                    progress_at_s = now_s + PROGRESS_S
                if lines:
                    yield b"".join([_encode(line) + b"\n" for line in lines])
            if not has_failed:
                self._is_complete = True
                for request in self._requests:
                    self._deliver(request)
                yield _encode(BatchLine(end=self._progress())) + b"\n"
        finally:
            starting.cancel()
            self._is_closed = True
            if self._is_complete or has_failed:
                if has_failed:
                    self._abandon()
                self._orphans.keep(self._batch, [request for request in self._requests if request.task.done()])
                await cancel(self._requests)
            else:
                self._orphan()

    async def _next(self, timeout_s: float) -> list[BatchLine]:
        """Return the available lines, waiting up to `timeout_s` for the first."""
        if not self._lines:
            self._news.clear()
            try:
                async with asyncio.timeout(max(0.0, timeout_s)):
                    await self._news.wait()
            except TimeoutError:
                pass
        lines, self._lines = self._lines, []
        return lines

    async def _start(self) -> None:
        """Start all requests, CHUNK_REQUESTS at a time, or take over those that are already running."""
        for prompt in self._prompts:
            group = group_of(prompt.token_ids)
            for number, sample in enumerate(prompt.samples):
                if len(self._requests) % CHUNK_REQUESTS == 0:
                    await asyncio.sleep(0)
                size = 0 if number else PROMPT_TOKEN_SIZE * len(prompt.token_ids)
                request = self._begin(prompt.token_ids, sample, group, size)
                self._requests.append(request)
                request.task.add_done_callback(partial(self._done, sample.index, request))

    def _begin(self, prompt: array[int], sample: Sample, group: int, size: int) -> BatchRequest:
        key = key_of(self._batch, self._sampling, group, sample.seed)
        request = self._orphans.take(key)
        if request is None:
            return self._orphans.begin(self._batch, key, job_of(self._batch, prompt, group, sample.seed, size))
        self._resumed_tokens += len(request.job.token_ids)
        request.job.body["prompt"] = prompt  # the old array will be emptied
        return request

    def _done(self, index: int, request: BatchRequest, task: asyncio.Future[Finished]) -> None:
        """Add a finished request's line to the answer."""
        if not (self._is_closed or task.cancelled()):
            line = _line(index, request.job, task)
            if line.completion is not None:
                self._deliver(request)
            self._emit(line)

    def _emit(self, line: BatchLine) -> None:
        self._lines.append(line)
        self._news.set()

    def _serving(self) -> int:
        return len(self._members.table.serving(self._policy))

    def _tokens(self) -> int:
        return sum(len(request.job.token_ids) for request in self._requests)

    def _discarded(self) -> int:
        return self._unreported + sum(request.job.discarded for request in self._requests)

    def _progress(self) -> Progress:
        waiting = sum(request.job.is_waiting for request in self._requests) + self._count - len(self._requests)
        serving = self._serving()
        self._busy_elsewhere += not serving and self._members.is_busy_with_other_policy(self._policy)
        moves = self._members.joining_nodes.moves + self._busy_elsewhere
        return Progress(self._tokens(), self._discarded(), serving, waiting, moves, self._resumed_tokens)

    def _deadline_message(self) -> str:
        policy, within = self._policy, f"within {self._batch.deadline_s:g} s (`rollout.deadline_s`)"
        failures = (request.job.last_failure for request in self._requests)
        failure = next((f"; last failure: {failure}" for failure in failures if failure), "")
        if not self._serving():
            members = ", ".join(f"{row.node} {_holds(row)}" for row in self._members.table.members)
            return f"no node served policy {policy} {within}; {members or 'the fleet is empty'}{failure}"
        return f"no token of policy {policy} arrived {within}{failure}"

    def _deliver(self, request: BatchRequest) -> None:
        """Count a request as delivered, once. The trainer may store its line before the batch ends."""
        self._ledger.delivered += 0 if request.delivered else len(request.job.token_ids)
        request.delivered = True

    def _abandon(self) -> None:
        """Count the tokens of running requests as discarded, because the batch failed."""
        tokens = sum(len(request.job.token_ids) for request in self._requests if not request.task.done())
        self._ledger.discarded += tokens
        self._carry_discards(tokens)

    def _carry_discards(self, tokens: int = 0) -> None:
        """Leave the discarded tokens of this batch, and `tokens`, for the next batch to report."""
        self._ledger.unreported_discards += tokens + self._discarded()
        for request in self._requests:
            request.job.discarded = 0

    def _orphan(self) -> None:
        """Keep the requests running, because the trainer has disconnected."""
        self._carry_discards()
        running = sum(not request.task.done() for request in self._requests)
        self._orphans.keep(self._batch, self._requests)
        log.warning("batch_orphaned", policy=self._policy, tokens=self._tokens(), running=running)

    def _report_failure(self, task: asyncio.Task[None]) -> None:
        """End the batch with an error if starting its requests failed."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._emit(_failed(error))


def _line(index: int, job: Job, task: asyncio.Future[Finished]) -> BatchLine:
    """Return the line of a finished request."""
    match task.exception():
        case None:
            got = task.result()
            return BatchLine(completion=_completion(index, job, got.finish_reason, got.node))
        case WeightsRefused() as error:
            return BatchLine(error=f"request {index}: {error}")
        case RequestRefused() as error:
            nodes = ", ".join(sorted(job.refused_by))
            limit = error.limit_tokens
            return BatchLine(completion=Completion(index, [], [], REFUSED, job.policy, nodes, str(error), limit))
        case error:
            return _failed(error)


def _failed(error: BaseException) -> BatchLine:
    log.error("request_failed", exc_info=error)
    return BatchLine(error=f"internal error of the gateway: {error!r}")


def _completion(index: int, job: Job, finish_reason: str, node: str = "") -> Completion:
    handed_over = job.handed_over
    return Completion(index, job.token_ids, job.logprobs, finish_reason, job.policy, node, handed_over=handed_over)


def _holds(row: Member) -> str:
    return f"is unfit: {row.unfit}" if row.unfit else f"holds {row.policy or 'base weights'}"
