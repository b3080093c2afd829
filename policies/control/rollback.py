"""Roll the run back: decide when, to which checkpoint and with which changes; then do it in journalled stages.

A stage requests its effect at every tick until the effect is observed. So if a controller dies between any two
stages, the next controller continues. A rollback after a divergence, for lack of memory or by a user without a
target goes where `choose_target` says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_orch.policies.detect.divergence import Health, Verdict
from grpo_orch.policies.model import exit_codes
from grpo_orch.policies.model.events import (
    Diverged,
    DivergenceCleared,
    DivergenceSuspected,
    FleetMoved,
    PitfallFound,
    ProbationPassed,
    RollbackStarted,
    TimelineForked,
    TimelineResumed,
    TrainerFenced,
)
from grpo_orch.policies.model.loss import (
    CLIPPING_LOSSES,
    effects,
    is_on_policy,
    loss_of,
    pieces_keep_gradient,
    value_of,
    weight_cap,
)
from grpo_orch.policies.model.phases import LIVE_RUN, UNTRAINED_ROLLBACK
from grpo_orch.policies.model.reports import PITFALL
from grpo_orch.policies.model.spec import (
    OnRollback,
    RollbackBudget,
    fixes_accumulation,
    generates_itself,
    processes_of,
)
from grpo_orch.policies.model.state import Rollback, RunState
from grpo_orch.policies.model.timelines import Fork, Skipped, forked_spec, lineage, on_lineage
from grpo_orch.policies.model.vocabulary import Cause, NodePhase, PolicyVersion, Role, RollbackStage, RunPhase
from grpo_orch.policies.serving.wire import labelled_version
from grpo_orch.policies.tick.draft import Tick
from grpo_orch.policies.tick.snapshot import BEFORE_TRAINING, HEARTBEAT_FRESH_S, Command

# An old trainer stops when it next reads the store, and a hung process kills itself (after 20 s). A machine where
# neither happens is terminated.
FENCE_WAIT_S = 120.0


def control_timeline(tick: Tick) -> None:
    """Journal the run's health, advance a rollback, and begin one if needed."""
    if tick.state.phase not in LIVE_RUN:
        return
    report_health(tick)
    report_pitfalls(tick)
    if tick.state.rollback is not None:
        _advance(tick, tick.state.rollback)
    if tick.state.rollback is None or tick.state.rollback.stage not in UNTRAINED_ROLLBACK:
        answer_divergence(tick)
        answer_memory(tick)


def _advance(tick: Tick, rollback: Rollback) -> None:
    timeline, beat = rollback.fork.timeline, tick.snapshot.trainer
    if beat is not None and (beat.timeline != timeline or beat.activity in BEFORE_TRAINING):
        beat = None  # no trainer trains on the new timeline yet
    match rollback.stage:
        case RollbackStage.BEGUN:
            if tick.snapshot.store.timeline >= timeline:
                tick.emit(TimelineForked(timeline), f"timeline {timeline} is in the store")
        case RollbackStage.FORKED:
            _fence(tick, rollback)
        case RollbackStage.FENCED:
            if beat is not None:
                resumed = TimelineResumed(timeline, beat.step)
                tick.emit(resumed, f"timeline {timeline} trains from step {beat.step}")
        case RollbackStage.RESUMED:
            policy = next((p for p in _served(tick) if p.timeline == timeline), None)
            if policy is not None:
                tick.emit(FleetMoved(timeline, str(policy)), f"the fleet serves {policy}")
        case RollbackStage.PROBATION:
            if beat is not None and beat.step > rollback.probation_until_step:
                tick.emit(ProbationPassed(timeline, beat.step), f"timeline {timeline} has passed its probation")


def _fence(tick: Tick, rollback: Rollback) -> None:
    trainers = tick.state.live(Role.TRAINER)
    working = [node for node in trainers if node.may_be_working]
    if working and tick.silent_s(rollback.since_s) > FENCE_WAIT_S:
        for node in working:
            tick.move(node, NodePhase.TERMINATING, "its trainer did not stop for the new timeline")
        return
    if working:
        return
    tick.emit(TrainerFenced(rollback.fork.timeline), "the old trainer has ended")
    for node in trainers:
        if node.attempt_ended_at_s is not None and node.phase is not NodePhase.DRAINING:
            tick.restart(node, f"continues with timeline {rollback.fork.timeline}")


