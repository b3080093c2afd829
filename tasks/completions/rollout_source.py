"""Get a step's completions from the store or, where it lacks them, from the fleet.

Agent sessions (`tasks.agents`) work the same way: each prompt is a dataset row, and each completion a Session.

A call belongs to the step that trains on it (`at`). Its policy may be older (`rollout.max_staleness`). Calls may
begin before the trainer needs them. All calls of one policy form one batch; a thread stores each call as soon as
its completions arrive, while the trainer does earlier work.
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

from grpo_orch.checkpoint.records import rollouts
from grpo_orch.checkpoint.records.rollouts import EVALUATION_CALLS, Rollout, Session
from grpo_orch.checkpoint.store.errors import Corrupt
from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.policies.model.vocabulary import PolicyVersion, Precedence, Recovery, machine_of
from grpo_orch.policies.serving.trainer_requests import request_seed
from grpo_orch.policies.serving.wire import Batch, Completion, CompletionRequest, PolicyRef
from grpo_orch.tasks.completions.gateway_client import Generated
from grpo_orch.tasks.completions.refused_prompts import RefusedPrompts
from grpo_orch.tasks.storing.heartbeat import Heartbeat
from grpo_orch.tasks.storing.step_costs import StepCosts

log = structlog.get_logger()

CHECK_INTERVAL_S = 0.25  # how often to check whether the trainer must exit, while it waits for a call


class CompletionClient(Protocol):
    """A source of completions: the gateway, or the trainer's own model."""

    def complete(self, batch: Batch) -> Generated:
        """Return once every request of the batch is finished.

        Raises GenerationFailed, Fenced, LeaveNow.
        """


class BackgroundClient(CompletionClient, Protocol):
    """A source that can also make completions in the background."""

    def complete_in_background(
        self, batch: Batch, on_completion: Callable[[Completion], None], report_activity: Callable[[str], None]
    ) -> Generated:
        """Complete the batch in a thread.

        Call `on_completion` with each completion, and `report_activity` with the trainer's activity if it waits
        for this batch. Raises GenerationFailed, Fenced.
        """


@dataclass(frozen=True, slots=True)
class SessionRequest(CompletionRequest):
    """Request one agent session on one row.

    The session's name is deterministic, so a restarted trainer finds the gateway's recording of it.
    """

    session: str
    row: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Call:
    """A generate call.

    Args:
        at: the timeline, and the number of finished steps when the call is trained on or evaluated.
        number: the call's number within that step.
        policy: the version to sample from.
        prompts: token ids, or rows for an agent.
        samples: completions per prompt.
        sampling: vLLM's parameters.
    """

    at: PolicyVersion
    number: int
    policy: PolicyVersion
    prompts: list[Any]
    samples: int
    sampling: dict[str, Any]

    def requests(self, run_seed: int) -> list[CompletionRequest]:
        """Return the call's requests, prompt by prompt, each with its own seed."""
        return [
            self._request(run_seed, prompt_number, sample)
            for prompt_number in range(len(self.prompts))
            for sample in range(self.samples)
        ]

    def _request(self, run_seed: int, prompt_number: int, sample: int) -> CompletionRequest:
        index, prompt = prompt_number * self.samples + sample, self.prompts[prompt_number]
        seed = request_seed(run_seed, self.at.timeline, self.at.step, self.number, prompt_number, sample)
        if isinstance(prompt, dict):
            session = f"{self.at.timeline}-{self.at.step}-{self.number}-{prompt_number}-{sample}"
            return SessionRequest(index, [], seed, session, prompt)
        return CompletionRequest(index, prompt, seed)


Policies = Callable[[PolicyVersion], PolicyRef]


@dataclass(slots=True)
class _CallResult:
    """A call's completions, from the store or from the gateway.

    `took_s` counts from the request, or from the end of the previous call if that is later.
    """

    rollout: Rollout
    is_stored: bool
    is_replayed: bool = False
    took_s: float = 0.0
    machines: int = 0
    ahead_s: float = 0.0  # the part of took_s before the trainer began to wait
    wait_s: float = 0.0  # seconds without a serving node while the trainer waited
    unserved_s: float = 0.0  # the same, including time when the trainer did not wait
    done_at_s: float = 0.0  # on the monotonic clock


