"""How each journalled event changes the run's state.

`apply` is the only way state changes, in a running controller as on `resume`: so the next daemon, once it has read
the journal, knows what the last one knew.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from types import MappingProxyType
from typing import assert_never

from policies.model.events import (
    BudgetNeared,
    BudgetReached,
    BudgetRefused,
    BudgetSet,
    CapacityMissing,
    CommandTaken,
    DataSetAside,
    DeadlineMissed,
    Event,
    GatewayRestarted,
    MachineEvent,
    NodesGenerate,
    Noticed,
    RunCreated,
    RunMoved,
    SpecProved,
    StoreCaughtUp,
    StoreSlowed,
    TimelineEvent,
    TookOver,
    TrainerGenerates,
)
from policies.model.folding.clocks import behind_s, with_times_up_to
from policies.model.folding.drafts import draft, final, in_place_of
from policies.model.folding.machine_fold import apply_to_machines
from policies.model.folding.timeline_fold import apply_to_timelines
from policies.model.phases import RUN_EDGES, check_move
from policies.model.state import RunState
from policies.model.vocabulary import RunPhase


def fold(history: Iterable[tuple[int, float, Iterable[Event]]]) -> RunState:
    """Fold `(entry number, time_s, events)` in order. Raises IllegalMove for a history that cannot have been."""
    state = draft(RunState())
    for number, time_s, events in history:
        for event in events:
            state = apply(state, event, time_s, number)
    return final(state)


def apply(state: RunState, event: Event, time_s: float, number: int) -> RunState:
    """Return the state after one event of entry `number`; a draft (`drafts`) is used up.

    Raises IllegalMove for a move that no table has.
    """
    return replace(_apply(state, event, time_s, number), told_s=time_s)


def _apply(state: RunState, event: Event, time_s: float, number: int) -> RunState:
    if isinstance(event, MachineEvent):
        return apply_to_machines(state, event, time_s)
    if isinstance(event, TimelineEvent):
        return apply_to_timelines(state, event, time_s)
    match event:
        case RunCreated():
            return replace(state, name=event.name)
        case TookOver():
            back_s = behind_s(state.told_s, time_s, event.since_told_s)
            return replace(with_times_up_to(state, time_s, back_s), epoch=number)
        case RunMoved():
            return _run_moved(state, event, time_s)
        case GatewayRestarted():
            return replace(state, gateway_boot_id=event.boot_id)
        case CommandTaken():
            return replace(state, commands_taken=state.commands_taken | {event.command_id})
        case Noticed():
            return replace(state, noticed=MappingProxyType({**state.noticed, event.kind: event.step}))
        case StoreSlowed():
            return replace(state, store_slow=True)
        case StoreCaughtUp():
            return replace(state, store_slow=False)
        case TrainerGenerates():
            return replace(state, own_generation_since_s=time_s)
        case NodesGenerate():
            return replace(state, own_generation_since_s=None)
        case SpecProved():
            return replace(state, proved=True, proved_at_s=time_s)
        case DataSetAside():
            return replace(state, set_aside=(*state.set_aside, event))
        case BudgetReached():
            return replace(state, budget_reached=True)
        case BudgetRefused():
            return replace(state, budget_refused=state.budget_refused | {event.role})
        case BudgetNeared():
            return replace(state, budget_neared=True)
        case BudgetSet():
            return replace(state, budget_usd=event.usd, budget_refused=frozenset(), budget_neared=False)
        case CapacityMissing():
            return replace(state, capacity_told=state.capacity_told | {event.role})
        case DeadlineMissed():
            return replace(state, deadline_missed=True)
        case _:
            assert_never(event)


def _run_moved(state: RunState, event: RunMoved, time_s: float) -> RunState:
    check_move(RUN_EDGES, state.phase, event.phase)
    was_parked = state.phase is RunPhase.PARKED
    parked_at_s = time_s if event.phase is RunPhase.PARKED else None
    state = replace(state, phase=event.phase, reason=event.reason, parked_at_s=parked_at_s)
    state = replace(state, own_generation_since_s=None)
    if event.phase is not RunPhase.STARTING:
        return state
    if was_parked:  # nobody has mended anything; and only now is a machine for the trainer missing
        since_s = None if state.trainerless_since_s is None else time_s
        return replace(state, trainerless_since_s=since_s)
    # Somebody has mended something, or wants another try.
    state = replace(state, budget_reached=False, unspent_usd=0.0)
    return replace(state, trainer_failures=0, kinds=in_place_of(state.kinds, {}))
