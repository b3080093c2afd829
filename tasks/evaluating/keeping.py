"""Completions are stored as they come: an evaluator that is started again asks for the others alone.

Training stores a call's completions when all are there, for a step is minutes. Here one call is the whole
evaluation. Greedy decoding makes the same tokens again, so what one attempt stored and the next one makes go
together.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import structlog

from checkpoint.records import evaluations, rollouts
from checkpoint.store.run_store import Store
from policies.model.vocabulary import Precedence
from policies.serving.wire import Batch, Completion
from tasks.completions.gateway_client import Generated

log = structlog.get_logger()

KEEP_S = 1.0  # between two parts: what came since is made again if the machine is lost


class Completes(Protocol):
    """What makes completions, and tells of each as it comes."""

    def complete(self, batch: Batch, arrived: Callable[[Completion], None]) -> Generated:
        """Raises GenerationFailed, Fenced, LeaveNow."""


class Keeping:
    """Completes batches with what is stored and what `makes` makes.

    Args:
        store: the evaluation's.
        by: the precedence of this evaluator.
        clock: seconds, never going back.
    """

    def __init__(
        self, store: Store, by: Precedence, makes: Completes, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._store = store
        self._by = by
        self._makes = makes
        self._clock = clock

    def complete(self, batch: Batch) -> Generated:
        """Return every completion, in the order of the requests. Raises GenerationFailed, Fenced, LeaveNow,
        StoreError."""
        digest = (
            f"{batch.policy.digest or batch.policy.version}-{rollouts.digest_of(batch.requests, batch.sampling)}"
        )
        found = {
            index: one
            for index, one in evaluations.kept(self._store, digest).items()
            if one.policy == batch.policy.label
        }
        missing = [one for one in batch.requests if one.index not in found]
        if found:
            log.info("completions_kept", stored=len(found), missing=len(missing))
        parts = _Parts(self._store, digest, self._by, self._clock)
        discarded, wait_s = 0, 0.0
        if missing:
            try:
                made = self._makes.complete(replace(batch, requests=missing), parts.arrived)
            finally:
                parts.flush()
            found |= {one.index: one for one in made.completions}
            discarded, wait_s = made.discarded, made.wait_s
        return Generated([found[one.index] for one in batch.requests], discarded, wait_s)


class _Parts:
    """What one attempt stores of one batch."""

    def __init__(self, store: Store, digest: str, by: Precedence, clock: Callable[[], float]) -> None:
        self._store, self._digest, self._by, self._clock = store, digest, by, clock
        self._waiting: list[Completion] = []
        self._number = 0
        self._flushed_s = clock()

    def arrived(self, completion: Completion) -> None:
        self._waiting.append(completion)
        if self._clock() - self._flushed_s >= KEEP_S:
            self.flush()

    def flush(self) -> None:
        if self._waiting:
            evaluations.keep(self._store, self._digest, self._by, self._number, self._waiting)
            self._number, self._waiting = self._number + 1, []
        self._flushed_s = self._clock()
