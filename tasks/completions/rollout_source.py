"""Where a step's completions come from: the rollout journal where it has them, the fleet where it has not.

A call belongs to the step that trains on it (`at`) and is sampled from a policy, which may be an older one
(`rollout.max_staleness`). Such calls are begun ahead: a thread of each has the gateway complete it and stores the
result, while the trainer works at the steps before.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import structlog

from checkpoint.records import rollouts
from checkpoint.records.rollouts import EVALUATION_CALLS, Rollout
from checkpoint.store.errors import Corrupt
from checkpoint.store.run_store import Store
from policies.model.vocabulary import PolicyVersion, Precedence, Recovery, Role, machine_of
from policies.serving.seeds import request_seed
from policies.serving.wire import Batch, CompletionRequest, PolicyRef
from tasks.completions.drought import OwnTurn
from tasks.completions.gateway_client import GatewayClient, Generated
from tasks.completions.refused_prompts import RefusedPrompts
from tasks.storing.heartbeat import Heartbeat
from tasks.storing.step_costs import StepCosts

log = structlog.get_logger()

LOOK_S = 0.25  # between two looks whether the trainer is to end, while it waits for a call


class Completes(Protocol):
    """What makes completions: the gateway, or the trainer's own model."""

    def complete(self, batch: Batch) -> Generated:
        """Return once every request of the batch is finished.

        Raises GenerationFailed, OwnTurn, Fenced, LeaveNow.
        """


@dataclass(frozen=True, slots=True)
class Call:
    """A generate call.

    Args:
        at: the timeline, and the steps that are done when it is trained on or evaluated.
        number: of the call at that step.
        policy: the version that it is sampled from.
        prompts: token ids.
        samples: completions of each.
        sampling: vLLM's parameters.
    """

    at: PolicyVersion
    number: int
    policy: PolicyVersion
    prompts: list[list[int]]
    samples: int
    sampling: dict[str, Any]

    def requests(self, run_seed: int) -> list[CompletionRequest]:
        """Its requests, prompt by prompt, each with a seed of its own."""
        return [
            CompletionRequest(
                index=number * self.samples + sample,
                prompt_token_ids=prompt,
                seed=request_seed(run_seed, self.at.timeline, self.at.step, self.number, number, sample),
            )
            for number, prompt in enumerate(self.prompts)
            for sample in range(self.samples)
        ]


Policies = Callable[[PolicyVersion], PolicyRef]


@dataclass(slots=True)
class _Generated:
    """A call's completions: from the journal, or as the gateway gave them, `took_s` after they were asked for and
    those of earlier calls were there."""

    rollout: Rollout
    is_stored: bool
    is_replayed: bool = False
    took_s: float = 0.0
    machines: int = 0
    ahead_s: float = 0.0  # of these, those before the trainer waited for it
    wait_s: float = 0.0  # while the trainer waited: those in which no node could serve it
    unserved_s: float = 0.0  # the same, whether the trainer waited or not
    done_at_s: float = 0.0  # on the monotonic clock


