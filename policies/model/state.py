"""The run's state: a fold of the journal, and of nothing else.

`apply` is the only way state changes, here in the controller as on `resume`, so what a daemon knew when it died is
what the next one knows when it has read the journal.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import assert_never

from policies.model import exit_codes
from policies.model.buying import Kind, after_move
from policies.model.events import (
    BuyingResumed,
    BuyingStopped,
    CommandTaken,
    DataSetAside,
    Diverged,
    DivergenceCleared,
    DivergenceWatched,
    Event,
    Exported,
    FleetMoved,
    GatewayRestarted,
    HealthyChosen,
    JobExited,
    JobRestarted,
    MachineBought,
    NodeMoved,
    NodeRequested,
    Noticed,
    ProbationPassed,
    RollbackBegun,
    RunCreated,
    RunMoved,
    StoreCaughtUp,
    StoreSlowed,
    TimelineForked,
    TimelineResumed,
    TookOver,
    TrainerFenced,
)
from policies.model.phases import NODE_EDGES, ROLLBACK_EDGES, RUN_EDGES, check_move
from policies.model.timelines import Fork, probation_until
from policies.model.vocabulary import Cause, Market, NodePhase, Refusal, Role, RollbackStage, RunPhase, kind_of


@dataclass(frozen=True, slots=True)
class Node:
    """One machine in one slot. `attempt` counts the runs of its work on that machine, from 1."""

    id: str
    role: Role
    slot: str
    incarnation: int
    market: Market
    phase: NodePhase
    since_s: float  # when it came into this phase
    requested_at_s: float
    reason: str = ""
    attempt: int = 1
    price_usd_per_h: float = 0.0  # known once its machine was seen
    attempt_ended_at_s: float | None = None  # when this attempt's work ended, until it is restarted
    kind: str = ""  # what was asked for, `vocabulary.kind_of`
    served: bool = False  # ever


@dataclass(frozen=True, slots=True)
class Slot:
    """What outlives the incarnations of a place: how many there were, and how launching it has gone lately."""

    incarnations: int = 0
    job_restarts: int = 0
    refusals_in_a_row: int = 0
    refused_at_s: float = 0.0
    last_refusal: Refusal | None = None


@dataclass(frozen=True, slots=True)
class Rollback:
    """One rollback: under way, or passed. `from_step` is how far the timeline before had come."""

    fork: Fork
    cause: Cause
    from_step: int
    stage: RollbackStage
    since_s: float  # when it came into this stage
    passed: bool = False

    @property
    def probation_until_step(self) -> int:
        return probation_until(self.from_step, self.fork.start_at)


@dataclass(frozen=True, slots=True)
class RunState:
    """Everything the controller knows that it must not forget."""

    name: str = ""
    phase: RunPhase = RunPhase.STARTING
    reason: str = ""
    epoch: int = 0
    nodes: Mapping[str, Node] = field(default_factory=lambda: MappingProxyType({}))
    slots: Mapping[str, Slot] = field(default_factory=lambda: MappingProxyType({}))
    kinds: Mapping[str, Kind] = field(default_factory=lambda: MappingProxyType({}))
    trainerless_since_s: float | None = None  # there has been no machine for the trainer since
    commands_taken: frozenset[str] = frozenset()
    gateway_boot_id: str | None = None
    trainer_failures: int = 0  # exits in a row without one step of progress between them
    trainer_failed_step: int = -1
    watched: DivergenceWatched | None = None  # what is off on the present timeline
    diverged: Diverged | None = None  # what has tripped on the present timeline
    diverged_at_s: float = 0.0
    rollbacks: tuple[Rollback, ...] = ()  # in order; the last one may be under way
    healthy: str | None = None  # the last healthy checkpoint of a run that ended diverged, PolicyVersion as text
    exported: str | None = None  # that checkpoint, once its weights are exported
    noticed: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))  # step by kind of pitfall
    store_slow: bool = False  # a checkpoint was put off, and none has found room since
    set_aside: tuple[DataSetAside, ...] = ()  # what of the store could not be read and was told, each object once

    @property
    def rollback(self) -> Rollback | None:
        """The one under way, probation included."""
        return self.rollbacks[-1] if self.rollbacks and not self.rollbacks[-1].passed else None

    @property
    def forks(self) -> tuple[Fork, ...]:
        """Those that are in the store for certain, in order."""
        return tuple(one.fork for one in self.rollbacks if one.stage is not RollbackStage.BEGUN)

    @property
    def timeline(self) -> int:
        """What the run is on."""
        return self.forks[-1].timeline if self.forks else 0

    @property
    def trainer_machines(self) -> list[Node]:
        """The trainer's nodes that have a machine, and do not go down."""
        return [node for node in self.live(Role.TRAINER) if node.phase is not NodePhase.REQUESTED]

    def live(self, role: Role) -> list[Node]:
        """Nodes of a role that are wanted or working, in slot order."""
        wanted = (NodePhase.REQUESTED, NodePhase.BOOTING, NodePhase.SERVING, NodePhase.DRAINING)
        return sorted((n for n in self.nodes.values() if n.role is role and n.phase in wanted), key=lambda n: n.id)


