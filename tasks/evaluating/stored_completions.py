"""Store completions as they arrive, so that a restarted evaluator requests only the missing ones.

Training stores a call's completions once all have arrived, as a step takes minutes. Here one call is the whole
evaluation. Greedy decoding repeats the same tokens, so the completions of several attempts can be combined.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import structlog

from grpo_orch.checkpoint.records import evaluations, rollouts
from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.policies.model.vocabulary import Precedence
from grpo_orch.policies.serving.wire import Batch, Completion
from grpo_orch.tasks.completions.gateway_client import Generated

log = structlog.get_logger()

KEEP_S = 1.0  # between two parts; completions since the last part are lost with the machine


class CompletionSource(Protocol):
    """Generates completions and passes each one to `arrived` when it is complete."""

    def complete(self, batch: Batch, arrived: Callable[[Completion], None]) -> Generated:
        """Complete the batch. Raises GenerationFailed, Fenced, LeaveNow."""


class StoredCompletions:
    """Completes batches from stored completions and generates the missing ones.

    Args:
        store: store of the evaluation.
        by: precedence of this evaluator.
        makes: generates completions.
        clock: monotonic clock, in seconds.
    """

    def __init__(
        self, store: Store, by: Precedence, makes: CompletionSource, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._store = store
        self._by = by
        self._generator = makes
        self._clock = clock

    def complete(self, batch: Batch) -> Generated:
        """Return all completions in the order of the requests.

        Raises GenerationFailed, Fenced, LeaveNow, StoreError.
        """
        digest = (
            f"{batch.policy.digest or batch.policy.version}-{rollouts.digest_of(batch.requests, batch.sampling)}"
        )
        completions = {
            index: completion
            for index, completion in evaluations.read_completions(self._store, digest).items()
            if completion.policy == batch.policy.label
        }
        missing = [request for request in batch.requests if request.index not in completions]
        if completions:
            log.info("completions_kept", stored=len(completions), missing=len(missing))
        parts = _Parts(self._store, digest, self._by, self._clock)
        discarded, wait_s = 0, 0.0
        if missing:
            try:
                generated = self._generator.complete(replace(batch, requests=missing), parts.arrived)
            finally:
                parts.flush()
            completions |= {completion.index: completion for completion in generated.completions}
            discarded, wait_s = generated.discarded, generated.wait_s
        return Generated([completions[request.index] for request in batch.requests], discarded, wait_s)


class _Parts:
    """Stores the completions of one batch in parts, for one attempt."""

    def __init__(self, store: Store, digest: str, by: Precedence, clock: Callable[[], float]) -> None:
        self._store, self._digest, self._by, self._clock = store, digest, by, clock
        self._unsaved: list[Completion] = []
        self._number = 0
        self._flushed_s = clock()

    def arrived(self, completion: Completion) -> None:
        self._unsaved.append(completion)
        if self._clock() - self._flushed_s >= KEEP_S:
            self.flush()

    def flush(self) -> None:
        if self._unsaved:
            evaluations.store_completions(self._store, self._digest, self._by, self._number, self._unsaved)
            self._number, self._unsaved = self._number + 1, []
        self._flushed_s = self._clock()
