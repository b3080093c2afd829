"""Generate with the trainer's own model, part by part, while rollout nodes are unavailable.

Before each part the gateway is tried; once it has a node, the nodes make the rest. Finished completions of nodes
are kept, and partial ones are continued. The trainer is paid for anyway, so generating instead of waiting costs
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import structlog

from grpo_orch.policies.serving.wire import Batch, Completion, CompletionRequest
from grpo_orch.policies.tick.snapshot import OWN_GENERATION
from grpo_orch.tasks.completions.gateway_client import Generated, NoNodeServing
from grpo_orch.tasks.storing.heartbeat import Heartbeat
from grpo_orch.tasks.storing.step_costs import StepCosts

log = structlog.get_logger()

# Completions that one process makes at once. More need more KV-cache memory and all wait for the longest; fewer
# leave the GPU idle. Halved until they fit.
MAX_CONCURRENT = 64
# When the trainer's model fails, the wait for nodes doubles before each retry; after TRIES failures it lasts until
# the deadline. A driver or a full memory may recover, a model without `generate` does not.
TRIES = 3
RETRY_MIN_S = 60.0


class TrainerMustGenerate(Exception):
    """The trainer's own model must make a share of the completions, in all processes, and then retry the batch."""


@dataclass(frozen=True, slots=True)
class Share:
    """A part of a batch for the trainer's own model. `begun` holds its partial completions."""

    batch: Batch
    begun: list[Completion]

    def of_process(self, number: int, processes: int) -> Share:
        """Return the part that one of the trainer's processes makes."""
        return replace(self, batch=replace(self.batch, requests=self.batch.requests[number::processes]))


class GatewayCompleter(Protocol):
    """The gateway's client."""

    def complete(self, batch: Batch) -> Generated:
        """Raises GenerationFailed, NoNodeServing, Fenced, LeaveNow, StoreError."""

    def complete_in_background(
        self, batch: Batch, on_completion: Callable[[Completion], None], report_activity: Callable[[str], None]
    ) -> Generated:
        """Raises GenerationFailed, NoNodeServing, Fenced, StoreError."""


