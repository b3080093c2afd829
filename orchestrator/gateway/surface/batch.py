"""A trainer's batch: each of its requests is a job, and the answer is written line by line as they finish.

A trainer that dies loses nothing of it: its requests go on, and when it asks for the same again, which it does
since what it asks for follows from seed, data and policies, they are its own again (`kept.py`).
"""

from __future__ import annotations

import asyncio
import math
from array import array
from collections.abc import AsyncGenerator
from functools import partial

import msgspec
import structlog

from orchestrator.gateway.job import Finished, Job, RequestRefused, WeightsRefused
from orchestrator.gateway.routing.dispatch import Completer, Ledger
from orchestrator.gateway.routing.members import Members
from orchestrator.gateway.surface.admission import Prompt
from orchestrator.gateway.surface.kept import (
    CHUNK_REQUESTS,
    BatchRequest,
    OrphanedRequests,
    begin,
    cancel,
    group_of,
    job_of,
    key_of,
)
from policies.serving.member import Row
from policies.serving.wire import CUT, REFUSED, Batch, BatchLine, Completion, Progress, Sample

log = structlog.get_logger()

PROGRESS_S = 0.25
PROMPT_TOKEN_SIZE = 4
_encode = msgspec.json.Encoder().encode


class BatchRun:
    """One batch under way.

    Args:
        batch: what is asked for, but for its prompts.
        prompts: the prompts.
        members: who may do it.
        completer: has it done.
        ledger: the gateway's counts; this batch tells what was unreported_discards.
        kept: what earlier batches left.
    """

    def __init__(
        self,
        batch: Batch,
        prompts: list[Prompt],
        members: Members,
        completer: Completer,
        ledger: Ledger,
        kept: OrphanedRequests,
    ) -> None:
        self._batch = batch
        self._policy = batch.policy.label
        self._members = members
        self._completer = completer
        self._ledger = ledger
        self._prompts = prompts
        self._count = self._open = sum(len(prompt.samples) for prompt in prompts)
        self._orphans = kept
        self._resumed_tokens = 0
        self._waits_for_other_policy = (
            0  # how often members were at work for another policy, and none for this one
        )
        self._requests: list[BatchRequest] = []
        self._sampling = msgspec.json.encode(batch.sampling)
        self._closed = False
        self._lines: list[BatchLine] = []
        self._news = asyncio.Event()
        self._unreported, ledger.unreported_discards = ledger.unreported_discards, 0
        self._complete = False
        self._patience_s = math.inf if batch.patience_s is None else batch.patience_s

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """Yield the answer in whole lines: completions as they are done, progress in between, at last `end` or
        `error`; before the end of one that nobody was there for, what there is of each.

        Closing the iterator early leaves the batch to the next trainer that asks for it.
        """
        self._members.want(self._batch.policy, self._count, self._batch.recovery)
        self._orphans.expire_superseded(self._policy)
        starting = asyncio.ensure_future(self._start())
        starting.add_done_callback(self._report_failure)
        loop = asyncio.get_running_loop()
        left, ended = self._count, False  # with an error
        most, moves, moved_at_s = 0, 0, loop.time()
        progress_at_s, there_at_s = moved_at_s + PROGRESS_S, moved_at_s
        try:
            while left and not ended:
                lines = await self._next(progress_at_s - loop.time())
                now_s, left = loop.time(), left - len(lines)
                ended = any(line.error is not None for line in lines)
                if lines:
                    moved_at_s = now_s
                if now_s >= progress_at_s and left and not ended:
                    progress = self._progress()
                    if progress.tokens > most or progress.moves != moves:
                        most, moves, moved_at_s = max(most, progress.tokens), progress.moves, now_s
                    there_at_s = now_s if self._members.has_usable_member() else max(there_at_s, moved_at_s)
                    ended = now_s - moved_at_s > self._batch.deadline_s
                    lines.append(
                        BatchLine(error=self._deadline_message()) if ended else BatchLine(progress=progress)
                    )
                    if not ended and now_s - there_at_s > self._patience_s:
                        lines += self._partial_lines()
                        left = 0
                    progress_at_s = now_s + PROGRESS_S
                if lines:
                    yield b"".join([_encode(line) + b"\n" for line in lines])
            if not ended:
                self._complete = True
                for one in self._requests:
                    self._deliver(one)
                yield _encode(BatchLine(end=self._progress())) + b"\n"
        finally:
            starting.cancel()
            self._closed = True
            if self._complete or ended:
                self._finish(self._open)
                if ended:
                    self._abandon()
                self._orphans.keep(self._batch, [one for one in self._requests if one.task.done()])
                await cancel(self._requests)
            else:
                self._orphan()

    def _finish(self, requests: int) -> None:
        """So many more requests are done: fewer members need the policy."""
        done = min(requests, self._open)
        self._open -= done
        if done:
            self._members.finish(self._policy, done)

    async def _next(self, timeout_s: float) -> list[BatchLine]:
        """Return the lines that there are, waiting `timeout_s` for the first."""
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
        """Begin all requests, some at a time; those that are under way already are taken over."""
        for prompt in self._prompts:
            group = group_of(prompt.token_ids)
            for number, sample in enumerate(prompt.samples):
                if len(self._requests) % CHUNK_REQUESTS == 0:
                    await asyncio.sleep(0)
                size = 0 if number else PROMPT_TOKEN_SIZE * len(prompt.token_ids)
                asked = self._begin(prompt.token_ids, sample, group, size)
                self._requests.append(asked)
                asked.task.add_done_callback(partial(self._done, sample.index, asked))

    def _begin(self, prompt: array[int], sample: Sample, group: int, size: int) -> BatchRequest:
        key = key_of(self._batch, self._sampling, group, sample.seed)
        if (found := self._orphans.take(key)) is not None:
            self._resumed_tokens += len(found.job.token_ids)
            found.job.prompt_token_ids = found.job.body["prompt"] = prompt  # its own, since that one is emptied
            return found
        job = job_of(self._batch, prompt, group, sample.seed, size)
        return begin(self._completer, key, job)

    def _done(self, index: int, asked: BatchRequest, task: asyncio.Future[Finished]) -> None:
        """Put a request's line into the answer."""
        if not (self._closed or task.cancelled()):
            line = _line(index, asked.job, task)
            if line.completion is not None:
                self._deliver(asked)
            self._emit(line)

    def _partial_lines(self) -> list[BatchLine]:
        """What there is of each that is not done. All of them wait, and may be gone on with."""
        samples = (sample for prompt in self._prompts for sample in prompt.samples)
        begun = zip(samples, self._requests, strict=False)  # not all may have been begun
        return [
            BatchLine(cut=_partial(sample.index, one.job))
            for sample, one in begun
            if one.job.token_ids and not one.task.done()
        ]

    def _emit(self, line: BatchLine) -> None:
        self._finish(int(line.completion is not None))  # whether its asker reads it yet or not
        self._lines.append(line)
        self._news.set()

    def _serving(self) -> int:
        return len(self._members.serving(self._policy))

    def _tokens(self) -> int:
        return sum(len(one.job.token_ids) for one in self._requests)

    def _discarded(self) -> int:
        return self._unreported + sum(one.job.discarded for one in self._requests)

    def _progress(self) -> Progress:
        waiting = sum(one.job.is_waiting for one in self._requests) + self._count - len(self._requests)
        serving = self._serving()
        self._waits_for_other_policy += not serving and self._members.is_busy_with_other_policy(self._policy)
        moves = self._members.joining_nodes.moves + self._waits_for_other_policy
        return Progress(self._tokens(), self._discarded(), serving, waiting, moves, self._resumed_tokens)

    def _deadline_message(self) -> str:
        policy, within = self._policy, f"within {self._batch.deadline_s:g} s (`rollout.deadline_s`)"
        last = next((one.job.last_failure for one in self._requests if one.job.last_failure), "")
        failure = f"; a failure was {last}" if last else ""
        if not self._serving():
            held = ", ".join(f"{row.node} {_holds(row)}" for row in self._members.rows)
            return f"no node could serve policy {policy} {within}; {held or 'there is no member'}{failure}"
        return f"policy {policy}: no token came {within}{failure}"

    def _deliver(self, asked: BatchRequest) -> None:
        """Its line is on its way. Its asker may store it before the batch is over, and not ask for it again."""
        self._ledger.delivered += 0 if asked.delivered else len(asked.job.token_ids)
        asked.delivered = True

    def _abandon(self) -> None:
        """It ends with an error, and what is under way with it."""
        tokens = sum(len(one.job.token_ids) for one in self._requests if not one.task.done())
        self._ledger.discarded += tokens
        self._carry_discards(tokens)

    def _carry_discards(self, tokens: int = 0) -> None:
        """Its asker was told of nothing that was lost: the next batch tells it, and of these tokens."""
        self._ledger.unreported_discards += tokens + self._discarded()
        for one in self._requests:
            one.job.discarded = 0

    def _orphan(self) -> None:
        """Its asker has gone."""
        self._carry_discards()
        running = sum(not one.task.done() for one in self._requests)
        self._finish(self._open - running)
        self._orphans.keep(self._batch, self._requests)
        log.warning("batch_orphaned", policy=self._policy, tokens=self._tokens(), running=running)

    def _report_failure(self, task: asyncio.Task[None]) -> None:
        """A fault of this program ends the batch by name, not in silence."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._emit(_failed(error))


def _line(index: int, job: Job, task: asyncio.Future[Finished]) -> BatchLine:
    """What came of a request that is done."""
    match task.exception():
        case None:
            got = task.result()
            completion = Completion(
                index=index,
                token_ids=got.token_ids,
                logprobs=got.logprobs,
                finish_reason=got.finish_reason,
                policy=got.policy,
                node=got.node,
                handed_over=job.handed_over,
            )
            return BatchLine(completion=completion)
        case WeightsRefused() as error:
            return BatchLine(error=f"request {index}: {error}")
        case RequestRefused() as error:
            refused = Completion(
                index=index,
                token_ids=[],
                logprobs=[],
                finish_reason=REFUSED,
                policy=job.policy,
                node=", ".join(sorted(job.refused_by)),
                refused=str(error),
                limit_tokens=error.limit_tokens,
            )
            return BatchLine(completion=refused)
        case error:
            return _failed(error)


def _failed(error: BaseException) -> BatchLine:
    log.error("request_failed", exc_info=error)
    return BatchLine(error=f"the gateway failed: {error!r}")


def _partial(index: int, job: Job) -> Completion:
    made = job.token_ids, job.logprobs
    return Completion(index, *made, CUT, job.policy, "", handed_over=job.handed_over)


def _holds(row: Row) -> str:
    return f"is unfit: {row.unfit}" if row.unfit else f"holds {row.policy or 'base weights'}"
