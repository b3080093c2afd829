"""How journalled events change what is known of divergences, rollbacks and timelines."""

from __future__ import annotations

from dataclasses import replace
from typing import assert_never

from policies.model.events import (
    Diverged,
    DivergenceCleared,
    DivergenceWatched,
    Exported,
    FleetMoved,
    HealthyChosen,
    ProbationPassed,
    RollbackBegun,
    TimelineEvent,
    TimelineForked,
    TimelineResumed,
    TrainerFenced,
)
from policies.model.phases import ROLLBACK_EDGES, check_move
from policies.model.state import Rollback, RunState
from policies.model.vocabulary import RollbackStage


def apply_to_timelines(state: RunState, event: TimelineEvent, time_s: float) -> RunState:
    """Return the state after one event of them. Raises IllegalMove for a move that no table has."""
    match event:
        case DivergenceWatched():
            return replace(state, watched=event)
        case DivergenceCleared():
            return replace(state, watched=None)
        case Diverged():
            return replace(state, watched=None, diverged=event, diverged_at_s=time_s)
        case RollbackBegun():
            return _begun(state, event, time_s)
        case TimelineForked():
            state = replace(state, watched=None, diverged=None, trainer_failures=0, trainer_failed_step=-1)
            return _at_stage(state, RollbackStage.FORKED, time_s)
        case TrainerFenced():
            return _at_stage(state, RollbackStage.FENCED, time_s)
        case TimelineResumed():
            return _at_stage(state, RollbackStage.RESUMED, time_s)
        case FleetMoved():
            return _at_stage(state, RollbackStage.PROBATION, time_s)
        case ProbationPassed():
            check_move(ROLLBACK_EDGES, _stage(state), None)
            return replace(state, rollbacks=(*state.rollbacks[:-1], replace(state.rollbacks[-1], passed=True)))
        case HealthyChosen():
            return replace(state, healthy=event.version, exported=None)
        case Exported():
            return replace(state, exported=event.version)
        case _:
            assert_never(event)


def _begun(state: RunState, event: RollbackBegun, time_s: float) -> RunState:
    check_move(ROLLBACK_EDGES, _stage(state), RollbackStage.BEGUN)
    begun = Rollback(event.fork, event.cause, event.from_step, RollbackStage.BEGUN, time_s)
    kept = [one for one in state.rollbacks if one.stage is not RollbackStage.BEGUN]
    return replace(state, rollbacks=(*kept, begun), healthy=None, exported=None)


def _stage(state: RunState) -> RollbackStage | None:
    return None if state.rollback is None else state.rollback.stage


def _at_stage(state: RunState, stage: RollbackStage, time_s: float) -> RunState:
    check_move(ROLLBACK_EDGES, _stage(state), stage)
    moved = replace(state.rollbacks[-1], stage=stage, since_s=time_s)
    return replace(state, rollbacks=(*state.rollbacks[:-1], moved))
