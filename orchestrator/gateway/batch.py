"""A trainer's batch: each of its requests a job, told line by line as it happens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import msgspec
import structlog

from orchestrator.gateway.dispatch import Completer, Ledger
from orchestrator.gateway.job import Job, RequestRefused
from orchestrator.gateway.members import Members
from policies.membership import Wanted
from policies.wire import Batch, BatchLine, Completion, CompletionRequest, Progress

log = structlog.get_logger()

PROGRESS_S = 0.25
_encode = msgspec.json.Encoder().encode


class BatchRun:
    """One batch under way.

    Args:
        batch: what is asked for.
        members: who may do it.
        completer: has it done.
        ledger: the gateway's counts; this batch takes over what is owed.
    """

    def __init__(self, batch: Batch, members: Members, completer: Completer, ledger: Ledger) -> None:
        self._batch = batch
        self._wanted = Wanted(batch.policy.label, batch.max_staleness_steps)
        self._members = members
        self._completer = completer
        self._ledger = ledger
        self._jobs = [self._job(request) for request in batch.requests]
        self._lines: list[BatchLine] = []
        self._news = asyncio.Event()
        self._owed, ledger.owed = ledger.owed, 0
        self._complete = False

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """Yield the answer, one or more whole lines at a time: completions as they are done, progress in between,
        and at last `end` or `error`.

        Closing the iterator early gives up the batch and frees its places.
        """
        pairs = zip(self._batch.requests, self._jobs, strict=True)
        tasks = [asyncio.ensure_future(self._see_through(request, job)) for request, job in pairs]
        for task in tasks:
            task.add_done_callback(self._say_if_broken)
        loop = asyncio.get_running_loop()
        left, ended = len(tasks), False
        most, moved_at_s = 0, loop.time()
        progress_at_s = moved_at_s + PROGRESS_S
        try:
            while left and not ended:
                lines = await self._next(progress_at_s - loop.time())
                now_s, left = loop.time(), left - len(lines)
                ended = any(line.error is not None for line in lines)
                if lines:
                    moved_at_s = now_s
                if now_s >= progress_at_s and left and not ended:
                    progress = self._progress()
                    if progress.tokens > most:
                        most, moved_at_s = progress.tokens, now_s
                    ended = now_s - moved_at_s > self._batch.deadline_s
                    lines.append(BatchLine(error=self._too_late()) if ended else BatchLine(progress=progress))
                    progress_at_s = now_s + PROGRESS_S
                if lines:
                    yield b"".join([_encode(line) + b"\n" for line in lines])
            if not ended:
                self._complete = True
                self._ledger.delivered += self._tokens()
                yield _encode(BatchLine(end=self._progress())) + b"\n"
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if not self._complete:
                self._give_up()

    async def _next(self, timeout_s: float) -> list[BatchLine]:
        """Return the lines that there are; wait until there is one or the time is over."""
        if not self._lines:
            self._news.clear()
            try:
                async with asyncio.timeout(max(0.0, timeout_s)):
                    await self._news.wait()
            except TimeoutError:
                pass
        lines, self._lines = self._lines, []
        return lines

    def _job(self, request: CompletionRequest) -> Job:
        prompt = request.prompt_token_ids
        return Job(
            body={**self._batch.sampling, "prompt": prompt, "seed": request.seed},
            policy=self._batch.policy.label,
            group=hash(tuple(prompt)),
            prompt_tokens=len(prompt),
            max_staleness_steps=self._batch.max_staleness_steps,
            recovery=self._batch.recovery,
            prompt_token_ids=prompt,
            admitted=True,
        )

    async def _see_through(self, request: CompletionRequest, job: Job) -> None:
        """Have one request completed and put its line into the answer."""
        try:
            got = await self._completer.complete(job)
        except RequestRefused as error:
            self._say(BatchLine(error=f"request {request.index}: {error}"))
            return
        completion = Completion(
            index=request.index,
            token_ids=got.token_ids,
            logprobs=got.logprobs,
            finish_reason=got.finish_reason,
            policy=got.policy,
            node=got.node,
        )
        self._say(BatchLine(completion=completion))

    def _say(self, line: BatchLine) -> None:
        self._lines.append(line)
        self._news.set()

    def _serving(self) -> int:
        return len(self._members.table.serving(self._wanted))

    def _tokens(self) -> int:
        return sum(len(job.token_ids) for job in self._jobs)

    def _discarded(self) -> int:
        return self._owed + sum(job.discarded for job in self._jobs)

    def _progress(self) -> Progress:
        waiting = sum(job.waiting for job in self._jobs)
        return Progress(self._tokens(), self._discarded(), self._serving(), waiting)

    def _too_late(self) -> str:
        policy, within = self._wanted.label, f"within {self._batch.deadline_s:g} s (`rollout.deadline_s`)"
        last = next((job.last_failure for job in self._jobs if job.last_failure), "")
        failure = f"; a failure was {last}" if last else ""
        if not self._serving():
            held = ", ".join(
                f"{row.node} holds {row.policy or 'base weights'}" for row in self._members.table.rows
            )
            return f"no node could serve policy {policy} {within}; {held or 'there is no member'}{failure}"
        return f"policy {policy}: no token came {within}{failure}"

    def _give_up(self) -> None:
        """All that was gathered, and all that was owed before, is told to nobody: the next batch owes it."""
        tokens = self._tokens()
        self._ledger.discarded += tokens
        self._ledger.owed += tokens + self._discarded()
        log.warning("batch_given_up", policy=self._wanted.label, tokens=tokens)

    def _say_if_broken(self, task: asyncio.Task[None]) -> None:
        """A fault of this program ends the batch with its name, not in silence."""
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("request_broke", exc_info=error)
            self._say(BatchLine(error=f"the gateway failed: {error!r}"))