@dataclass(slots=True)
class _Activity:
    """What the trainer reports while it waits for a call of a background batch."""

    now: str = "generating"

    def report(self, activity: str) -> None:
        self.now = activity


@dataclass(slots=True)
class _BackgroundCall:
    """A call that is made in the background."""

    call: Call
    digest: str
    made: Future[_CallResult] = field(default_factory=Future)
    activity: _Activity = field(default_factory=_Activity)  # shared by all calls of its batch
    storing: threading.Lock = field(default_factory=threading.Lock)
    is_dropped: bool = False

    def drop(self) -> None:
        """Discard the call: its result must not be stored, because another one replaces it."""
        with self.storing:
            self.is_dropped = True


class _BackgroundBatch:
    """Calls of one policy that the gateway completes as one batch, in order.

    Args:
        begun: the calls.
        policy: the location of the policy.
        store: stores a call's result and returns whether it did; called once per call.
    """

    def __init__(
        self, begun: list[_BackgroundCall], policy: PolicyRef, store: Callable[[_BackgroundCall, Rollout], bool]
    ) -> None:
        self._begun, self._policy, self._store = begun, policy, store
        self._began_s = time.monotonic()
        sizes = [len(background.call.prompts) * background.call.samples for background in begun]
        self._starts = [0, *accumulate(sizes)]
        self._missing = sizes
        self._found: dict[int, Completion] = {}

    def requests(self, run_seed: int) -> list[CompletionRequest]:
        """Return the requests of all calls, renumbered for the batch."""
        requests = [request for begun in self._begun for request in begun.call.requests(run_seed)]
        return [replace(request, index=index) for index, request in enumerate(requests)]

    def take(self, completion: Completion) -> None:
        """Record a completion, and finish its call if it was the last one missing.

        The last call waits for the end of the batch, which reports the losses.
        """
        self._found[completion.index] = completion
        position = bisect_right(self._starts, completion.index) - 1
        self._missing[position] -= 1
        if not self._missing[position] and any(self._missing):
            self._finish(position, 0, 0.0)

    def end(self, generated: Generated) -> None:
        """Finish the remaining calls of the complete batch; the last one carries the batch's losses."""
        self._found |= {completion.index: completion for completion in generated.completions}
        unfinished = [position for position, begun in enumerate(self._begun) if not begun.made.done()]
        for position in unfinished:
            is_last = position == unfinished[-1]
            losses = (generated.discarded, generated.wait_s) if is_last else (0, 0.0)
            self._finish(position, *losses)

    def fail(self, error: BaseException) -> None:
        """Fail the unfinished calls with this error."""
        for begun in self._begun:
            if not begun.made.done():
                begun.made.set_exception(error)

    def _finish(self, position: int, discarded: int, wait_s: float) -> None:
        begun, done_at_s = self._begun[position], time.monotonic()
        indices = range(self._starts[position], self._starts[position + 1])
        completions = [replace(self._found.pop(index), index=index - indices.start) for index in indices]
        rollout = _rollout(begun.call, begun.digest, self._policy, Generated(completions, discarded, wait_s))
        begun.made.set_result(
            _CallResult(
                rollout,
                self._store(begun, rollout),
                took_s=done_at_s - self._began_s,
                machines=_machines_of(completions),
                done_at_s=done_at_s,
                unserved_s=wait_s,
            )
        )


