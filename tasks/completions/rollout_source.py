"""Where a step's completions come from: the rollout journal where it has them, the fleet where it has not.

Agents' sessions (`tasks.agents`) take the same way: a prompt is then a row of the dataset, and a completion a
Session.

A call belongs to the step that trains on it (`at`) and is sampled from a policy, which may be an older one
(`rollout.max_staleness`). Calls may be begun before they are asked for: those of one policy are one batch, of
which a thread stores each call when its completions are there, while the trainer works at what comes before it.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, Protocol, cast

import structlog

from checkpoint.records import rollouts
from checkpoint.records.rollouts import EVALUATION_CALLS, Rollout, Session
from checkpoint.store.errors import Corrupt
from checkpoint.store.run_store import Store
from policies.model.vocabulary import PolicyVersion, Precedence, Recovery, Role, machine_of
from policies.serving.seeds import request_seed
from policies.serving.wire import Batch, Completion, CompletionRequest, PolicyRef
from tasks.completions.drought import OwnTurn
from tasks.completions.gateway_client import Generated, NobodyServes
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


class CompletesAside(Completes, Protocol):
    """What makes completions while the trainer is at work, too."""

    def complete_aside(
        self, batch: Batch, arrived: Callable[[Completion], None], say: Callable[[str], None]
    ) -> Generated:
        """The same in a thread: `arrived` is told of each completion, and `say` what the trainer does if it waits.

        Raises GenerationFailed, NobodyServes, Fenced.
        """

    def go_on(self, batch: Batch, nobody: NobodyServes) -> None:
        """The batch, which is asked for next, was made in a thread until nobody was there for it."""


@dataclass(frozen=True, slots=True)
class SessionRequest(CompletionRequest):
    """One session of an agent on one row. Its name is the same whoever asks for it, so that a restarted trainer
    finds at the gateway what was recorded."""

    session: str
    row: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Call:
    """A generate call.

    Args:
        at: the timeline, and the steps that are done when it is trained on or evaluated.
        number: of the call at that step.
        policy: the version that it is sampled from.
        prompts: token ids, or rows for an agent.
        samples: completions of each.
        sampling: vLLM's parameters.
    """

    at: PolicyVersion
    number: int
    policy: PolicyVersion
    prompts: list[Any]
    samples: int
    sampling: dict[str, Any]

    def requests(self, run_seed: int) -> list[CompletionRequest]:
        """Its requests, prompt by prompt, each with a seed of its own."""
        return [
            self._request(run_seed, number, sample)
            for number in range(len(self.prompts))
            for sample in range(self.samples)
        ]

    def _request(self, run_seed: int, number: int, sample: int) -> CompletionRequest:
        index, prompt = number * self.samples + sample, self.prompts[number]
        seed = request_seed(run_seed, self.at.timeline, self.at.step, self.number, number, sample)
        if isinstance(prompt, dict):
            session = f"{self.at.timeline}-{self.at.step}-{self.number}-{number}-{sample}"
            return SessionRequest(index, [], seed, session, prompt)
        return CompletionRequest(index, prompt, seed)


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
class _Activity:
    """What the trainer does while it waits for a call of a batch that was begun."""

    now: str = "generating"

    def report(self, activity: str) -> None:
        self.now = activity


@dataclass(slots=True)
class _Begun:
    """A call that was begun."""

    call: Call
    digest: str
    made: Future[_Generated] = field(default_factory=Future)
    activity: _Activity = field(default_factory=_Activity)  # of all calls of its batch
    storing: threading.Lock = field(default_factory=threading.Lock)
    is_dropped: bool = False

    def drop(self) -> None:
        """Nobody takes it: it is not stored any more, in the place of what is made instead."""
        with self.storing:
            self.is_dropped = True


class _Together:
    """Calls of one policy that the gateway completes as one batch, in their order.

    Args:
        begun: the calls.
        policy: where the policy is.
        store: stores a call's result, and returns whether it has; called once for each.
    """

    def __init__(self, begun: list[_Begun], policy: PolicyRef, store: Callable[[_Begun, Rollout], bool]) -> None:
        self._begun, self._policy, self._store = begun, policy, store
        self._began_s = time.monotonic()
        sizes = [len(one.call.prompts) * one.call.samples for one in begun]
        self._starts = [0, *accumulate(sizes)]
        self._missing = sizes
        self._found: dict[int, Completion] = {}

    def requests(self, run_seed: int) -> list[CompletionRequest]:
        """Of all calls, numbered anew."""
        every = [one for begun in self._begun for one in begun.call.requests(run_seed)]
        return [replace(one, index=index) for index, one in enumerate(every)]

    def take(self, completion: Completion) -> None:
        """A completion is there. The last call ends with the batch, which tells what was lost."""
        self._found[completion.index] = completion
        at = bisect_right(self._starts, completion.index) - 1
        self._missing[at] -= 1
        if not self._missing[at] and any(self._missing):
            self._finish(at, 0, 0.0)

    def end(self, got: Generated) -> None:
        """The batch is complete."""
        self._found |= {one.index: one for one in got.completions}
        left = [at for at, one in enumerate(self._begun) if not one.made.done()]
        for at in left:
            lost = (got.discarded, got.wait_s) if at == left[-1] else (0, 0.0)
            self._finish(at, *lost)

    def fail(self, error: BaseException) -> None:
        """Nothing more comes: what ended it is raised where a call is waited for."""
        for one in self._begun:
            if not one.made.done():
                one.made.set_exception(error)

    def give_up(self, nobody: NobodyServes) -> None:
        """No node is there: each call that is not made keeps what there is of it, the first what was lost."""
        lost = nobody.discarded, nobody.wait_s
        for start, end, one in zip(self._starts, self._starts[1:], self._begun, strict=False):
            if not one.made.done():
                made, cut = (
                    [
                        replace(of_call, index=of_call.index - start)
                        for of_call in every
                        if start <= of_call.index < end
                    ]
                    for every in (nobody.made, nobody.cut)
                )
                one.made.set_exception(NobodyServes(made, cut, *lost))
                lost = 0, 0.0

    def _finish(self, at: int, discarded: int, wait_s: float) -> None:
        begun, done_at_s = self._begun[at], time.monotonic()
        made = [self._found.pop(index) for index in range(self._starts[at], self._starts[at + 1])]
        completions = [replace(one, index=index) for index, one in enumerate(made)]
        rollout = _rollout(begun.call, begun.digest, self._policy, Generated(completions, discarded, wait_s))
        begun.made.set_result(
            _Generated(
                rollout,
                self._store(begun, rollout),
                took_s=done_at_s - self._began_s,
                machines=_machines_of(completions),
                done_at_s=done_at_s,
                unserved_s=wait_s,
            )
        )


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
        gateway: completes what the journal does not hold; for `begin` one that CompletesAside.
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
        prompts: list[Any],
        samples: int,
        sampling: dict[str, Any],
        *,
        training: bool,
        policies: Policies,
        policy: PolicyVersion | None = None,
        number: int | None = None,
    ) -> Rollout:
        """Return `samples` completions of each prompt, prompt by prompt.

        `policies` is called only if something has to be generated, and must return once that version can be
        pulled. `policy` is the version to sample from, by default that of the step itself; `number` the call's
        among those of its step, by default as they come.

        Raises GenerationFailed, OwnTurn, BadPrompts, Fenced, LeaveNow, StoreError.
        """
        self._heartbeat.check()
        self._heartbeat.say("training")  # the prompts are tokens now: rollout nodes are worth their money
        counted = self._next_call(at, training)
        call = Call(at, counted if number is None else number, policy or at, prompts, samples, sampling)
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

    def begin(self, calls: Iterable[Call], policies: Policies) -> None:
        """Have these calls made in the background, those of them that the journal does not hold; `complete` then
        takes them. What it asks for otherwise than it was begun is made as it comes.

        `policies` is as of `complete`. Raises StoreError and what `policies` does.
        """
        new = defaultdict[PolicyVersion, list[_Begun]](list)
        for call in calls:
            if (call.at, call.number) in self._begun:
                continue
            begun = _Begun(call, rollouts.digest_of(call.requests(self._run_seed), call.sampling))
            if (stored := self._journalled(call, begun.digest)) is not None:
                begun.made.set_result(_replayed(stored))
                self._begun[call.at, call.number] = begun
            else:
                self._note_new(call)
                new[call.policy].append(begun)
        for version, together in new.items():
            activity, ref = _Activity(), policies(version)
            for one in together:
                one.activity = activity
                self._begun[one.call.at, one.call.number] = one
            name = f"calls of {version} from {together[0].call.at}"
            threading.Thread(target=self._work, args=(together, ref), name=name, daemon=True).start()

    @property
    def _aside(self) -> CompletesAside:
        return cast(CompletesAside, self._gateway)

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
        if begun is not None and begun.digest == digest:
            generated = self._awaited(begun, requests, policies)
        elif (stored := self._journalled(call, digest)) is not None:
            generated = _replayed(stored)
        else:
            if begun is not None:
                begun.drop()
            if training:
                self._note_new(call)
            generated = self._generated(call, requests, digest, policies)
        rollout = generated.rollout
        if training and not generated.is_replayed:
            seconds = max(0.0, generated.took_s - generated.wait_s)
            self._costs.generated(seconds, generated.machines, generated.ahead_s, generated.unserved_s)
        self._judge(rollout, call)  # what ends the run is asked for anew
        if not generated.is_stored:
            self._store_rollout(rollout)
        self._costs.add(rollout, generated.wait_s, training=training, replayed=generated.is_replayed)
        return rollout

    def _generated(
        self,
        call: Call,
        requests: list[CompletionRequest],
        digest: str,
        policies: Policies,
        nobody: NobodyServes | None = None,
    ) -> _Generated:
        """Have the call made while the trainer waits; with `nobody`, go on with what there is of it."""
        began_s = time.monotonic()
        try:
            batch = self._batch(call, requests, policies(call.policy))
            if nobody is not None:
                self._aside.go_on(batch, nobody)
            published_s = time.monotonic()
            got = self._gateway.complete(batch)
        except OwnTurn:  # the same call comes again, and what it waits is told at its end
            self._asked_s += time.monotonic() - published_s
            raise
        finally:
            ended_s = time.monotonic()
            self._costs.generated_s += ended_s - began_s
        asked_s, self._asked_s = self._asked_s + ended_s - published_s, 0.0
        rollout, machines = _rollout(call, digest, batch.policy, got), _machines_of(got.completions)
        return _Generated(
            rollout, is_stored=False, took_s=asked_s, machines=machines, wait_s=got.wait_s, unserved_s=got.wait_s
        )

    def _work(self, begun: list[_Begun], policy: PolicyRef) -> None:
        """Have calls of one policy made, in their thread. Whatever ends it is raised where one is waited for."""
        together = _Together(begun, policy, self._stored_early)
        try:
            batch = self._batch(begun[0].call, together.requests(self._run_seed), policy)
            together.end(self._aside.complete_aside(batch, together.take, begun[0].activity.report))
        except NobodyServes as nobody:
            together.give_up(nobody)
        except BaseException as error:  # noqa: BLE001  # a thread that dies in silence is waited for in vain
            together.fail(error)

    def _stored_early(self, begun: _Begun, rollout: Rollout) -> bool:
        """Store a call before it is taken, unless nobody will or it has to be judged first."""
        if any(one.refused for one in rollout.completions) or any(one.failed for one in rollout.sessions):
            return False
        with begun.storing:
            if not begun.is_dropped:
                self._store_rollout(rollout)
        return True

    def _awaited(self, begun: _Begun, requests: list[CompletionRequest], policies: Policies) -> _Generated:
        """Wait for a call that was begun; make it here if no node is there for it. Raises what else ended it."""
        began_s = looked_s = time.monotonic()
        nobody_s, nobody = 0.0, None
        try:
            while not wait([begun.made], LOOK_S).done:
                self._may_go_on()
                self._heartbeat.say(begun.activity.now)
                before_s, looked_s = looked_s, time.monotonic()
                nobody_s += looked_s - before_s if begun.activity.now == "waiting" else 0.0
            generated = begun.made.result()
        except NobodyServes as told:
            nobody = told
        finally:
            waited_s = time.monotonic() - began_s
            self._costs.generated_s += waited_s
        if nobody is not None:
            return self._generated(begun.call, requests, begun.digest, policies, nobody)
        # Calls that were begun together are made one after the other, as far as their number allows.
        took_s = min(generated.took_s, max(0.0, generated.done_at_s - self._done_at_s))
        self._done_at_s = max(self._done_at_s, generated.done_at_s)
        return replace(generated, took_s=took_s, ahead_s=max(0.0, took_s - waited_s), wait_s=nobody_s)

    def _judge(self, rollout: Rollout, call: Call) -> None:
        self._refused.judge(call.prompts, call.samples, rollout.completions)

    def _store_rollout(self, rollout: Rollout) -> None:
        rollouts.write_rollout(self._store, rollout, self._by)

    def _batch(self, call: Call, requests: list[CompletionRequest], policy: PolicyRef) -> Batch:
        return Batch(policy, call.sampling, requests, self._deadline_s, self._recovery)

    def _note_new(self, call: Call) -> None:
        """A call is made anew, so its step leads to other weights than before, unless all nodes compute alike to
        the last bit: what is stored of later policies is not used any more."""
        known = self._new_at_step
        # A window ahead may be new before a later turn of the present step is.
        self._new_at_step = call.at.step if known is None else min(known, call.at.step)

    def _next_call(self, at: PolicyVersion, training: bool) -> int:
        if at != self._at:
            self._at = at
            self._calls = {True: 0, False: EVALUATION_CALLS}
        return self._calls[training]

    def _journalled(self, call: Call, digest: str) -> Rollout | None:
        """The journal's record of the call, if it is whole and of the same requests. A newer policy may have stood
        in for its own."""
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
            policy = PolicyVersion.parse(rollout.policy)
            if rollout.requests_digest == digest and call.policy <= policy <= call.at:
                log.info("rollout_replayed", at=str(call.at), call=call.number)
                return rollout
            log.warning("rollout_of_other_requests", at=str(call.at), call=call.number)
        return None


def _replayed(stored: Rollout) -> _Generated:
    return _Generated(stored, is_stored=True, is_replayed=True, wait_s=stored.wait_s)


def _rollout(call: Call, digest: str, policy: PolicyRef, got: Generated) -> Rollout:
    made: list[Any] = list(got.completions)
    sessions: list[Session] = [one for one in made if isinstance(one, Session)]
    return Rollout(
        rollouts.SCHEMA,
        str(call.at),
        policy.version,
        call.number,
        digest,
        [] if sessions else made,
        got.discarded,
        got.wait_s,
        sessions,
    )


def _machines_of(made: Sequence[Completion]) -> int:
    """How many rollout machines made them, and the trainer's where there are none."""
    machines = {machine_of(one.node) for one in made if one.node}
    return len([one for one in machines if not one.startswith(Role.TRAINER)] or machines)
