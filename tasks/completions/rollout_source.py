"""Where a step's completions come from: the rollout journal where it has them, the fleet where it has not."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import structlog

from checkpoint.records import rollouts
from checkpoint.records.rollouts import Rollout
from checkpoint.store.errors import Corrupt
from checkpoint.store.run_store import Store
from policies.model.vocabulary import PolicyVersion, Precedence, Recovery, Role, machine_of
from policies.serving.seeds import request_seed
from policies.serving.wire import Batch, CompletionRequest, PolicyRef
from tasks.completions.drought import OwnTurn
from tasks.completions.gateway_client import Generated
from tasks.completions.refused_prompts import RefusedPrompts
from tasks.storing.heartbeat import Heartbeat
from tasks.storing.step_costs import StepCosts

log = structlog.get_logger()

# Evaluation counts its calls from here: whether a step was evaluated must not move its training seeds, and a
# restart after an evaluation must number the training calls as before.
EVALUATION_CALLS = 1000


class Completes(Protocol):
    """What makes completions: the gateway, or the trainer's own model."""

    def complete(self, batch: Batch) -> Generated:
        """Return once every request of the batch is finished.

        Raises GenerationFailed, OwnTurn, Fenced, LeaveNow.
        """


@dataclass(slots=True)
class _Ahead:
    """Evaluation calls of a version that are made together; `first` is the number of the first."""

    version: PolicyVersion
    first: int
    calls: list[list[list[int]]]
    samples: int
    made: Rollout | None = None  # of all

    @property
    def last(self) -> int:
        """The number of the last call."""
        return self.first + len(self.calls) - 1

    def has(self, version: PolicyVersion, call: int, prompts: list[list[int]], samples: int) -> bool:
        """Whether a call is one of these, as it was foreseen."""
        place = call - self.first
        if (version, samples) != (self.version, self.samples) or not 0 <= place < len(self.calls):
            return False
        return self.calls[place] == prompts

    def of(self, call: int) -> Rollout:
        """One call's part of what was made."""
        assert self.made is not None
        place = call - self.first
        begin = sum(map(len, self.calls[:place])) * self.samples
        part = self.made.completions[begin : begin + len(self.calls[place]) * self.samples]
        return replace(self.made, call=call, completions=[replace(one, index=i) for i, one in enumerate(part)])