def _served(tick: Tick) -> list[PolicyVersion]:
    """Return the policy versions that generate now: rollout nodes' or, without any in the run, the trainer's."""
    beat = tick.snapshot.trainer
    if generates_itself(tick.spec) and beat is not None and beat.activity not in BEFORE_TRAINING:
        return [PolicyVersion(beat.timeline, beat.step)]
    members = (tick.snapshot.members or {}).values()
    return [labelled_version(member.policy) for member in members if member.serving and member.policy]


# The detectors' verdict, journalled: the run diverges, may diverge, is healthy again, or has a pitfall.


def report_health(tick: Tick) -> None:
    """Journal a change of the detectors' verdict."""
    state = tick.state
    if state.diverged is not None:
        return
    verdict, seen_by = _verdict(tick)
    if verdict is None:
        return
    onset_step = verdict.step if verdict.onset_step is None else verdict.onset_step
    if verdict.health is Health.TRIPPED:
        step = verdict.step if verdict.tripped_step is None else verdict.tripped_step
        event = Diverged(state.timeline, step, onset_step, verdict.evidence, seen_by)
        tick.emit(event, f"diverged since step {onset_step}")
    elif verdict.health is Health.WATCH and state.suspected is None:
        watched = DivergenceSuspected(state.timeline, verdict.step, onset_step, verdict.evidence)
        tick.emit(watched, f"may be diverging since step {onset_step}")
    elif verdict.health is Health.HEALTHY and state.suspected is not None:
        tick.emit(DivergenceCleared(state.timeline, verdict.step), "healthy again")


def _verdict(tick: Tick) -> tuple[Verdict | None, str]:
    """Return the verdict on the present timeline and its source.

    The source is the trainer's detectors, unless they have none or only the controller's have tripped.
    """
    beat, watched, timeline = tick.snapshot.trainer, tick.snapshot.verdict, tick.state.timeline
    by_trainer = beat.verdict if beat is not None and beat.timeline == timeline else None
    by_controller = watched.verdict if watched is not None and watched.timeline == timeline else None
    has_tripped = by_controller is not None and by_controller.health is Health.TRIPPED
    if by_trainer is None or (has_tripped and by_trainer.health is not Health.TRIPPED):
        return by_controller, "controller"
    return by_trainer, "trainer"


def report_pitfalls(tick: Tick) -> None:
    """Journal each pitfall once."""
    watched = tick.snapshot.verdict
    for found in watched.pitfalls if watched is not None and watched.timeline == tick.state.timeline else ():
        last = tick.state.reports.get(f"{PITFALL} {found.kind}")
        if last is None or found.step > int(last.state):
            tick.report(PitfallFound(found.kind, found.step, found.text), f"noticed: {found.kind}")


# When a rollback begins.

# A trainer whose own detector has tripped stores its sealed checkpoints before it ends, and the best target may be
# one. Wait this long, and again after each progress of the upload. If that detector may be about to trip, wait a
# few heartbeats.
DRAIN_WAIT_S = 600.0
DIVERGENCE_WAIT_S = 6.0
RUN_START = "start"  # in a command: the run's start instead of a checkpoint
TARGET_HINT = "`grpo-orch rollback --to TIMELINE-STEP` forces a target, `--to start` starts over from step 0"
NOTHING_SMALLER = (
    "memory can only be saved by shorter completions: use `grpo-orch rollback --to latest --set "
    "max_completion_length=NUMBER`"
)
WHOLE_NUMBER_KEYS = frozenset({"max_completion_length", "max_steps"})  # of the keys that a user may set