class RolloutSource:
    """Answer generate calls, each at one policy version.

    Args:
        store: the run's store.
        gateway: completes calls that the store lacks; `begin` requires a BackgroundClient.
        heartbeat: reports when generation is over.
        costs: charged for each call.
        refused: judges refused prompts.
        by: the precedence of this trainer.
        run_seed: GRPOConfig's `seed`.
        deadline_s: how long a call may go without a token.
        recovery: how to continue a completion whose node is lost.
        check_stop: raises Fenced or LeaveNow if the trainer must exit while it waits for a background call.
    """

    def __init__(
        self,
        store: Store,
        gateway: CompletionClient,
        heartbeat: Heartbeat,
        costs: StepCosts,
        refused: RefusedPrompts,
        *,
        by: Precedence,
        run_seed: int,
        deadline_s: float,
        recovery: Recovery = "continue",
        check_stop: Callable[[], None] = lambda: None,
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
        self._check_stop = check_stop
        self._at = PolicyVersion(-1, -1)
        self._calls = {True: 0, False: 0}  # finished at that step: training, evaluation
        self._begun: dict[tuple[PolicyVersion, int], _BackgroundCall] = {}
        self._done_at_s = 0.0  # when the latest awaited background call finished
        self._new_at_step: int | None = None  # the first step with a call that the store lacked
        # Keys of earlier trainers' records; None: not listed yet.
        self._stored: dict[tuple[PolicyVersion, int], list[str]] | None = None

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

        `policies` is called only if something must be generated, and must return once that version can be
        pulled. `policy` is the version to sample from; it defaults to that of the step. `number` is the call's
        number within its step; it defaults to the next one.

        Raises GenerationFailed, BadPrompts, Fenced, LeaveNow, StoreError.
        """
        self._heartbeat.check()
        self._heartbeat.update("training")  # the prompts are tokenized: rollout nodes are worth their cost
        counted = self._next_call(at, training)
        call = Call(at, counted if number is None else number, policy or at, prompts, samples, sampling)
        rollout = self._complete_call(call, policies, training=training)
        self._calls[training] += 1  # only now: a failed call is retried under the same number
        self._heartbeat.update("training")
        return rollout

    def begin(self, calls: Iterable[Call], policies: Policies) -> None:
        """Start making these calls in the background, except those in the store; `complete` then takes them.

        A call that `complete` requests differently is made on demand. `policies` is as for `complete`.
        Raises StoreError and the errors of `policies`.
        """
        new = defaultdict[PolicyVersion, list[_BackgroundCall]](list)
        for call in calls:
            if (call.at, call.number) in self._begun:
                continue
            begun = _BackgroundCall(call, rollouts.digest_of(call.requests(self._run_seed), call.sampling))
            if (stored := self._read_stored(call, begun.digest)) is not None:
                begun.made.set_result(_replayed(stored))
                self._begun[call.at, call.number] = begun
            else:
                self._note_new(call)
                new[call.policy].append(begun)
        for version, together in new.items():
            activity, ref = _Activity(), policies(version)
            for begun in together:
                begun.activity = activity
                self._begun[begun.call.at, begun.call.number] = begun
            name = f"calls of {version} from {together[0].call.at}"
            threading.Thread(target=self._work, args=(together, ref), name=name, daemon=True).start()

    @property
    def _aside(self) -> BackgroundClient:
        return cast(BackgroundClient, self._gateway)

    def _complete_call(self, call: Call, policies: Policies, *, training: bool) -> Rollout:
        """Return one call's completions, from the store or made now and stored."""
        requests = call.requests(self._run_seed)
        digest = rollouts.digest_of(requests, call.sampling)
        begun = self._begun.pop((call.at, call.number), None)
        if begun is not None and begun.digest == digest:
            generated = self._awaited(begun)
        elif (stored := self._read_stored(call, digest)) is not None:
            generated = _replayed(stored)
        else:
            if begun is not None:
                begun.drop()
            if training:
                self._note_new(call)
            generated = self._generate(call, requests, digest, policies)
        rollout = generated.rollout
        if training and not generated.is_replayed:
            seconds = max(0.0, generated.took_s - generated.wait_s)
            self._costs.add_generation(seconds, generated.machines, generated.ahead_s, generated.unserved_s)
        self._judge(rollout, call)  # before storing: a call that ends the run is requested again
        if not generated.is_stored:
            self._store_rollout(rollout)
        self._costs.add(rollout, generated.wait_s, training=training, replayed=generated.is_replayed)
        return rollout

    def _generate(
        self, call: Call, requests: list[CompletionRequest], digest: str, policies: Policies
    ) -> _CallResult:
        """Make the call while the trainer waits."""
        began_s = time.monotonic()
        try:
            batch = self._batch(call, requests, policies(call.policy))
            published_s = time.monotonic()
            generated = self._gateway.complete(batch)
        finally:
            ended_s = time.monotonic()
            self._costs.generated_s += ended_s - began_s
        rollout, machines = _rollout(call, digest, batch.policy, generated), _machines_of(generated.completions)
        return _CallResult(
            rollout,
            is_stored=False,
            took_s=ended_s - published_s,
            machines=machines,
            wait_s=generated.wait_s,
            unserved_s=generated.wait_s,
        )

    def _work(self, begun: list[_BackgroundCall], policy: PolicyRef) -> None:
        """Make the calls of one policy, in their own thread. An error is raised where a call is awaited."""
        together = _BackgroundBatch(begun, policy, self._stored_early)
        try:
            batch = self._batch(begun[0].call, together.requests(self._run_seed), policy)
            together.end(self._aside.complete_in_background(batch, together.take, begun[0].activity.report))
        except BaseException as error:  # noqa: BLE001  # else the trainer would wait forever
            together.fail(error)

    def _stored_early(self, begun: _BackgroundCall, rollout: Rollout) -> bool:
        """Store a call early, unless it was dropped. Return False if it must be judged first."""
        has_refused = any(completion.refused for completion in rollout.completions)
        if has_refused or any(session.failed for session in rollout.sessions):
            return False
        with begun.storing:
            if not begun.is_dropped:
                self._store_rollout(rollout)
        return True

    def _awaited(self, begun: _BackgroundCall) -> _CallResult:
        """Wait for a background call. Raises its error."""
        began_s = looked_s = time.monotonic()
        unserved_s = 0.0
        try:
            while not wait([begun.made], CHECK_INTERVAL_S).done:
                self._check_stop()
                self._heartbeat.update(begun.activity.now)
                before_s, looked_s = looked_s, time.monotonic()
                unserved_s += looked_s - before_s if begun.activity.now == "waiting" else 0.0
            generated = begun.made.result()
        finally:
            waited_s = time.monotonic() - began_s
            self._costs.generated_s += waited_s
        # Count only the time after the previous call: calls of one batch are made roughly one after the other.
        took_s = min(generated.took_s, max(0.0, generated.done_at_s - self._done_at_s))
        self._done_at_s = max(self._done_at_s, generated.done_at_s)
        return replace(generated, took_s=took_s, ahead_s=max(0.0, took_s - waited_s), wait_s=unserved_s)

    def _judge(self, rollout: Rollout, call: Call) -> None:
        self._refused.judge(call.prompts, call.samples, rollout.completions)

    def _store_rollout(self, rollout: Rollout) -> None:
        rollouts.write_rollout(self._store, rollout, self._by)

    def _batch(self, call: Call, requests: list[CompletionRequest], policy: PolicyRef) -> Batch:
        return Batch(policy, call.sampling, requests, self._deadline_s, self._recovery)

    def _note_new(self, call: Call) -> None:
        """Stop using stored calls of later policies, because this call is not a replay.

        Its step leads to other weights than before, unless all nodes compute bit-identical results.
        """
        earliest = self._new_at_step
        # A later window may have a new call before the present step does.
        self._new_at_step = call.at.step if earliest is None else min(earliest, call.at.step)

    def _next_call(self, at: PolicyVersion, training: bool) -> int:
        if at != self._at:
            self._at = at
            self._calls = {True: 0, False: EVALUATION_CALLS}
        return self._calls[training]

    def _read_stored(self, call: Call, digest: str) -> Rollout | None:
        """Return the stored record of the call if it is readable and has the same requests.

        It may come from a policy newer than the call's own.
        """
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


def _replayed(stored: Rollout) -> _CallResult:
    return _CallResult(stored, is_stored=True, is_replayed=True, wait_s=stored.wait_s)


def _rollout(call: Call, digest: str, policy: PolicyRef, generated: Generated) -> Rollout:
    made: list[Any] = list(generated.completions)
    sessions: list[Session] = [completion for completion in made if isinstance(completion, Session)]
    return Rollout(
        rollouts.SCHEMA,
        str(call.at),
        policy.version,
        call.number,
        digest,
        [] if sessions else made,
        generated.discarded,
        generated.wait_s,
        sessions,
    )


def _machines_of(made: Sequence[Completion]) -> int:
    """Count the machines that made these."""
    return len({machine_of(completion.node) for completion in made if completion.node})