class RolloutSource:
    """Answers generate calls, each at one policy version.

    Args:
        store: the run's store, for the journal.
        gateway: completes what the journal does not hold.
        heartbeat: told when generation is over.
        costs: charged for each call.
        refused: judges what no node took.
        by: the precedence of this trainer.
        run_seed: GRPOConfig's `seed`.
        deadline_s: how long a call may go without a token.
        recovery: what a completion does whose node is lost.
    """

    def __init__(
        self,
        store: Store,
        gateway: Completes,
        heartbeat: Heartbeat,
        costs: StepCosts,
        refused: RefusedPrompts,
        *,
        by: Precedence,
        run_seed: int,
        deadline_s: float,
        recovery: Recovery = "continue",
    ) -> None:
        self._store = store
        self._gateway = gateway
        self._heartbeat = heartbeat
        self._costs = costs
        self._refused = refused
        self._by = by
        self._run_seed = run_seed
        self._deadline_s = deadline_s
        self._recovery = recovery
        self._version = PolicyVersion(-1, -1)
        self._calls = {True: 0, False: 0}  # made at that version, training and evaluation
        self._asked_s = 0.0  # for which a call was asked for that ended with the trainer's own turn
        self._ahead: _Ahead | None = None  # what an evaluation will ask for
        self._stored: dict[tuple[PolicyVersion, int], list[str]] | None = (
            None  # records of earlier trainers, once they are asked for
        )

    def complete(
        self,
        version: PolicyVersion,
        prompts: list[list[int]],
        samples: int,
        sampling: dict[str, Any],
        *,
        training: bool,
        publish: Callable[[], PolicyRef],
    ) -> Rollout:
        """Return `samples` completions of each prompt, prompt by prompt.

        `publish` is called only if something has to be generated, and must return once `version` can be pulled.
        Raises GenerationFailed, OwnTurn, BadPrompts, Fenced, LeaveNow, StoreError.
        """
        self._heartbeat.check()
        self._heartbeat.say("training")  # the prompts are tokens now: rollout nodes are worth their money
        call = self._next_call(version, training)
        ahead = None if training else self._ahead
        if ahead is not None and ahead.has(version, call, prompts, samples):
            if ahead.made is None:
                every, wanted = self._requests_ahead(ahead), [one for of_call in ahead.calls for one in of_call]
                ahead.made = self._made(version, call, every, wanted, samples, sampling, publish, training=False)
            rollout = ahead.of(call)
            if call == ahead.last:
                self._ahead = None
        else:
            requests = self._requests(version, call, prompts, samples)
            rollout = self._made(version, call, requests, prompts, samples, sampling, publish, training=training)
        self._calls[training] += 1  # here: a call that could not be made is made again, and is the same
        self._heartbeat.say("training")
        return rollout

    def foresee(self, version: PolicyVersion, calls: list[list[list[int]]], samples: int) -> None:
        """Say which prompts the next evaluation calls at `version` will ask for, `samples` completions of each.

        They are completed together at the first of these calls, each with the seed that it would have alone. A
        call that is for others, or comes in another place, is made as it comes.
        """
        self._ahead = _Ahead(version, self._next_call(version, training=False), calls, samples)

    def _requests_ahead(self, ahead: _Ahead) -> list[CompletionRequest]:
        found: list[CompletionRequest] = []
        for call, prompts in enumerate(ahead.calls, ahead.first):
            requests = self._requests(ahead.version, call, prompts, ahead.samples)
            found += [replace(one, index=len(found) + one.index) for one in requests]
        return found

    def _made(
        self,
        version: PolicyVersion,
        call: int,
        requests: list[CompletionRequest],
        prompts: list[list[int]],
        samples: int,
        sampling: dict[str, Any],
        publish: Callable[[], PolicyRef],
        *,
        training: bool,
    ) -> Rollout:
        """The completions of one call, from the journal or made now and stored."""
        digest = rollouts.digest_of(requests, sampling)
        rollout = self._journalled(version, call, digest)
        replayed = rollout is not None
        if rollout is None:
            began_s = time.monotonic()
            try:
                batch = Batch(publish(), sampling, requests, self._deadline_s, self._recovery)
                published_s = time.monotonic()
                got = self._gateway.complete(batch)
            except OwnTurn:  # the same call comes again, and what it waits is told at its end
                self._asked_s += time.monotonic() - published_s
                raise
            finally:
                ended_s = time.monotonic()
                self._costs.generated_s += ended_s - began_s
            asked_s, self._asked_s = self._asked_s + ended_s - published_s, 0.0
            if training:
                self._costs.generated(max(0.0, asked_s - got.wait_s), _machines_of(got))
            rollout = Rollout(
                rollouts.SCHEMA, str(version), call, digest, got.completions, got.discarded, got.wait_s
            )
            self._refused.judge(prompts, samples, rollout.completions)  # what ends the run is asked for anew
            if training:
                self._leave_the_journal(version)
            rollouts.write_rollout(self._store, rollout, self._by)
        else:
            self._refused.judge(prompts, samples, rollout.completions)
        self._costs.add(rollout, training=training, replayed=replayed)
        return rollout

    def _leave_the_journal(self, version: PolicyVersion) -> None:
        """Pass over what is stored of later steps: a step that was made anew leads to other weights than theirs,
        unless all nodes compute alike to the last bit."""
        if self._stored is not None:
            self._stored = {call: keys for call, keys in self._stored.items() if call[0] <= version}

    def _next_call(self, version: PolicyVersion, training: bool) -> int:
        if version != self._version:
            self._version = version
            self._calls = {True: 0, False: EVALUATION_CALLS}
        return self._calls[training]

    def _requests(
        self, version: PolicyVersion, call: int, prompts: list[list[int]], samples: int
    ) -> list[CompletionRequest]:
        return [
            CompletionRequest(
                index=number * samples + sample,
                prompt_token_ids=prompt,
                seed=request_seed(self._run_seed, version.timeline, version.step, call, number, sample),
            )
            for number, prompt in enumerate(prompts)
            for sample in range(samples)
        ]

    def _journalled(self, version: PolicyVersion, call: int, digest: str) -> Rollout | None:
        """The journal's record of the call, if it is whole and of the same requests."""
        if self._stored is None:
            self._stored = rollouts.stored_since(self._store, version)
        for key in self._stored.get((version, call), ()):
            try:
                rollout = rollouts.read_rollout(self._store, key)
            except Corrupt as error:
                log.warning("rollout_unreadable", policy=str(version), call=call, error=str(error))
                continue
            if rollout is None:
                continue
            if rollout.requests_digest == digest:
                log.info("rollout_replayed", policy=str(version), call=call)
                return rollout
            log.warning("rollout_of_other_requests", policy=str(version), call=call)
        return None


def _machines_of(got: Generated) -> int:
    """How many rollout machines made them, and the trainer's where there are none."""
    machines = {machine_of(one.node) for one in got.completions if one.node}
    return len([one for one in machines if not one.startswith(Role.TRAINER)] or machines)
