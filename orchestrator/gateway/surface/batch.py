"""A trainer's batch: each of its requests is a job, and the answer is written line by line as they finish."""

from __future__ import annotations

import asyncio
import math
from array import array
from collections.abc import AsyncGenerator

import msgspec
import structlog

from orchestrator.gateway.job import Job, RequestRefused, WeightsRefused
from orchestrator.gateway.routing.dispatch import Completer, Ledger
from orchestrator.gateway.routing.members import Members
from orchestrator.gateway.surface.admission import Prompt
from policies.serving.member import Row
from policies.serving.wire import CUT, REFUSED, Batch, BatchLine, Completion, Progress, Sample

log = structlog.get_logger()

PROGRESS_S = 0.25
PROMPT_TOKEN_SIZE = 4
AT_ONCE = 100  # requests that begin, or end, in one round of the event loop
_encode = msgspec.json.Encoder().encode


class BatchRun:
    """One batch under way.

    Args:
        batch: what is asked for, but for its prompts.
        prompts: the prompts.
        members: who may do it.
        completer: has it done.
        ledger: the gateway's counts; this batch tells what was owed.
    """

    def __init__(
        self, batch: Batch, prompts: list[Prompt], members: Members, completer: Completer, ledger: Ledger
    ) -> None:
        self._batch = batch
        self._policy = batch.policy.label
        self._members = members
        self._completer = completer
        self._ledger = ledger
        self._prompts = prompts
        self._count = self._open = sum(len(prompt.samples) for prompt in prompts)
        self._jobs: list[Job] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._lines: list[BatchLine] = []
        self._news = asyncio.Event()
        self._owed, ledger.owed = ledger.owed, 0
        self._complete = False
        self._patience_s = math.inf if batch.patience_s is None else batch.patience_s

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """Yield the answer in whole lines: completions as they are done, progress in between, at last `end` or
        `error`; before the end of one that nobody was there for, what there is of each.

        Closing the iterator early gives up the batch and frees its places.
        """
        self._members.want(self._batch.policy, self._count, self._batch.recovery)
        starting = asyncio.ensure_future(self._start())
        starting.add_done_callback(self._say_if_broken)
        loop = asyncio.get_running_loop()
        left, ended = self._count, False
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
                    there_at_s = now_s if self._members.anyone() else max(there_at_s, moved_at_s)
                    ended = now_s - moved_at_s > self._batch.deadline_s
                    lines.append(BatchLine(error=self._too_late()) if ended else BatchLine(progress=progress))
                    if not ended and now_s - there_at_s > self._patience_s:
                        lines += self._cut()
                        left = 0
                    progress_at_s = now_s + PROGRESS_S
                if lines:
                    yield b"".join([_encode(line) + b"\n" for line in lines])
            if not ended:
                self._complete = True
                self._ledger.delivered += self._tokens()
                yield _encode(BatchLine(end=self._progress())) + b"\n"
        finally:
            starting.cancel()
            self._finish(self._open)
            await self._end()
            if not self._complete:
                self._give_up()

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
        """Begin all requests, some at a time."""
        for prompt in self._prompts:
            group = hash(prompt.token_ids.tobytes())
            for number, sample in enumerate(prompt.samples):
                if len(self._tasks) % AT_ONCE == 0:
                    await asyncio.sleep(0)
                size = 0 if number else PROMPT_TOKEN_SIZE * len(prompt.token_ids)
                job = self._job(prompt.token_ids, sample, group, size)
                self._jobs.append(job)
                task = asyncio.ensure_future(self._see_through(sample.index, job))
                task.add_done_callback(self._say_if_broken)
                self._tasks.append(task)

    async def _end(self) -> None:
        """End those that are left, some at a time: first those that wait, or they would get what becomes free."""
        left = [task for task in reversed(self._tasks) if not task.done()]
        for first in range(0, len(left), AT_ONCE):
            for task in left[first : first + AT_ONCE]:
                task.cancel()
            await asyncio.sleep(0)
        for task in left:  # all at once would be a long piece of work by itself
            if not task.done():
                await asyncio.wait([task])

    def _job(self, prompt: array[int], sample: Sample, group: int, size: int) -> Job:
        return Job(
            body={**self._batch.sampling, "prompt": prompt, "seed": sample.seed},
            policy=self._policy,
            group=group,
            prompt_tokens=len(prompt),
            recovery=self._batch.recovery,
            prompt_token_ids=prompt,
            admitted=True,
            prompt_size=size,
        )

    async def _see_through(self, index: int, job: Job) -> None:
        """Have one request completed and put its line into the answer."""
        try:
            got = await self._completer.complete(job)
        except WeightsRefused as error:
            self._say(BatchLine(error=f"request {index}: {error}"))
        except RequestRefused as error:
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
            self._say(BatchLine(completion=refused))
        else:
            completion = Completion(
                index=index,
                token_ids=got.token_ids,
                logprobs=got.logprobs,
                finish_reason=got.finish_reason,
                policy=got.policy,
                node=got.node,
                handed_over=job.handed_over,
            )
            self._say(BatchLine(completion=completion))

    def _cut(self) -> list[BatchLine]:
        """What there is of each that is not done. All of them wait, and may be gone on with."""
        samples = (sample for prompt in self._prompts for sample in prompt.samples)
        begun = zip(samples, self._jobs, self._tasks, strict=False)  # not all may have been begun
        return [
            BatchLine(cut=_cut(one.index, job)) for one, job, task in begun if job.token_ids and not task.done()
        ]

    def _say(self, line: BatchLine) -> None:
        self._finish(int(line.completion is not None))  # whether its asker reads it yet or not
        self._lines.append(line)
        self._news.set()

    def _serving(self) -> int:
        return len(self._members.serving(self._policy))

    def _tokens(self) -> int:
        return sum(len(job.token_ids) for job in self._jobs)

    def _discarded(self) -> int:
        return self._owed + sum(job.discarded for job in self._jobs)

    def _progress(self) -> Progress:
        waiting = sum(job.waiting for job in self._jobs) + self._count - len(self._jobs)
        moves = self._members.comers.moves
        return Progress(self._tokens(), self._discarded(), self._serving(), waiting, moves)

    def _too_late(self) -> str:
        policy, within = self._policy, f"within {self._batch.deadline_s:g} s (`rollout.deadline_s`)"
        last = next((job.last_failure for job in self._jobs if job.last_failure), "")
        failure = f"; a failure was {last}" if last else ""
        if not self._serving():
            held = ", ".join(f"{row.node} {_holds(row)}" for row in self._members.rows)
            return f"no node could serve policy {policy} {within}; {held or 'there is no member'}{failure}"
        return f"policy {policy}: no token came {within}{failure}"

    def _give_up(self) -> None:
        """What was gathered, and what was owed before, nobody was told of: the next batch owes it."""
        tokens = self._tokens()
        self._ledger.discarded += tokens
        self._ledger.owed += tokens + self._discarded()
        log.warning("batch_given_up", policy=self._policy, tokens=tokens)
        # The frames of cancelled tasks hold each other, and garbage is looked for rarely.
        for prompt in self._prompts:
            del prompt.token_ids[:]

    def _say_if_broken(self, task: asyncio.Task[None]) -> None:
        """A fault of this program ends the batch by name, not in silence."""
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("request_broke", exc_info=error)
            self._say(BatchLine(error=f"the gateway failed: {error!r}"))


def _cut(index: int, job: Job) -> Completion:
    made = job.token_ids, job.logprobs
    return Completion(index, *made, CUT, job.policy, "", handed_over=job.handed_over)


def _holds(row: Row) -> str:
    return f"is unfit: {row.unfit}" if row.unfit else f"holds {row.policy or 'base weights'}"
