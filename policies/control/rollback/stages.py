"""Run a rollback as one transaction, in journalled stages.

A stage requests its effect at every tick until the effect is observed. So if a controller dies between any two
stages, the next controller continues.
"""

from __future__ import annotations

from grpo_orch.policies.control.rollback.begin import answer_divergence, answer_memory
from grpo_orch.policies.detect.divergence import Health, Verdict
from grpo_orch.policies.model.events import (
    Diverged,
    DivergenceCleared,
    DivergenceSuspected,
    Exported,
    FleetMoved,
    PitfallFound,
    ProbationPassed,
    TimelineForked,
    TimelineResumed,
    TrainerFenced,
)
from grpo_orch.policies.model.phases import LIVE_RUN, UNTRAINED_ROLLBACK
from grpo_orch.policies.model.reports import PITFALL
from grpo_orch.policies.model.spec import generates_itself
from grpo_orch.policies.model.state import Rollback
from grpo_orch.policies.model.vocabulary import NodePhase, PolicyVersion, Role, RollbackStage
from grpo_orch.policies.serving.wire import labelled_version
from grpo_orch.policies.tick.draft import Tick
from grpo_orch.policies.tick.snapshot import BEFORE_TRAINING

# An old trainer stops when it next reads the store, and a hung process kills itself (after 20 s). A machine where
# neither happens is terminated.
FENCE_WAIT_S = 120.0


def control_timeline(tick: Tick) -> None:
    """Journal the run's health, advance a rollback, and begin one if needed."""
    healthy = tick.state.healthy
    if healthy is not None and tick.state.exported != healthy and tick.snapshot.store.exported_to is not None:
        tick.emit(Exported(healthy, tick.snapshot.store.exported_to), f"{healthy} is exported")
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