def begin_user_rollback(tick: Tick, command: Command) -> None:
    """Begin the rollback that a user requested. A run that has ended continues with it."""
    state = tick.state
    is_finished = state.phase is RunPhase.FINISHED
    if state.phase is RunPhase.STOPPING or (is_finished and "max_steps" not in command.changes):
        return
    stored = tick.snapshot.store
    if stored.checkpoints is None:
        _refuse_by_hand(tick, stored.damaged)
        return
    if command.start is None:
        target = user_target(state, stored.checkpoints, ever_stored=stored.ever_stored)
    elif command.start == RUN_START:
        target = Target(None)
    else:
        named = PolicyVersion.parse(command.start)
        missing = "" if named in stored.checkpoints else f"checkpoint {named} is no longer in the store"
        target = Target(named, missing)
    if target.missing:
        _refuse_by_hand(tick, f"{target.missing}; {TARGET_HINT}")
        return
    changes = {key: _as_whole(key, value) for key, value in command.changes.items()} or _changes_by_rule(tick)
    if state.phase not in LIVE_RUN:
        tick.move_run(RunPhase.STARTING, "resumed with more steps" if is_finished else "rolled back by hand")
    _begin(tick, target.checkpoint, Cause.USER, changes, "requested by the user")


def _refuse_by_hand(tick: Tick, reason: str) -> None:
    text = f"the rollback was refused: {reason}"
    tick.emit(PitfallFound("no_target", _reached(tick), text), text)


def user_target(state: RunState, checkpoints: Sequence[PolicyVersion], *, ever_stored: bool) -> Target:
    """Return the target of a user's rollback that names none: before the divergence, if there is one."""
    divergence = state.diverged or state.suspected
    onset_step = None if divergence is None else divergence.onset_step
    return _target(state, checkpoints, onset_step, ever_stored=ever_stored)


def _target(
    state: RunState, checkpoints: Sequence[PolicyVersion], onset_step: int | None, *, ever_stored: bool
) -> Target:
    """Return the target after a divergence since `onset_step`, or without one (None)."""
    before_step = None if onset_step is None else target_before_step(onset_step, state.rollbacks)
    return choose_target(checkpoints, state.forks, state.timeline, before_step, ever_stored=ever_stored)


def answer_divergence(tick: Tick) -> None:
    """Do what `policies.kl` says about a divergence: roll back, pause, or nothing."""
    state, policy = tick.state, tick.spec.policies.kl
    trip, checkpoints = state.diverged, tick.snapshot.store.checkpoints
    if trip is None or policy.action == "alert" or _is_storing(tick):
        return
    if checkpoints is None:
        _pause_if_damaged(tick, f"diverged since step {trip.onset_step}")
        return
    target = _target(state, checkpoints, trip.onset_step, ever_stored=tick.snapshot.store.ever_stored)
    if policy.action == "pause" and not target.missing:
        reason = f"diverged since step {trip.onset_step}; `grpo-orch rollback` goes back to {target}"
        tick.move_run(RunPhase.PAUSED, reason)
        return
    spent = budget_spent(state.rollbacks, trip.step, policy.budget)
    if spent and policy.action == "rollback":
        start = target.checkpoint
        hint = "" if start is None else f", see `grpo-orch checkpoints export {start} FOLDER`"
        reason = f"diverged at step {trip.step}, and was {spent}; last healthy: {target}{hint}"
        tick.move_run(RunPhase.GAVE_UP, reason)
        return
    if target.missing:
        tick.move_run(RunPhase.PAUSED, f"diverged since step {trip.onset_step}; {target.missing}; {TARGET_HINT}")
        return
    reason = f"diverged since step {trip.onset_step}: {trip.evidence[0] if trip.evidence else 'no evidence kept'}"
    _begin(tick, target.checkpoint, Cause.DIVERGED, _changes_by_rule(tick), reason)


def _is_storing(tick: Tick) -> bool:
    """Whether the trainer that diverged may still store checkpoints.

    While the store is unavailable it can neither store nor report.
    """
    beat = tick.snapshot.trainer
    if beat is None or beat.timeline != tick.state.timeline or tick.silent_s(beat.beat_at_s) > HEARTBEAT_FRESH_S:
        return False
    node = tick.node(beat.node)
    if node is None or node.attempt != beat.attempt or not node.may_be_working:
        return False
    tripped = beat.verdict is not None and beat.verdict.health is Health.TRIPPED
    if not tripped:
        return tick.silent_s(tick.state.diverged_at_s) < DIVERGENCE_WAIT_S
    return tick.silent_s(max(tick.state.diverged_at_s, tick.snapshot.trainer_moved_at_s)) < DRAIN_WAIT_S


