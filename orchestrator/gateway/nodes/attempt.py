"""One try of one job on one member, as the rest of the gateway sees it: how far it is, and how it ends."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from enum import StrEnum

from orchestrator.gateway.job import Job


class HandoverReason(StrEnum):
    """HandoverReason a job left a member."""

    LOST = "lost"  # the connection broke, or was never made
    CLOSED = "closed"  # nothing listens there any more
    REFUSED = "refused"  # it answered with an error
    BROKEN = "broken"  # what it sent makes no sense
    SILENT = "silent"
    TERM_ENDED = "left"  # its term ended
    DRAINED = "drained"
    REBALANCED = "shared"  # another has less to do


class NodeFailed(Exception):
    """The node did not finish the request; another one may."""

    def __init__(self, reason: HandoverReason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class End:
    """How a completion ended."""

    finish_reason: str
    stop_reason: int | str | None


class Attempt:
    """One try. Times are on the event loop's clock.

    Attributes:
        job: filled as tokens come.
        max_tokens: the job's.
        sent_s: when the request was sent.
        first_token_at_s: when its first token came; None before.
        last_event_s: when anything of it last came, or `sent_s`.
        last_queued_s: when it was last known to be waiting for its turn in the engine.
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
        """Whether it goes on from tokens that another member made."""
        return self._tokens_before > 0

    @property
    def tokens(self) -> int:
        """How many this try has brought."""
        return len(self.job.token_ids) - self._tokens_before

    @property
    def is_movable(self) -> bool:
        """Whether the job loses nothing when it goes on elsewhere."""
        return not self.job.token_ids or self.job.can_continue()

    def fail(self, error: Exception) -> None:
        """End this try, unless it is over."""
        if not self._done.done():
            self._done.set_exception(error)
