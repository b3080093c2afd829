"""One attempt at a job on one member, as the rest of the gateway sees it: its progress and its end."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from enum import StrEnum

from grpo_orch.orchestrator.gateway.job import Job


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