def answer_memory(tick: Tick) -> None:
    """Roll back a trainer that ran out of memory, to continue with less."""
    checkpoints, state = tick.snapshot.store.checkpoints, tick.state
    if not _out_of_memory(tick) or state.phase not in LIVE_RUN:
        return
    if state.rollback is not None and state.rollback.stage in UNTRAINED_ROLLBACK:
        return
    if checkpoints is None:
        _pause_if_damaged(tick, "the trainer is out of memory")
        return
    changes = changes_to_save_memory(_effective(tick), accumulates=not fixes_accumulation(tick.spec))
    if changes is None:
        tick.move_run(RunPhase.PAUSED, f"the trainer is out of memory; {NOTHING_SMALLER}")
        return
    target = _target(state, checkpoints, None, ever_stored=tick.snapshot.store.ever_stored)
    if target.missing:
        tick.move_run(RunPhase.PAUSED, f"the trainer is out of memory; {target.missing}; {TARGET_HINT}")
        return
    _begin(tick, target.checkpoint, Cause.OUT_OF_MEMORY, changes, "the trainer is out of memory")


def _pause_if_damaged(tick: Tick, reason: str) -> None:
    """Pause the run for a person to decide if the list of checkpoints cannot be read."""
    if tick.snapshot.store.damaged:
        tick.move_run(RunPhase.PAUSED, f"{reason}; {tick.snapshot.store.damaged}; then `grpo-orch rollback`")


def _out_of_memory(tick: Tick) -> bool:
    return any(
        node.attempt_ended_at_s is not None and tick.snapshot.exit_code_of(node) == exit_codes.OUT_OF_MEMORY
        for node in tick.state.live(Role.TRAINER)
    )


def _begin(
    tick: Tick, start: PolicyVersion | None, cause: Cause, changes: Mapping[str, bool | int | float], reason: str
) -> None:
    state = tick.state
    used = [state.timeline, tick.snapshot.store.timeline, *(past.fork.timeline for past in state.rollbacks)]
    before = state.forks[-1] if state.forks else Fork(0, None)
    has_passed = any(past.passed for past in state.rollbacks if past.fork == before)
    fork = Fork(
        timeline=max(used) + 1,
        start=None if start is None else str(start),
        changes={**before.changes, **changes},
        skipped=(*(() if has_passed else before.skipped), *_skipped(tick, before)),
        reason=reason,
        from_step=_reached(tick),
    )
    described = effects(changes, _effective(tick), processes_of(tick.spec))
    event = RollbackStarted(fork, cause, _reached(tick), reason, described)
    tick.emit(event, f"rolling back to {fork.start or 'the start'}: {reason}")


def _reached(tick: Tick) -> int:
    """Return the step that the present timeline has reached: its trip, or by its trainer and checkpoints."""
    state, beat = tick.state, tick.snapshot.trainer
    if state.diverged is not None:
        return state.diverged.step
    steps = [beat.step] if beat is not None and beat.timeline == state.timeline else []
    newest = newest_before(tick.snapshot.store.checkpoints or (), state.forks, state.timeline, None)
    return max([*steps, 0 if newest is None else newest.step])


def _skipped(tick: Tick, before: Fork) -> tuple[Skipped, ...]:
    """Return the steps of the present timeline whose prompts are skipped."""
    trip = tick.state.diverged
    if trip is None or not tick.spec.policies.kl.on_rollback.skip_prompts:
        return ()
    first_of_timeline = 1 if before.start_at is None else before.start_at.step + 1
    return (Skipped(trip.timeline, max(trip.onset_step, first_of_timeline), trip.step),)


def _changes_by_rule(tick: Tick) -> dict[str, bool | int | float]:
    rules = tick.spec.policies.kl.on_rollback
    return {**changes_on_rollback(_effective(tick), rules, processes_of(tick.spec))}


