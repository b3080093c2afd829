"""A rollback as one transaction, a journalled stage at a time.

Each stage is left when what it waits for is seen, and what it waits for is asked for at every tick until then. So
a controller that dies between any two is continued by the next one, whatever had happened.
"""

from __future__ import annotations

from collections.abc import Mapping

from policies import exit_codes
from policies.divergence import Health, Verdict
from policies.events import (
    Diverged,
    DivergenceCleared,
    DivergenceWatched,
    Exported,
    FleetMoved,
    HealthyChosen,
    Noticed,
    ProbationPassed,
    RollbackBegun,
    TimelineForked,
    TimelineResumed,
    TrainerFenced,
)
from policies.mirror import HEARTBEAT_FRESH_S
from policies.rollback import before_step_of, changes_after, choose_start, halved, spent
from policies.snapshot import Command
from policies.state import Node, Rollback
from policies.tick import Tick
from policies.timelines import Fork, Skipped, forked_spec
from policies.vocabulary import Cause, NodePhase, PolicyVersion, Role, RollbackStage, RunPhase
from policies.wire import labelled_version

# An old trainer stops at its next look at the store, and its process ends itself where it hangs (20 s). A machine
# on which neither happens is given up.
FENCE_WAIT_S = 120.0
# A guard that has tripped stores what was sealed before it ends its trainer: among that may be the best target.
# One that may be about to say so is waited for as well, for a beat or two.
DRAIN_WAIT_S = 600.0
GUARD_WAIT_S = 6.0
NOT_YET = frozenset({"starting", "restoring"})  # activities of a trainer that does not train yet
RUN_START = "start"  # in a command: the run's start, as against a checkpoint
_ALIVE = frozenset({RunPhase.STARTING, RunPhase.TRAINING})
_UNDER_WAY = frozenset({RollbackStage.BEGUN, RollbackStage.FORKED, RollbackStage.FENCED})


def steer_timeline(tick: Tick) -> None:
    """Note how the run is, carry a rollback on, and begin one where it is due."""
    healthy = tick.state.healthy
    if healthy is not None and tick.state.exported != healthy and tick.snapshot.exported_to is not None:
        tick.emit(Exported(healthy, tick.snapshot.exported_to), f"{healthy} is exported")
    if tick.state.phase not in _ALIVE:
        return
    _note_health(tick)
    _note_pitfalls(tick)
    if tick.state.rollback is not None:
        _carry_on(tick, tick.state.rollback)
    if tick.state.rollback is None or tick.state.rollback.stage not in _UNDER_WAY:
        _answer_divergence(tick)
        _answer_memory(tick)


def begin_by_hand(tick: Tick, command: Command) -> None:
    """Begin what a user asked for; a run that has ended goes on with it."""
    state = tick.state
    if state.phase in (RunPhase.FINISHED, RunPhase.STOPPING) or tick.snapshot.checkpoints is None:
        return
    trouble = state.diverged or state.watched
    if command.start is None:
        before_step = None if trouble is None else before_step_of(trouble.onset_step, state.rollback)
        start = choose_start(tick.snapshot.checkpoints, state.forks, state.timeline, before_step)
    else:
        start = None if command.start == RUN_START else PolicyVersion.parse(command.start)
    changes = dict(command.changes) or _changes_by_rule(tick)
    if state.phase not in _ALIVE:
        tick.move_run(RunPhase.STARTING, "rolled back by hand")
    _begin(tick, start, Cause.USER, changes, "asked for by hand")


def _note_health(tick: Tick) -> None:
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
    elif verdict.health is Health.WATCH and state.watched is None:
        watched = DivergenceWatched(state.timeline, verdict.step, onset_step, verdict.evidence)
        tick.emit(watched, f"watched since step {onset_step}")
    elif verdict.health is Health.HEALTHY and state.watched is not None:
        tick.emit(DivergenceCleared(state.timeline, verdict.step), "healthy again")