@dataclass(slots=True)
class _Begun:
    """A call that a thread has the gateway complete. `activity` is what the trainer does while it waits for it."""

    digest: str
    made: Future[_Generated] = field(default_factory=Future)
    activity: str = "generating"
    storing: threading.Lock = field(default_factory=threading.Lock)
    is_dropped: bool = False

    def drop(self) -> None:
        """Nobody takes it: it is not stored any more, in the place of what is made instead."""
        with self.storing:
            self.is_dropped = True

    def report(self, activity: str) -> None:
        self.activity = activity


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
        may_go_on: raises Fenced or LeaveNow if the trainer is to end, while it waits for a call that was begun.
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
        may_go_on: Callable[[], None] = lambda: None,
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
        self._may_go_on = may_go_on
        self._at = PolicyVersion(-1, -1)
        self._calls = {True: 0, False: 0}  # made at that step, training and evaluation
        self._asked_s = 0.0  # for which a call was asked for that ended with the trainer's own turn
        self._ahead: _Ahead | None = None  # what an evaluation will ask for
        self._begun: dict[tuple[PolicyVersion, int], _Begun] = {}
        self._done_at_s = 0.0  # when the last of those that were taken was done
        self._new_at_step: int | None = None  # the first step with a call that the journal did not hold
        self._stored: dict[tuple[PolicyVersion, int], list[str]] | None = (
            None  # records of earlier trainers, once they are asked for
        )

    def complete(
        self,
        at: PolicyVersion,
        prompts: list[list[int]],
        samples: int,
        sampling: dict[str, Any],
        *,
        training: bool,
        policies: Policies,
        policy: PolicyVersion | None = None,
    ) -> Rollout:
        """Return `samples` completions of each prompt, prompt by prompt.

        `policies` is called only if something has to be generated, and must return once that version can be
        pulled. `policy` is the version to sample from, by default that of the step itself.

        Raises GenerationFailed, OwnTurn, BadPrompts, Fenced, LeaveNow, StoreError.
        """
        self._heartbeat.check()
        self._heartbeat.say("training")  # the prompts are tokens now: rollout nodes are worth their money
        call = Call(at, self._next_call(at, training), policy or at, prompts, samples, sampling)
        ahead = None if training else self._ahead
        if ahead is not None and ahead.has(at, call.number, prompts, samples):
            if ahead.made is None:
                every, wanted = self._requests_ahead(ahead), [one for of_call in ahead.calls for one in of_call]
                ahead.made = self._made(replace(call, prompts=wanted), every, policies, training=False)
            rollout = ahead.of(call.number)
            if call.number == ahead.last:
                self._ahead = None
        else:
            rollout = self._made(call, call.requests(self._run_seed), policies, training=training)
        self._calls[training] += 1  # here: a call that could not be made is made again, and is the same
        self._heartbeat.say("training")
        return rollout

    def begin(self, calls: Sequence[Call], policies: Policies) -> None:
        """Have these calls made in the background, those of them that the journal does not hold; `complete` then
        takes them. What it asks for otherwise than it was begun is made as it comes.

        `policies` is as of `complete`. Raises StoreError and what `policies` does.
        """
        for call in calls:
            if (call.at, call.number) in self._begun:
                continue
            requests = call.requests(self._run_seed)
            begun = _Begun(rollouts.digest_of(requests, call.sampling))
            if (stored := self._journalled(call, begun.digest)) is not None:
                begun.made.set_result(_replayed(stored))
            else:
                self._note_new(call)
                batch, name = self._batch(call, requests, policies), f"call-{call.at}-{call.number}"
                threading.Thread(target=self._work, args=(begun, call, batch), name=name, daemon=True).start()
            self._begun[call.at, call.number] = begun

    def foresee(self, at: PolicyVersion, calls: list[list[list[int]]], samples: int) -> None:
        """Say which prompts the next evaluation calls at a step will ask for, `samples` completions of each.

        They are completed together at the first of these calls, each with the seed that it would have alone. A
        call that is for others, or comes in another place, is made as it comes.
        """
        self._ahead = _Ahead(at, self._next_call(at, training=False), calls, samples)

    def _requests_ahead(self, ahead: _Ahead) -> list[CompletionRequest]:
        found: list[CompletionRequest] = []
        for number, prompts in enumerate(ahead.calls, ahead.first):
            call = Call(ahead.version, number, ahead.version, prompts, ahead.samples, {})
            requests = call.requests(self._run_seed)
            found += [replace(one, index=len(found) + one.index) for one in requests]
        return found

    def _made(
        self, call: Call, requests: list[CompletionRequest], policies: Policies, *, training: bool
    ) -> Rollout:
        """The completions of one call, from the journal or made now and stored."""
        digest = rollouts.digest_of(requests, call.sampling)
        begun = self._begun.pop((call.at, call.number), None)
        if begun is not None and begun.digest != digest:
            begun.drop()
            begun = None
        if begun is not None:
            generated = self._awaited(begun)
        elif (stored := self._journalled(call, digest)) is not None:
            generated = _replayed(stored)
        else:
            if training:
                self._note_new(call)
            generated = self._generated(call, requests, digest, policies)
        rollout = generated.rollout
        if training and not generated.is_replayed:
            seconds = max(0.0, generated.took_s - generated.wait_s)
            self._costs.generated(seconds, generated.machines, generated.ahead_s, generated.unserved_s)
        self._refused.judge(call.prompts, call.samples, rollout.completions)  # what ends the run is asked for anew
        if not generated.is_stored:
            rollouts.write_rollout(self._store, rollout, self._by)
        self._costs.add(rollout, generated.wait_s, training=training, replayed=generated.is_replayed)
        return rollout

    def _generated(
        self, call: Call, requests: list[CompletionRequest], digest: str, policies: Policies
    ) -> _Generated:
        """Have the call made while the trainer waits."""
        began_s = time.monotonic()
        try:
            batch = self._batch(call, requests, policies)
            published_s = time.monotonic()
            got = self._gateway.complete(batch)
        except OwnTurn:  # the same call comes again, and what it waits is told at its end
            self._asked_s += time.monotonic() - published_s
            raise
        finally:
            ended_s = time.monotonic()
            self._costs.generated_s += ended_s - began_s
        asked_s, self._asked_s = self._asked_s + ended_s - published_s, 0.0
        rollout = _rollout(call, digest, batch, got)
        machines = _machines_of(got)
        return _Generated(
            rollout, is_stored=False, took_s=asked_s, machines=machines, wait_s=got.wait_s, unserved_s=got.wait_s
        )

    def _work(self, begun: _Begun, call: Call, batch: Batch) -> None:
        """Have a call made that was begun, in its thread. Whatever ends it is raised where it is waited for."""
        try:
            began_s = time.monotonic()
            assert isinstance(self._gateway, GatewayClient)
            got = self._gateway.aside(begun.report).complete(batch)
            took_s = time.monotonic() - began_s
            rollout = _rollout(call, begun.digest, batch, got)
            is_stored = not any(one.refused for one in got.completions)  # else it is judged first
            with begun.storing:
                if is_stored and not begun.is_dropped:
                    rollouts.write_rollout(self._store, rollout, self._by)
            made = _Generated(
                rollout,
                is_stored,
                took_s=took_s,
                machines=_machines_of(got),
                done_at_s=began_s + took_s,
                unserved_s=got.wait_s,
            )
            begun.made.set_result(made)
        except BaseException as error:  # noqa: BLE001  # a thread that dies in silence is waited for in vain
            begun.made.set_exception(error)

    def _awaited(self, begun: _Begun) -> _Generated:
        """Wait for a call that was begun. Raises what ended it."""
        began_s = looked_s = time.monotonic()
        nobody_s = 0.0
        try:
            while not wait([begun.made], LOOK_S).done:
                self._may_go_on()
                self._heartbeat.say(begun.activity)
                before_s, looked_s = looked_s, time.monotonic()
                nobody_s += looked_s - before_s if begun.activity == "waiting" else 0.0
            generated = begun.made.result()
        finally:
            waited_s = time.monotonic() - began_s
            self._costs.generated_s += waited_s
        # Calls that were begun together are made one after the other, as far as their number allows.
        took_s = min(generated.took_s, max(0.0, generated.done_at_s - self._done_at_s))
        self._done_at_s = max(self._done_at_s, generated.done_at_s)
        return replace(generated, took_s=took_s, ahead_s=max(0.0, took_s - waited_s), wait_s=nobody_s)

    def _batch(self, call: Call, requests: list[CompletionRequest], policies: Policies) -> Batch:
        return Batch(policies(call.policy), call.sampling, requests, self._deadline_s, self._recovery)

    def _note_new(self, call: Call) -> None:
        """A call is made anew, so its step leads to other weights than before, unless all nodes compute alike to
        the last bit: what is stored of later policies is not used any more."""
        if self._new_at_step is None:
            self._new_at_step = call.at.step

    def _next_call(self, at: PolicyVersion, training: bool) -> int:
        if at != self._at:
            self._at = at
            self._calls = {True: 0, False: EVALUATION_CALLS}
        return self._calls[training]

    def _journalled(self, call: Call, digest: str) -> Rollout | None:
        """The journal's record of the call, if it is whole, of the same requests and of the same policy."""
        if self._new_at_step is not None and call.policy.step > self._new_at_step:
            return None
        if self._stored is None:
            self._stored = rollouts.stored_since(self._store, call.at)
        for key in self._stored.get((call.at, call.number), ()):
            try:
                rollout = rollouts.read_rollout(self._store, key)
            except Corrupt as error:
                log.warning("rollout_unreadable", at=str(call.at), call=call.number, error=str(error))
                continue
            if rollout is None:
                continue
            if (rollout.requests_digest, rollout.policy) == (digest, str(call.policy)):
                log.info("rollout_replayed", at=str(call.at), call=call.number)
                return rollout
            log.warning("rollout_of_other_requests", at=str(call.at), call=call.number)
        return None


def _replayed(stored: Rollout) -> _Generated:
    return _Generated(stored, is_stored=True, is_replayed=True, wait_s=stored.wait_s)


def _rollout(call: Call, digest: str, batch: Batch, got: Generated) -> Rollout:
    return Rollout(
        rollouts.SCHEMA,
        str(call.at),
        batch.policy.version,
        call.number,
        digest,
        got.completions,
        got.discarded,
        got.wait_s,
    )


def _machines_of(got: Generated) -> int:
    """How many rollout machines made them, and the trainer's where there are none."""
    machines = {machine_of(one.node) for one in got.completions if one.node}
    return len([one for one in machines if not one.startswith(Role.TRAINER)] or machines)