def _as_whole(key: str, value: float) -> int | float:
    """Convert a command's value to int where the key needs it; the store returns all numbers as floats."""
    return int(value) if key in WHOLE_NUMBER_KEYS else value


def _effective(tick: Tick) -> dict[str, object]:
    """The present timeline's `grpo`."""
    forks = tick.state.forks
    return forked_spec(tick.spec, forks[-1] if forks else None).grpo


# Its target, its changes, and whether the budget allows it.


@dataclass(frozen=True, slots=True)
class Target:
    """A rollback's target: a checkpoint, or the run's start (`checkpoint` None).

    With `missing`, the reason, there is no automatic target.
    """

    checkpoint: PolicyVersion | None
    missing: str = ""

    def __str__(self) -> str:
        return self.missing or ("the start" if self.checkpoint is None else f"checkpoint {self.checkpoint}")


def choose_target(
    checkpoints: Sequence[PolicyVersion],
    forks: Sequence[Fork],
    timeline: int,
    before_step: int | None,
    *,
    ever_stored: bool,
) -> Target:
    """Return the automatic target: the newest checkpoint on the timeline's lineage from before `before_step`.

    The run's start is chosen only if that loses nothing: no checkpoint was ever stored or, without `before_step`,
    a user had the timeline begin there and it has stored none yet.

    Args:
        ever_stored: whether the store has ever listed a checkpoint, even if it lists none now.
    """
    checkpoint = newest_before(checkpoints, forks, timeline, before_step)
    if checkpoint is not None:
        return Target(checkpoint)
    began_at_start = timeline != 0 and all(isinstance(part, int) for part in lineage(forks, timeline))
    if not (checkpoints or ever_stored) or (began_at_start and before_step is None):
        return Target(None)
    if before_step is None:
        return Target(None, "the store no longer has a checkpoint of this timeline")
    stored = ", ".join(map(str, sorted(checkpoints))) or "no checkpoints"
    return Target(None, f"no checkpoint is from before step {before_step}; the store has {stored}")


def newest_before(
    checkpoints: Sequence[PolicyVersion], forks: Sequence[Fork], timeline: int, before_step: int | None
) -> PolicyVersion | None:
    """Return the newest checkpoint on the lineage of `timeline`, with a step below `before_step` if given.

    None if there is none.
    """
    stretches = lineage(forks, timeline)
    found = [
        version
        for version in checkpoints
        if on_lineage(version, stretches) and (before_step is None or version.step < before_step)
    ]
    return max(found, key=lambda version: version.step, default=None)


def target_before_step(onset_step: int, rollbacks: Sequence[Rollback]) -> int:
    """Return the step before which the next target must lie.

    A timeline that trips during its probation started too late, so the next target also lies before that start,
    even if memory ran out in between.
    """
    for rollback in reversed(rollbacks):
        if rollback.passed or rollback.cause is Cause.USER:
            break
        if rollback.cause is Cause.DIVERGED:
            start = rollback.fork.start_at
            return onset_step if start is None else min(onset_step, start.step)
    return onset_step


def changes_on_rollback(grpo: Mapping[str, Any], rules: OnRollback, processes: int = 1) -> dict[str, float]:
    """Return the keys of `grpo` that a rollback changes, with their new values, if the change has an effect.

    Without a KL term (`beta` 0) none is added: it would need memory for a reference model and change the user's
    objective. `epsilon`, and `epsilon_high` where set, change only where they clip a ratio other than 1; `cispo`
    instead caps weights, and its cap moves towards 1.

    Args:
        processes: number of training processes.
    """
    factors = {"learning_rate": rules.learning_rate_factor, "beta": rules.beta_factor}
    off_policy = not is_on_policy(grpo, processes)
    if off_policy and loss_of(grpo) in CLIPPING_LOSSES:
        factors["epsilon"] = rules.epsilon_factor
        if grpo.get("epsilon_high") is not None:
            factors["epsilon_high"] = rules.epsilon_factor
    values = {key: weight_cap(grpo) if key == "epsilon_high" else value_of(grpo, key) for key in factors}
    wanted = {key: value * factors[key] for key, value in values.items()}
    if off_policy and loss_of(grpo) == "cispo" and (cap := weight_cap(grpo)) > 1:
        values["epsilon_high"], wanted["epsilon_high"] = cap, 1 + (cap - 1) * rules.epsilon_factor
    # Ten digits, so that 0.1 x 3 is not shown as 0.30000000000000004.
    changed = {key: float(f"{value:.10g}") for key, value in wanted.items()}
    return {key: value for key, value in changed.items() if value != values[key]}


