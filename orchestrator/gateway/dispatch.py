"""A batch's life: each of its requests on some member until one finishes it, told line by line as it happens.

A request whose node is lost starts over elsewhere with the same seed, which gives the same tokens; those that had
arrived are counted as discarded. Nothing fails for want of a node, until nothing has moved for the batch's
deadline.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass

import structlog

from orchestrator.gateway import upstream
from orchestrator.gateway.members import Members, Place
from orchestrator.gateway.upstream import Answer, NodeFailed, RequestRefused
from policies.wire import Batch, BatchLine, Completion, CompletionRequest, Progress

log = structlog.get_logger()

PROGRESS_S = 0.25
RETRY_S = 0.05  # before the second try of a request, doubled for each later one
RETRY_MAX_S = 1.0


@dataclass(slots=True)
class Ledger:
    """Tokens since the gateway's start; `owed` are of batches whose asker went away, not yet told to anyone."""

    delivered: int = 0
    discarded: int = 0
    handovers: int = 0
    owed: int = 0


class BatchRun:
    """One batch under way.

    Args:
        batch: what is asked for.
        members: who may do it.
        token: the run's secret, which nodes demand.
        ledger: the gateway's counts; this batch takes over what is owed.
    """

    def __init__(self, batch: Batch, members: Members, token: str, ledger: Ledger) -> None:
        self._batch = batch
        self._policy = batch.policy.label
        self._members = members
        self._token = token
        self._ledger = ledger
        self._lines: asyncio.Queue[BatchLine] = asyncio.Queue()
        self._tokens = 0  # arrived and kept so far
        self._discarded, ledger.owed = ledger.owed, 0
        self._waiting = 0
        self._last_failure = ""
        self._complete = False

    async def lines(self) -> AsyncGenerator[BatchLine, None]:
        """Yield completions as they are done, progress in between, and at last `end` or `error`.

        Closing the iterator early gives up the batch and frees its places.
        """
        tasks = [asyncio.ensure_future(self._see_through(request)) for request in self._batch.requests]
        for task in tasks:
            task.add_done_callback(self._say_if_broken)
        left, ended = len(tasks), False
        most, moved_at_s = 0, time.monotonic()
        progress_at_s = moved_at_s + PROGRESS_S
        try:
            while left and not ended:
                line = await self._next(progress_at_s - time.monotonic())
                now_s = time.monotonic()
                if line is not None:
                    left, ended = left - 1, line.error is not None
                    moved_at_s = now_s
                    yield line
                elif self._tokens > most:
                    most, moved_at_s = self._tokens, now_s
                elif now_s - moved_at_s > self._batch.deadline_s:
                    ended = True
                    yield BatchLine(error=self._too_late())
                if now_s >= progress_at_s and not ended:
                    progress_at_s = now_s + PROGRESS_S
                    yield BatchLine(progress=self._progress())
            if not ended:
                self._complete = True
                self._ledger.delivered += self._tokens
                yield BatchLine(end=self._progress())
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if not self._complete:
                self._give_up()

    async def _next(self, timeout_s: float) -> BatchLine | None:
        try:
            async with asyncio.timeout(max(0.0, timeout_s)):
                return await self._lines.get()
        except TimeoutError:
            return None

    async def _see_through(self, request: CompletionRequest) -> None:
        """Have one request completed, however many members that takes, and put its line into the answer."""
        group = tuple(request.prompt_token_ids)
        avoid: str | None = None
        wait_s = RETRY_S
        while True:
            self._waiting += 1
            try:
                place = await self._members.place(self._policy, group, avoid)
            finally:
                self._waiting -= 1
            try:
                answer = await self._attempt(place, request)
            except RequestRefused as error:
                self._lines.put_nowait(BatchLine(error=f"request {request.index}: {error}"))
                return
            except NodeFailed as error:
                self._note_failure(place, error)
                avoid = place.node
            else:
                self._lines.put_nowait(BatchLine(completion=self._completion(request, answer, place)))
                return
            await asyncio.sleep(wait_s)
            wait_s = min(RETRY_MAX_S, 2 * wait_s)

    async def _attempt(self, place: Place, request: CompletionRequest) -> Answer:
        """One try on one member. The tokens of a try that did not finish are counted as discarded."""
        arrived = 0

        def count(tokens: int) -> None:
            nonlocal arrived
            arrived += tokens
            self._tokens += tokens

        headers = upstream.headers_of(self._token, place.boot_id, self._policy)
        body = upstream.body_of(request, self._batch.sampling)
        try:
            return await place.run(upstream.complete(place.link.session, place.url, headers, body, count))
        except NodeFailed:
            self._tokens -= arrived
            self._discarded += arrived
            self._ledger.discarded += arrived
            raise
        finally:
            self._members.give_back(place)

    def _note_failure(self, place: Place, error: NodeFailed) -> None:
        self._ledger.handovers += 1
        self._last_failure = f"{place.node}: {error}"
        self._members.doubt(place, str(error))

    def _completion(self, request: CompletionRequest, answer: Answer, place: Place) -> Completion:
        return Completion(
            index=request.index,
            token_ids=answer.token_ids,
            logprobs=answer.logprobs,
            finish_reason=answer.finish_reason,
            policy=self._policy,
            node=place.node,
        )

    def _serving(self) -> int:
        return len(self._members.table.serving(self._policy))

    def _progress(self) -> Progress:
        return Progress(self._tokens, self._discarded, self._serving(), self._waiting)

    def _too_late(self) -> str:
        within = f"within {self._batch.deadline_s:g} s (`rollout.deadline_s`)"
        failure = f"; the last failure was {self._last_failure}" if self._last_failure else ""
        if not self._serving():
            held = ", ".join(
                f"{row.node} holds {row.policy or 'base weights'}" for row in self._members.table.rows
            )
            return f"no node could serve policy {self._policy} {within}; {held or 'there is no member'}{failure}"
        return f"policy {self._policy}: no token came {within}{failure}"

    def _give_up(self) -> None:
        """All that was gathered, and all that was owed before, is told to nobody: the next batch owes it."""
        self._ledger.discarded += self._tokens
        self._ledger.owed += self._tokens + self._discarded
        log.warning("batch_given_up", policy=self._policy, tokens=self._tokens)

    def _say_if_broken(self, task: asyncio.Task[None]) -> None:
        """A fault of this program ends the batch with its name, not in silence."""
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("request_broke", exc_info=error)
            self._lines.put_nowait(BatchLine(error=f"the gateway failed: {error!r}"))
