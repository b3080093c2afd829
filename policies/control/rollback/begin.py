"""Begin rollbacks: decide when, to which checkpoint, and with which changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from grpo_orch.policies.control.rollback.choice import (
    Target,
    budget_spent,
    changes_on_rollback,
    choose_start,
    choose_target,
    target_before_step,
)
from grpo_orch.policies.detect.divergence import Health
from grpo_orch.policies.model import exit_codes
from grpo_orch.policies.model.events import HealthyChosen, PitfallFound, RollbackStarted
from grpo_orch.policies.model.loss import effects, pieces_keep_gradient, value_of
from grpo_orch.policies.model.phases import LIVE_RUN, UNTRAINED_ROLLBACK
from grpo_orch.policies.model.spec import fixes_accumulation, processes_of
from grpo_orch.policies.model.state import RunState
from grpo_orch.policies.model.timelines import Fork, Skipped, forked_spec
from grpo_orch.policies.model.vocabulary import Cause, PolicyVersion, Role, RunPhase
from grpo_orch.policies.tick.draft import Tick
from grpo_orch.policies.tick.snapshot import HEARTBEAT_FRESH_S, Command

# A trainer whose own detector has tripped stores its sealed checkpoints before it ends, and the best target may be
# one. Wait this long, and again after each progress of the upload. If that detector may be about to trip, wait a
# few heartbeats.
DRAIN_WAIT_S = 600.0
DIVERGENCE_WAIT_S = 6.0
RUN_START = "start"  # in a command: the run's start instead of a checkpoint
TARGET_HINT = "`grpo-orch rollback --to TIMELINE-STEP` forces a target, `--to start` starts over from step 0"
NOTHING_SMALLER = (
    "memory can only be saved by shorter completions: use `grpo-orch rollback --to latest --set "
    "max_completion_length=NUMBER`, or set policies.min_completion_length to allow it automatically"
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
    _begin(tick, target.start, Cause.USER, changes, "requested by the user")


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
        start = None if target.start is None else str(target.start)
        tick.emit(HealthyChosen(start), f"last healthy: {target}")
        tick.move_run(RunPhase.GAVE_UP, f"diverged at step {trip.step}, and was {spent}; last healthy: {target}")
        return
    if target.missing:
        tick.move_run(RunPhase.PAUSED, f"diverged since step {trip.onset_step}; {target.missing}; {TARGET_HINT}")
        return
    reason = f"diverged since step {trip.onset_step}: {trip.evidence[0] if trip.evidence else 'no evidence kept'}"
    _begin(tick, target.start, Cause.DIVERGED, _changes_by_rule(tick), reason)


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
    min_length, accumulates = tick.spec.policies.min_completion_length, not fixes_accumulation(tick.spec)
    changes = changes_to_save_memory(_effective(tick), min_length, accumulates=accumulates)
    if changes is None:
        tick.move_run(RunPhase.PAUSED, f"the trainer is out of memory; {NOTHING_SMALLER}")
        return
    target = _target(state, checkpoints, None, ever_stored=tick.snapshot.store.ever_stored)
    if target.missing:
        tick.move_run(RunPhase.PAUSED, f"the trainer is out of memory; {target.missing}; {TARGET_HINT}")
        return
    _begin(tick, target.start, Cause.OUT_OF_MEMORY, changes, "the trainer is out of memory")


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
    newest = choose_start(tick.snapshot.store.checkpoints or (), state.forks, state.timeline, None)
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


# Changes for a trainer that ran out of memory: first those that keep the objective, then others.

GROUP_MIN = 4  # the mean of a smaller group is too noisy

Changes = dict[str, bool | int | float]


def changes_to_save_memory(
    grpo: Mapping[str, Any], min_completion_length: int | None, *, accumulates: bool = True
) -> Changes | None:
    """Return the next changes of `grpo` that save memory; None if no further change is allowed.

    In order: smaller batches on each device with more accumulation; gradient checkpointing; smaller groups; and
    shorter completions, down to `min_completion_length`. Where smaller batches change the gradient, checkpointing
    comes first.

    Args:
        accumulates: whether the accumulation may be changed.
    """
    pieces, checkpointing = _in_smaller_pieces(grpo) if accumulates else None, _with_checkpointing(grpo)
    exact = (pieces, checkpointing) if pieces_keep_gradient(grpo) else (checkpointing, pieces)
    groups = _with_smaller_groups(grpo) if accumulates else None
    for changes in (*exact, groups, _with_shorter_completions(grpo, min_completion_length)):
        if changes is not None:
            return changes
    return None


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


def _with_shorter_completions(grpo: Mapping[str, Any], min_length: int | None) -> Changes | None:
    length = int(value_of(grpo, "max_completion_length"))
    if min_length is None or length <= min_length:
        return None
    return {"max_completion_length": max(min_length, length // 2)}