class NodeShortage:
    """Complete batches through the gateway or, during a shortage of nodes, with the trainer's own model.

    Args:
        gateway: tried first.
        after_s: seconds without a node before the trainer generates; it then generates until a node serves.
        check_stop: raises Fenced or LeaveNow if the trainer must exit.
        heartbeat: reports that the trainer generates.
        costs: charged for the trainer's generation.
    """

    def __init__(
        self,
        gateway: GatewayCompleter,
        after_s: float,
        check_stop: Callable[[], None],
        heartbeat: Heartbeat,
        costs: StepCosts,
    ) -> None:
        self._gateway, self._check_stop, self._heartbeat, self._costs = gateway, check_stop, heartbeat, costs
        self._after_s = after_s
        self._patience_s: float | None = after_s  # None: only nodes can make the batch
        self._failed = 0  # failed tries in a row since a node served
        self._at_once = MAX_CONCURRENT
        self._batch: Batch | None = None
        self._made: dict[int, Completion] = {}  # completions of the batch, by index
        self._begun: dict[int, Completion] = {}  # the same, partial
        self._discarded, self._wait_s = 0, 0.0

    def complete(self, batch: Batch) -> Generated:
        """Return once every request of the batch is finished.

        Raises TrainerMustGenerate when the trainer must make `share` and then retry the same batch. Raises
        GenerationFailed, Fenced, LeaveNow, StoreError.
        """
        self._check_stop()
        self._turn_to(batch)
        missing = self._missing(batch)
        if missing:
            try:
                generated = self._gateway.complete(replace(batch, requests=missing, patience_s=self._patience_s))
            except NoNodeServing as unserved:
                self._keep_partial(unserved)
                raise TrainerMustGenerate from unserved
            self._note_served()
            self._keep(generated.completions)
            self._discarded += generated.discarded
            self._wait_s += generated.wait_s
        self._batch = None
        completions = [self._made[request.index] for request in batch.requests]
        return Generated(completions, self._discarded, self._wait_s)

    def complete_in_background(
        self, batch: Batch, on_completion: Callable[[Completion], None], report_activity: Callable[[str], None]
    ) -> Generated:
        """Let nodes complete the batch, in a thread.

        Raises NoNodeServing after `patience_s` without a node; GenerationFailed, Fenced, StoreError.
        """
        generated = self._gateway.complete_in_background(
            replace(batch, patience_s=self._patience_s), on_completion, report_activity
        )
        self._note_served()
        return generated

    def resume(self, batch: Batch, unserved: NoNodeServing) -> None:
        """Resume a batch from its partial result; the trainer makes the rest if no node appears."""
        self._turn_to(batch)
        self._keep_partial(unserved)
        self._patience_s = 0.0 if self._patience_s is not None else None

    def share(self, processes: int) -> Share:
        """Return the completions that the trainer's processes must make next."""
        assert self._batch is not None
        self._heartbeat.update(OWN_GENERATION)
        # Continue partial completions first: a node would start them again.
        missing = sorted(self._missing(self._batch), key=lambda request: request.index not in self._begun)
        part = missing[: self._at_once * processes]
        log.info("trainer_generates", completions=len(part), policy=self._batch.policy.label)
        begun = [self._begun[request.index] for request in part if request.index in self._begun]
        return Share(replace(self._batch, requests=part), begun)

    def take(self, made: Sequence[Completion], took_s: float, *, training: bool) -> None:
        """Keep the trainer's completions of a share; the rest of the share is requested again."""
        self._patience_s = 0.0
        if made:
            self._failed = 0
        for completion in made:
            self._made[completion.index] = completion
            self._begun.pop(completion.index, None)
        self._costs.add_own_generation(took_s, training=training)

    def halve_share(self) -> None:
        """Halve the next shares, because this one exceeded the memory that training leaves free."""
        if self._at_once == 1:
            self.record_failure("one completion does not fit into the memory that training leaves free")
        self._at_once = max(1, self._at_once // 2)

    def record_failure(self, reason: str) -> None:
        """Record that the trainer's model failed: wait for nodes, then retry, up to TRIES failures in a row."""
        self._failed += 1
        again_s = max(self._after_s, RETRY_MIN_S) * 2**self._failed
        self._patience_s = again_s if self._failed < TRIES else None
        log.warning("trainer_generation_failed", reason=reason, tries=self._failed, again_after_s=self._patience_s)

    def _note_served(self) -> None:
        self._patience_s, self._failed = self._after_s, 0

    def _missing(self, batch: Batch) -> list[CompletionRequest]:
        return [request for request in batch.requests if request.index not in self._made]

    def _turn_to(self, batch: Batch) -> None:
        """Continue the batch or start another; seeds are unique within a run, so they identify it."""
        if self._batch is None or _name_of(batch) != _name_of(self._batch):
            self._made, self._begun, self._discarded, self._wait_s = {}, {}, 0, 0.0
        self._batch = batch

    def _keep_partial(self, unserved: NoNodeServing) -> None:
        self._keep(unserved.made)
        for partial in unserved.cut:
            earlier = self._begun.get(partial.index)
            tokens = len(partial.token_ids)
            earlier_tokens = 0 if earlier is None else len(earlier.token_ids)
            self._discarded += min(tokens, earlier_tokens)
            if tokens > earlier_tokens:
                self._begun[partial.index] = partial
        self._discarded += unserved.discarded
        self._wait_s += unserved.wait_s

    def _keep(self, made: Sequence[Completion]) -> None:
        """Keep the nodes' completions; partial ones that a node made again count as discarded."""
        for completion in made:
            self._made[completion.index] = completion
            partial = self._begun.pop(completion.index, None)
            self._discarded += 0 if partial is None else len(partial.token_ids)


def _name_of(batch: Batch) -> tuple[str, list[int]]:
    return batch.policy.label, [request.seed for request in batch.requests]