def _verdict(tick: Tick) -> tuple[Verdict | None, str]:
    """What is known of the present timeline: the trainer's own word, unless only the controller's has tripped."""
    beat, watched, timeline = tick.snapshot.trainer, tick.snapshot.watched, tick.state.timeline
    theirs = beat.verdict if beat is not None and beat.timeline == timeline else None
    ours = watched.verdict if watched is not None and watched.timeline == timeline else None
    tripped = ours is not None and ours.health is Health.TRIPPED
    if theirs is None or (tripped and theirs.health is not Health.TRIPPED):
        return ours, "controller"
    return theirs, "trainer"


def _note_pitfalls(tick: Tick) -> None:
    watched = tick.snapshot.watched
    for found in watched.pitfalls if watched is not None and watched.timeline == tick.state.timeline else ():
        if found.step > tick.state.noticed.get(found.kind, -1):
            tick.emit(Noticed(found.kind, found.step, found.text), f"noticed: {found.kind}")


def _carry_on(tick: Tick, rollback: Rollback) -> None:
    timeline, beat = rollback.fork.timeline, tick.snapshot.trainer
    beats = beat is not None and beat.timeline == timeline and beat.activity not in NOT_YET
    match rollback.stage:
        case RollbackStage.BEGUN:
            if tick.snapshot.timeline >= timeline:
                tick.emit(TimelineForked(timeline), f"timeline {timeline} is in the store")
        case RollbackStage.FORKED:
            _fence(tick, rollback)
        case RollbackStage.FENCED:
            if beat is not None and beats:
                tick.emit(
                    TimelineResumed(timeline, beat.step), f"timeline {timeline} trains from step {beat.step}"
                )
        case RollbackStage.RESUMED:
            policy = next((p for p in _served(tick) if p.timeline == timeline), None)
            if policy is not None:
                tick.emit(FleetMoved(timeline, str(policy)), f"the fleet serves {policy}")
        case RollbackStage.PROBATION:
            if beat is not None and beats and beat.step > rollback.probation_until_step:
                tick.emit(ProbationPassed(timeline, beat.step), f"timeline {timeline} has passed its probation")


def _fence(tick: Tick, rollback: Rollback) -> None:
    trainers = tick.state.live(Role.TRAINER)
    working = [node for node in trainers if _may_work(node)]
    if working and tick.snapshot.now_s - rollback.since_s > FENCE_WAIT_S:
        for node in working:
            tick.move(node, NodePhase.TERMINATING, "its trainer does not stop for the new timeline")
        return
    if working:
        return
    tick.emit(TrainerFenced(rollback.fork.timeline), "the old trainer has ended")
    for node in trainers:
        if node.attempt_ended_at_s is not None:
            tick.restart(node, f"goes on with timeline {rollback.fork.timeline}")


def _may_work(node: Node) -> bool:
    """Whether the node may have a trainer at work. One that has not begun yet stops as soon as it does."""
    return node.phase in (NodePhase.SERVING, NodePhase.DRAINING) and node.attempt_ended_at_s is None


def _served(tick: Tick) -> list[PolicyVersion]:
    members = (tick.snapshot.members or {}).values()
    return [labelled_version(member.policy) for member in members if member.serving and member.policy]


def _answer_divergence(tick: Tick) -> None:
    state, policy = tick.state, tick.spec.policies.kl
    trip, checkpoints = state.diverged, tick.snapshot.checkpoints
    if trip is None or policy.action == "alert" or checkpoints is None or _is_storing(tick):
        return
    before_step = before_step_of(trip.onset_step, state.rollback)
    start = choose_start(checkpoints, state.forks, state.timeline, before_step)
    whereto = "the start" if start is None else f"checkpoint {start}"
    if policy.action == "pause":
        why = f"diverged since step {trip.onset_step}; `grpo-orch rollback` goes back to {whereto}"
        tick.move_run(RunPhase.PAUSED, why)
        return
    why = spent(state.rollbacks, trip.step, policy.budget)
    if why:
        tick.emit(HealthyChosen(None if start is None else str(start)), f"the last healthy one is {whereto}")
        tick.move_run(RunPhase.GAVE_UP, f"diverged at step {trip.step}, and was {why}; last healthy: {whereto}")
        return
    reason = f"diverged since step {trip.onset_step}: {trip.evidence[0] if trip.evidence else 'no evidence kept'}"
    _begin(tick, start, Cause.DIVERGED, _changes_by_rule(tick), reason)