def fold(history: Iterable[tuple[int, float, Iterable[Event]]]) -> RunState:
    """Fold `(entry number, time_s, events)` in order. Raises IllegalMove for a history that cannot have been."""
    state = RunState()
    for number, time_s, events in history:
        for event in events:
            state = apply(state, event, time_s, number)
    return state


def apply(state: RunState, event: Event, time_s: float, number: int) -> RunState:
    """Return the state after one event. Raises IllegalMove when the phase tables do not know the move."""
    match event:
        case RunCreated():
            return replace(state, name=event.name)
        case TookOver():
            return replace(_no_later(state, time_s), epoch=number)
        case RunMoved():
            check_move(RUN_EDGES, state.phase, event.phase)
            state = replace(state, phase=event.phase, reason=event.reason)
            if event.phase is RunPhase.STARTING:  # somebody has mended something, or wants another try
                return replace(state, trainer_failures=0, kinds=MappingProxyType({}))
            return state
        case NodeRequested():
            return _requested(state, event, time_s)
        case NodeMoved():
            return _moved(state, event, time_s)
        case BuyingStopped():
            kind = state.kinds.get(event.kind, Kind())
            stopped = replace(kind, stopped=event.reason, stopped_at_s=time_s, probes=0)
            return _with_kind(state, event.kind, stopped)
        case BuyingResumed():
            kind = state.kinds.get(event.kind, Kind())
            return _with_kind(state, event.kind, replace(kind, stopped="", probes=0, broke_in_a_row=0))
        case MachineBought():
            bought = replace(state.nodes[event.node], market=event.market, price_usd_per_h=event.price_usd_per_h)
            return _with_node(state, bought)
        case JobExited():
            return _exited(state, event, time_s)
        case JobRestarted():
            node = replace(state.nodes[event.node], attempt=event.attempt, attempt_ended_at_s=None)
            slot = state.slots.get(node.slot, Slot())
            state = _with_slot(state, node.slot, replace(slot, job_restarts=slot.job_restarts + 1))
            return _with_node(state, node)
        case GatewayRestarted():
            return replace(state, gateway_boot_id=event.boot_id)
        case CommandTaken():
            return replace(state, commands_taken=state.commands_taken | {event.command_id})
        case DivergenceWatched():
            return replace(state, watched=event)
        case DivergenceCleared():
            return replace(state, watched=None)
        case Diverged():
            return replace(state, watched=None, diverged=event, diverged_at_s=time_s)
        case RollbackBegun():
            check_move(ROLLBACK_EDGES, _stage(state), RollbackStage.BEGUN)
            begun = Rollback(event.fork, event.cause, event.from_step, RollbackStage.BEGUN, time_s)
            kept = tuple(one for one in state.rollbacks if one.stage is not RollbackStage.BEGUN)
            return replace(state, rollbacks=(*kept, begun), healthy=None, exported=None)
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
        case Noticed():
            return replace(state, noticed=MappingProxyType({**state.noticed, event.kind: event.step}))
        case StoreSlowed():
            return replace(state, store_slow=True)
        case StoreCaughtUp():
            return replace(state, store_slow=False)
        case DataSetAside():
            return replace(state, set_aside=(*state.set_aside, event))
        case _:
            assert_never(event)


def _requested(state: RunState, event: NodeRequested, time_s: float) -> RunState:
    node = Node(
        id=event.node,
        role=event.role,
        slot=event.slot,
        incarnation=event.incarnation,
        market=event.market,
        phase=NodePhase.REQUESTED,
        since_s=time_s,
        requested_at_s=time_s,
        reason=event.reason,
        kind=kind_of(event.role, event.market),
    )
    if kind := state.kinds.get(node.kind):
        state = _with_kind(state, node.kind, replace(kind, probes=kind.probes + bool(kind.stopped)))
    slot = state.slots.get(event.slot, Slot())
    return _with_node(_with_slot(state, event.slot, replace(slot, incarnations=event.incarnation)), node)