def budget_spent(rollbacks: Sequence[Rollback], step: int, budget: RollbackBudget) -> str:
    """Return why the budget allows no further rollback for a trip at `step`; empty: it does.

    Rollbacks for divergence count, since the last rollback by a user.
    """
    counted: list[Rollback] = []
    for rollback in rollbacks:
        counted = [] if rollback.cause is Cause.USER else [*counted, rollback]
    counted = [rollback for rollback in counted if rollback.cause is Cause.DIVERGED]
    recent = [rollback for rollback in counted if abs(step - rollback.from_step) < budget.recent_steps]
    if len(counted) >= budget.total:
        return f"rolled back {len(counted)} times, the limit of policies.kl.budget.total"
    if len(recent) >= budget.recent:
        return (
            f"rolled back {len(recent)} times within {budget.recent_steps} steps, the limit of policies.kl.budget"
        )
    return ""


# Changes for a trainer that ran out of memory: first those that keep the objective, then others.

GROUP_MIN = 4  # the mean of a smaller group is too noisy

Changes = dict[str, bool | int | float]


def changes_to_save_memory(grpo: Mapping[str, Any], *, accumulates: bool = True) -> Changes | None:
    """Return the next changes of `grpo` that save memory; None if no further change is allowed.

    In order: smaller batches on each device with more accumulation; gradient checkpointing; smaller groups. Where
    smaller batches change the gradient, checkpointing comes first.

    Args:
        accumulates: whether the accumulation may be changed.
    """
    pieces, checkpointing = _in_smaller_pieces(grpo) if accumulates else None, _with_checkpointing(grpo)
    exact = (pieces, checkpointing) if pieces_keep_gradient(grpo) else (checkpointing, pieces)
    groups = _with_smaller_groups(grpo) if accumulates else None
    return next((changes for changes in (*exact, groups) if changes is not None), None)


def _in_smaller_pieces(grpo: Mapping[str, Any]) -> Changes | None:
    """Divide the batch on each device by its smallest divisor, and multiply the accumulation by it.

    A generation and an optimizer step keep their number of completions.
    """
    batch = int(value_of(grpo, "per_device_train_batch_size"))
    if batch == 1:
        return None
    parts = next(part for part in range(2, batch + 1) if batch % part == 0)
    changes: Changes = {
        "per_device_train_batch_size": batch // parts,
        "gradient_accumulation_steps": int(value_of(grpo, "gradient_accumulation_steps")) * parts,
    }
    # If unset, TRL derives it from the accumulation or from generation_batch_size.
    if (steps := grpo.get("steps_per_generation")) is not None:
        changes["steps_per_generation"] = int(steps) * parts
    return changes


def _with_checkpointing(grpo: Mapping[str, Any]) -> Changes | None:
    return None if value_of(grpo, "gradient_checkpointing") else {"gradient_checkpointing": True}


def _with_smaller_groups(grpo: Mapping[str, Any]) -> Changes | None:
    """Halve the group and keep the number of prompts: generation and optimizer step have half the completions."""
    group, accumulation = (
        int(value_of(grpo, "num_generations")),
        int(value_of(grpo, "gradient_accumulation_steps")),
    )
    halved: Changes = {"num_generations": group // 2, "gradient_accumulation_steps": accumulation // 2}
    before = [group, accumulation]
    for key in ("steps_per_generation", "generation_batch_size"):
        if (value := grpo.get(key)) is not None:
            halved[key] = int(value) // 2
            before.append(int(value))
    is_possible = group // 2 >= GROUP_MIN and all(value % 2 == 0 for value in before)
    return halved if is_possible else None