def _is_storing(tick: Tick) -> bool:
    """Whether the trainer that diverged may still bring checkpoints into the store."""
    beat, now_s = tick.snapshot.trainer, tick.snapshot.now_s
    if beat is None or beat.timeline != tick.state.timeline or now_s - beat.beat_at_s > HEARTBEAT_FRESH_S:
        return False
    node = tick.node(beat.node)
    if node is None or node.attempt != beat.attempt or not _may_work(node):
        return False
    tripped = beat.verdict is not None and beat.verdict.health is Health.TRIPPED
    return now_s - tick.state.diverged_at_s < (DRAIN_WAIT_S if tripped else GUARD_WAIT_S)


def _answer_memory(tick: Tick) -> None:
    checkpoints, state = tick.snapshot.checkpoints, tick.state
    if checkpoints is None or not _out_of_memory(tick) or tick.state.phase not in _ALIVE:
        return
    if state.rollback is not None and state.rollback.stage in _UNDER_WAY:
        return
    smaller = halved(_effective(tick))
    if smaller is None:
        tick.move_run(RunPhase.FAILED, "the trainer is out of memory, and nothing is left to halve")
        return
    start = choose_start(checkpoints, state.forks, state.timeline, None)
    _begin(tick, start, Cause.OUT_OF_MEMORY, smaller, "the trainer is out of memory")


def _out_of_memory(tick: Tick) -> bool:
    machines = tick.snapshot.machines or {}
    ended = [node for node in tick.state.live(Role.TRAINER) if node.attempt_ended_at_s is not None]
    return any(
        (machine := machines.get(node.id)) is not None
        and (machine.attempt, machine.exit_code) == (node.attempt, exit_codes.OUT_OF_MEMORY)
        for node in ended
    )


def _begin(
    tick: Tick, start: PolicyVersion | None, cause: Cause, changes: Mapping[str, int | float], reason: str
) -> None:
    state, beat = tick.state, tick.snapshot.trainer
    known = [state.timeline, tick.snapshot.timeline, *(one.fork.timeline for one in state.rollbacks)]
    before = state.forks[-1] if state.forks else Fork(0, None)
    fork = Fork(
        timeline=max(known) + 1,
        start=None if start is None else str(start),
        changes={**before.changes, **changes},
        skipped=(*before.skipped, *_skipped(tick, before)),
        reason=reason,
    )
    from_step = beat.step if beat is not None and beat.timeline == state.timeline else 0
    if state.diverged is not None:
        from_step = state.diverged.step
    tick.emit(RollbackBegun(fork, cause, from_step, reason), f"back to {fork.start or 'the start'}: {reason}")


def _skipped(tick: Tick, before: Fork) -> tuple[Skipped, ...]:
    """The steps of the present timeline whose prompts are to be left out."""
    trip = tick.state.diverged
    if trip is None or not tick.spec.policies.kl.on_rollback.skip_prompts:
        return ()
    first_of_timeline = 1 if before.start_at is None else before.start_at.step + 1
    return (Skipped(trip.timeline, max(trip.onset_step, first_of_timeline), trip.step),)


def _changes_by_rule(tick: Tick) -> dict[str, int | float]:
    return {**changes_after(_effective(tick), tick.spec.policies.kl.on_rollback)}


def _effective(tick: Tick) -> dict[str, object]:
    """The present timeline's `grpo`."""
    forks = tick.state.forks
    return forked_spec(tick.spec, forks[-1] if forks else None).grpo