def _moved(state: RunState, event: NodeMoved, time_s: float) -> RunState:
    node = state.nodes[event.node]
    check_move(NODE_EDGES, node.phase, event.phase)
    slot = state.slots.get(node.slot, Slot())
    unserved = node.phase in (NodePhase.REQUESTED, NodePhase.BOOTING) and not node.served
    lost = event.phase is NodePhase.GONE and unserved
    if event.phase is NodePhase.REFUSED or event.refusal is not None or lost:
        refusals = slot.refusals_in_a_row + 1
        slot = replace(slot, refusals_in_a_row=refusals, refused_at_s=time_s, last_refusal=event.refusal)
    elif event.phase is NodePhase.SERVING:
        slot = replace(slot, refusals_in_a_row=0, last_refusal=None)
    state = _with_slot(state, node.slot, slot)
    came, served = node.phase is not NodePhase.REQUESTED, node.served or node.phase is NodePhase.TERMINATING
    kind = state.kinds.get(node.kind, Kind())
    kind = after_move(kind, event, time_s, came=came, served=served, asked_at_s=node.requested_at_s)
    state = _with_kind(state, node.kind, kind)
    if event.phase in (NodePhase.GONE, NodePhase.REFUSED):
        state = replace(state, nodes=MappingProxyType({k: n for k, n in state.nodes.items() if k != node.id}))
    else:
        served = node.served or event.phase is NodePhase.SERVING
        node = replace(node, phase=event.phase, since_s=time_s, reason=event.reason, served=served)
        state = _with_node(state, node)
    return _with_trainer_or_without(state, time_s)


def _with_trainer_or_without(state: RunState, time_s: float) -> RunState:
    if state.trainer_machines:
        return replace(state, trainerless_since_s=None)
    return replace(state, trainerless_since_s=time_s) if state.trainerless_since_s is None else state


def _no_later(state: RunState, time_s: float) -> RunState:
    """A controller takes over: what was journalled before has happened before, whatever its clock said."""
    nodes = {
        name: replace(
            node,
            since_s=min(node.since_s, time_s),
            requested_at_s=min(node.requested_at_s, time_s),
            attempt_ended_at_s=None if node.attempt_ended_at_s is None else min(node.attempt_ended_at_s, time_s),
        )
        for name, node in state.nodes.items()
    }
    slots = {name: replace(one, refused_at_s=min(one.refused_at_s, time_s)) for name, one in state.slots.items()}
    kinds = {name: replace(one, failed_at_s=min(one.failed_at_s, time_s)) for name, one in state.kinds.items()}
    without_s = state.trainerless_since_s
    return replace(
        state,
        nodes=MappingProxyType(nodes),
        slots=MappingProxyType(slots),
        kinds=MappingProxyType(kinds),
        trainerless_since_s=None if without_s is None else min(without_s, time_s),
        diverged_at_s=min(state.diverged_at_s, time_s),
        rollbacks=tuple(replace(one, since_s=min(one.since_s, time_s)) for one in state.rollbacks),
    )


def _exited(state: RunState, event: JobExited, time_s: float) -> RunState:
    node = state.nodes[event.node]
    state = _with_node(state, replace(node, attempt_ended_at_s=time_s))
    replaced = event.exit_code == exit_codes.FENCED or node.phase is NodePhase.DRAINING
    if node.role is not Role.TRAINER or event.exit_code in (exit_codes.OK, exit_codes.STOPPED) or replaced:
        return state
    progressed = event.step > state.trainer_failed_step
    failures = 1 if progressed else state.trainer_failures + 1
    return replace(
        state, trainer_failures=failures, trainer_failed_step=max(event.step, state.trainer_failed_step)
    )


def _stage(state: RunState) -> RollbackStage | None:
    return None if state.rollback is None else state.rollback.stage


def _at_stage(state: RunState, stage: RollbackStage, time_s: float) -> RunState:
    check_move(ROLLBACK_EDGES, _stage(state), stage)
    moved = replace(state.rollbacks[-1], stage=stage, since_s=time_s)
    return replace(state, rollbacks=(*state.rollbacks[:-1], moved))


def _with_node(state: RunState, node: Node) -> RunState:
    return replace(state, nodes=MappingProxyType({**state.nodes, node.id: node}))


def _with_kind(state: RunState, name: str, kind: Kind) -> RunState:
    return replace(state, kinds=MappingProxyType({**state.kinds, name: kind}))


def _with_slot(state: RunState, name: str, slot: Slot) -> RunState:
    return replace(state, slots=MappingProxyType({**state.slots, name: slot}))
