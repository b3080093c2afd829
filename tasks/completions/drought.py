"""Completions while no rollout node is to be had: after a while the trainer's own model makes them, part by part.

Before each part the gateway is asked whether a node is there by now; then the rest is its work again. What nodes
had finished stays, and what they had begun is gone on with. The trainer is paid for anyway: what it makes while it
would only wait costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import structlog

from policies.serving.wire import Batch, Completion, CompletionRequest
from policies.tick.snapshot import OWN_GENERATION
from tasks.completions.gateway_client import Generated, NobodyServes
from tasks.storing.heartbeat import Heartbeat
from tasks.storing.step_costs import StepCosts

log = structlog.get_logger()

# Completions that one process makes at once: more take memory for their keys and values, and every one of them
# waits for the longest; fewer leave a GPU idle. Halved for as long as they do not fit.
AT_ONCE = 64
# Where its model fails, nodes are waited for twice as long before each other try, and after so many up to the
# deadline: a driver or a full memory may recover, a model without `generate` does not.
TRIES = 3
RETRY_LEAST_S = 60.0


class OwnTurn(Exception):
    """The trainer's own model is to make a part of the completions, in all processes, and then to ask again."""


@dataclass(frozen=True, slots=True)
class Share:
    """A part of a batch for the trainer's own model. `begun` has the tokens so far of some of its completions."""

    batch: Batch
    begun: list[Completion]

    def of_process(self, number: int, processes: int) -> Share:
        """What one of the trainer's processes makes of it."""
        return replace(self, batch=replace(self.batch, requests=self.batch.requests[number::processes]))


class AsksGateway(Protocol):
    """The gateway's client."""

    def complete(self, batch: Batch) -> Generated:
        """Raises GenerationFailed, NobodyServes, Fenced, LeaveNow, StoreError."""

    def complete_aside(
        self, batch: Batch, arrived: Callable[[Completion], None], say: Callable[[str], None]
    ) -> Generated:
        """Raises GenerationFailed, NobodyServes, Fenced, StoreError."""


class Drought:
    """Has a batch completed by the gateway, and where nobody is there for it by the trainer itself.

    Args:
        gateway: is asked first.
        after_s: how long no node has to be there before the trainer generates; from then on, until one is.
        may_go_on: raises Fenced or LeaveNow if the trainer is to end.
        heartbeat: told that the trainer generates.
        costs: charged for it.
    """

    def __init__(
        self,
        gateway: AsksGateway,
        after_s: float,
        may_go_on: Callable[[], None],
        heartbeat: Heartbeat,
        costs: StepCosts,
    ) -> None:
        self._gateway, self._may_go_on, self._heartbeat, self._costs = gateway, may_go_on, heartbeat, costs
        self._after_s = after_s
        self._patience_s: float | None = after_s  # None: nodes alone can make the batch
        self._failed = 0  # tries in a row that made nothing, since a node served
        self._at_once = AT_ONCE
        self._batch: Batch | None = None
        self._made: dict[int, Completion] = {}  # of the batch
        self._begun: dict[int, Completion] = {}  # the same, not finished
        self._discarded, self._wait_s = 0, 0.0

    def complete(self, batch: Batch) -> Generated:
        """Return once every request of the batch is finished.

        Raises OwnTurn when the trainer is to make `share`; the same batch is then to be asked for again. Raises
        GenerationFailed, Fenced, LeaveNow, StoreError.
        """
        self._may_go_on()
        self._turn_to(batch)
        left = self._left(batch)
        if left:
            try:
                got = self._gateway.complete(replace(batch, requests=left, patience_s=self._patience_s))
            except NobodyServes as nobody:
                self._take(nobody)
                raise OwnTurn from nobody
            self._somebody_serves()
            self._keep(got.completions)
            self._discarded += got.discarded
            self._wait_s += got.wait_s
        made, self._batch = self._made, None
        return Generated([made[one.index] for one in batch.requests], self._discarded, self._wait_s)

    def complete_aside(
        self, batch: Batch, arrived: Callable[[Completion], None], say: Callable[[str], None]
    ) -> Generated:
        """Have nodes complete it, in a thread. Raises NobodyServes once none has been there for its patience, and
        GenerationFailed, Fenced, StoreError."""
        got = self._gateway.complete_aside(replace(batch, patience_s=self._patience_s), arrived, say)
        self._somebody_serves()
        return got

    def go_on(self, batch: Batch, nobody: NobodyServes) -> None:
        """Take what there is of a batch that nobody was there for: the trainer makes the rest if nobody comes."""
        self._turn_to(batch)
        self._take(nobody)
        self._patience_s = 0.0 if self._patience_s is not None else None

    def share(self, processes: int) -> Share:
        """What the trainer's processes are to make next."""
        assert self._batch is not None
        self._heartbeat.say(OWN_GENERATION)
        # What was begun comes first: what a node takes over is made anew.
        left = sorted(self._left(self._batch), key=lambda one: one.index not in self._begun)
        part = left[: self._at_once * processes]
        log.info("trainer_generates", completions=len(part), policy=self._batch.policy.label)
        begun = [self._begun[one.index] for one in part if one.index in self._begun]
        return Share(replace(self._batch, requests=part), begun)

    def take(self, made: Sequence[Completion], took_s: float, *, training: bool) -> None:
        """The trainer has made these of a share; what it was told to and has not made is asked for again."""
        self._patience_s = 0.0
        if made:
            self._failed = 0
        self._made |= {one.index: one for one in made}
        for one in made:
            self._begun.pop(one.index, None)
        self._costs.made_itself(took_s, training=training)

    def does_not_fit(self) -> None:
        """A share takes more memory than there is beside what is trained: the next ones are half as large."""
        if self._at_once == 1:
            self.cannot("one completion takes more memory than there is beside what is trained")
        self._at_once = max(1, self._at_once // 2)

    def cannot(self, why: str) -> None:
        """The trainer's model has failed to generate. Wait for nodes, then try again: TRIES in a row."""
        self._failed += 1
        again_s = max(self._after_s, RETRY_LEAST_S) * 2**self._failed
        self._patience_s = again_s if self._failed < TRIES else None
        log.warning("trainer_cannot_generate", why=why, tries=self._failed, again_after_s=self._patience_s)

    def _somebody_serves(self) -> None:
        self._patience_s, self._failed = self._after_s, 0

    def _left(self, batch: Batch) -> list[CompletionRequest]:
        return [one for one in batch.requests if one.index not in self._made]

    def _turn_to(self, batch: Batch) -> None:
        """Go on with the batch, or begin with another. No two completions of a run have one seed."""
        if self._batch is None or _name_of(batch) != _name_of(self._batch):
            self._made, self._begun, self._discarded, self._wait_s = {}, {}, 0, 0.0
        self._batch = batch

    def _take(self, nobody: NobodyServes) -> None:
        self._keep(nobody.made)
        for one in nobody.cut:
            before = self._begun.get(one.index)
            made, there = len(one.token_ids), 0 if before is None else len(before.token_ids)
            self._discarded += min(made, there)
            if made > there:
                self._begun[one.index] = one
        self._discarded += nobody.discarded
        self._wait_s += nobody.wait_s

    def _keep(self, made: Sequence[Completion]) -> None:
        """Nodes have made these. What had been begun of them was made anew."""
        self._made |= {one.index: one for one in made}
        begun = [self._begun.pop(one.index) for one in made if one.index in self._begun]
        self._discarded += sum(len(one.token_ids) for one in begun)


def _name_of(batch: Batch) -> tuple[str, list[int]]:
    return batch.policy.label, [one.seed for one in batch.requests]
