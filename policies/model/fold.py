"""How each journalled event changes the run's state.

`apply` is the only way state changes, in a running controller as on `resume`: so the next daemon, once it has read
the journal, knows what the last one knew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TypeVar, assert_never

from policies.model import exit_codes
from policies.model.buying import SPOT_STABLE_S, MachineKind, after_move
from policies.model.events import (
    BudgetNeared,
    BudgetReached,
    BudgetRefused,
    BudgetSet,
    BuyingResumed,
    BuyingStopped,
    CapacityMissing,
    CommandTaken,
    DataSetAside,
    DeadlineMissed,
    Diverged,
    DivergenceCleared,
    DivergenceWatched,
    Event,
    Exported,
    FleetMoved,
    FleetSized,
    GatewayRestarted,
    HealthyChosen,
    JobExited,
    JobRestarted,
    MachineBought,
    MachineEvent,
    NodeMoved,
    NodeRequested,
    NodesGenerate,
    Noticed,
    ProbationPassed,
    RebalanceRecommended,
    RollbackBegun,
    RunCreated,
    RunMoved,
    SpecProved,
    StoreCaughtUp,
    StoreSlowed,
    TimelineEvent,
    TimelineForked,
    TimelineResumed,
    TookOver,
    TrainerFenced,
    TrainerGenerates,
)
from policies.model.phases import NODE_EDGES, ROLLBACK_EDGES, RUN_EDGES, check_move
from policies.model.pools import Pool, PoolRecord, came, refused, stayed
from policies.model.reports import BUDGET, CAPACITY, GENERATION, with_report, without
from policies.model.state import FleetSize, Node, Rollback, RunState, Shortages, Slot, TrainerFailures
from policies.model.vocabulary import Market, NodePhase, Refusal, Role, RollbackStage, RunPhase, kind_of

K = TypeVar("K")
V = TypeVar("V")


# Folding many events changes mappings in place instead of copying them each time. A `RunState` is a value. So is a
# draft, except to its holder: `apply` changes its mappings, and the draft before is used up.


class _DraftMapping(dict[K, V]):
    """A draft's mapping."""


def draft(state: RunState) -> RunState:
    """Return a draft of the state, for one holder."""
    return replace(
        state,
        nodes=_DraftMapping(state.nodes),
        slots=_DraftMapping(state.slots),
        kinds=_DraftMapping(state.kinds),
        pools=_DraftMapping(state.pools),
    )


def final(state: RunState) -> RunState:
    """Return a draft as a value, which nothing changes any more."""
    return replace(
        state,
        nodes=MappingProxyType(state.nodes),
        slots=MappingProxyType(state.slots),
        kinds=MappingProxyType(state.kinds),
        pools=MappingProxyType(state.pools),
    )


def with_item(mapping: Mapping[K, V], key: K, value: V) -> Mapping[K, V]:
    """Return the mapping with that value: itself, where it is a draft's."""
    if isinstance(mapping, _DraftMapping):
        mapping[key] = value
        return mapping
    return MappingProxyType({**mapping, key: value})


def without_item(mapping: Mapping[K, V], key: K) -> Mapping[K, V]:
    """Return the mapping without that key: itself, where it is a draft's."""
    if isinstance(mapping, _DraftMapping):
        del mapping[key]
        return mapping
    return MappingProxyType({k: v for k, v in mapping.items() if k != key})


def matching_mapping(mapping: Mapping[K, V], changed: dict[K, V]) -> Mapping[K, V]:
    """Return what takes the mapping's place: in a draft its own, too."""
    return _DraftMapping(changed) if isinstance(mapping, _DraftMapping) else MappingProxyType(changed)


# A controller takes over on a host whose clock may be another's: no time of a state lies after its own.


MOST_UNSEEN_S = 86400.0  # the store says that more went by than hosts' clocks showed: then its own is wrong


def behind_s(told_s: float, time_s: float, since_told_s: float) -> float:
    """By how much the clock of a controller that takes over at `time_s` is behind the one before it, which told of
    its last event at `told_s`, seconds: as far as it shows. Time does not go back; and it went on for at least
    `since_told_s`, if the store's clock tells: what cost money then was paid for."""
    unseen_s = since_told_s - max(0.0, time_s - told_s)
    return max(0.0, told_s - time_s) + (unseen_s if 0.0 < unseen_s <= MOST_UNSEEN_S else 0.0)


def with_times_up_to(state: RunState, time_s: float, back_s: float) -> RunState:
    """Return the state with no time after `time_s`, at which a controller takes over on a clock that is `back_s`
    behind: what was journalled before happened before, whatever the clock said then. A machine stays as old as it
    is known to be: it is paid for."""
    nodes = {
        name: replace(
            node,
            since_s=min(node.since_s, time_s),
            requested_at_s=min(node.requested_at_s - back_s, time_s),
            attempt_ended_at_s=_not_after(node.attempt_ended_at_s, time_s),
        )
        for name, node in state.nodes.items()
    }
    slots = {name: replace(one, refused_at_s=min(one.refused_at_s, time_s)) for name, one in state.slots.items()}
    kinds = {
        name: replace(one, failed_at_s=min(one.failed_at_s, time_s), stopped_at_s=one.stopped_at_s - back_s)
        for name, one in state.kinds.items()
    }
    pools = {
        name: replace(one, refused_at_s=min(one.refused_at_s, time_s), taken_at_s=min(one.taken_at_s, time_s))
        for name, one in state.pools.items()
    }
    return replace(
        state,
        nodes=matching_mapping(state.nodes, nodes),
        slots=matching_mapping(state.slots, slots),
        kinds=matching_mapping(state.kinds, kinds),
        pools=matching_mapping(state.pools, pools),
        size=replace(state.size, at_s=min(state.size.at_s, time_s)),
        shortages=Shortages(
            _not_after(state.shortages.spot_since_s, time_s),
            _not_after(state.shortages.trainer_since_s, time_s),
            _not_after(state.shortages.rollout_since_s, time_s),
        ),
        reports=MappingProxyType(
            {name: replace(report, at_s=min(report.at_s, time_s)) for name, report in state.reports.items()}
        ),
        parked_at_s=_not_after(state.parked_at_s, time_s),
        proved_at_s=_not_after(state.proved_at_s, time_s),
        diverged_at_s=min(state.diverged_at_s, time_s),
        rollbacks=tuple(replace(one, since_s=min(one.since_s, time_s)) for one in state.rollbacks),
    )


def _not_after(since_s: float | None, time_s: float) -> float | None:
    return None if since_s is None else min(since_s, time_s)


# How journalled events change what is known of the pools.


NOTICED = "the cloud will take it back"  # why a node drains: its machine is as good as lost


def note_bought(state: RunState, event: MachineBought, asked: Pool | None, time_s: float) -> RunState:
    """The machine came: where it landed, and if that is elsewhere, not where it was asked for."""
    landed = landed_in(asked, event.pool)
    if landed is None or event.pool is None:
        return state
    if asked is not None and asked != landed:
        state = _with(state, asked, lambda record: refused(record, time_s, time_s))
    if landed != landed.anywhere and str(landed.anywhere) in state.pools:  # its quota has room again
        state = _with(state, landed.anywhere, lambda record: came(record, time_s))
    return _with(state, landed, lambda record: came(record, time_s))


def landed_in(asked: Pool | None, landed: Pool | None) -> Pool | None:
    """The pool that a machine is in: the one asked for where that leaves the zone to the cloud."""
    if asked is None or landed is None:
        return landed or asked
    return asked if asked == replace(landed, zone=asked.zone and landed.zone) else landed


def note_moved(state: RunState, node: Node, move: NodeMoved, time_s: float) -> RunState:
    """`node` as it was before the move. Credentials that are refused say nothing of a pool."""
    if node.pool is None:
        return state
    if move.phase is NodePhase.REFUSED:
        if move.refusal is Refusal.CREDENTIALS:
            return state
        pool = node.pool.anywhere if move.refusal is Refusal.QUOTA else node.pool  # a quota is the region's
        return _with(state, pool, lambda record: refused(record, node.requested_at_s, time_s))
    noticed = node.phase is NodePhase.DRAINING and node.reason == NOTICED
    if node.came_at_s is None or node.phase is NodePhase.TERMINATING or noticed:
        return state  # told already
    since_s, taken = node.came_at_s, move.phase is NodePhase.GONE or move.reason == NOTICED
    if not taken and move.phase is not NodePhase.TERMINATING:
        return state
    recommended = node.rebalance_recommended
    return _with(
        state,
        node.pool,
        lambda record: stayed(record, since_s, time_s, taken=taken, rebalance_recommended=recommended),
    )


def _with(state: RunState, pool: Pool, change: Callable[[PoolRecord], PoolRecord]) -> RunState:
    changed = change(state.pools.get(str(pool), PoolRecord(pool)))
    return replace(state, pools=with_item(state.pools, str(pool), changed))


# How each journalled event changes the run's state.
#
# `apply` is the only way state changes, in a running controller as on `resume`: so the next daemon, once it has
# read the journal, knows what the last one knew.


def fold(history: Iterable[tuple[int, float, Iterable[Event]]], onto: RunState | None = None) -> RunState:
    """Fold `(entry number, time_s, events)` in order. Raises IllegalMove for a history that cannot have been."""
    state = draft(onto or RunState())
    for number, time_s, events in history:
        for event in events:
            state = apply(state, event, time_s, number)
    return final(state)


def apply(state: RunState, event: Event, time_s: float, number: int) -> RunState:
    """Return the state after one event of entry `number`; a draft is used up.

    Raises IllegalMove for a move that no table has.
    """
    reports = with_report(state.reports, event, time_s)
    if reports is not state.reports:
        state = replace(state, reports=reports)
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
        case SpecProved():
            return replace(state, proved_at_s=time_s)
        case BudgetReached():
            return replace(state, money=replace(state.money, is_reached=True))
        case BudgetSet():
            money = replace(state.money, cap_usd=event.usd)
            return replace(state, money=money, reports=without(state.reports, BUDGET))
        case (
            Noticed()
            | StoreSlowed()
            | StoreCaughtUp()
            | TrainerGenerates()
            | NodesGenerate()
            | DataSetAside()
            | BudgetRefused()
            | BudgetNeared()
            | CapacityMissing()
            | DeadlineMissed()
        ):
            return state  # a report, and no more
        case _:
            assert_never(event)


def _run_moved(state: RunState, event: RunMoved, time_s: float) -> RunState:
    check_move(RUN_EDGES, state.phase, event.phase)
    was_parked = state.phase is RunPhase.PARKED
    parked_at_s = time_s if event.phase is RunPhase.PARKED else None
    state = replace(state, phase=event.phase, reason=event.reason, parked_at_s=parked_at_s)
    state = replace(state, reports=without(state.reports, GENERATION))
    if event.phase is not RunPhase.STARTING:
        return state
    if was_parked:  # nobody has mended anything; and only now is a machine for the trainer missing
        since_s = None if state.shortages.trainer_since_s is None else time_s
        return replace(state, shortages=replace(state.shortages, trainer_since_s=since_s))
    # Somebody has mended something, or wants another try.
    money, failures = replace(state.money, is_reached=False, unspent_usd=0.0), replace(state.failures, count=0)
    return replace(state, money=money, failures=failures, kinds=matching_mapping(state.kinds, {}))


# How journalled events change what is known of divergences, rollbacks and timelines.


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
            failures = replace(state.failures, count=0, step=-1)
            state = replace(state, watched=None, diverged=None, failures=failures)
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


# How journalled events change what is known of machines, from the order to the end, and of their work.


def apply_to_machines(state: RunState, event: MachineEvent, time_s: float) -> RunState:
    """Return the state after one event of them. Raises IllegalMove for a move that no table has."""
    match event:
        case NodeRequested():
            return _requested(state, event, time_s)
        case NodeMoved():
            return _moved(state, event, time_s)
        case BuyingStopped():
            kind = state.kinds.get(event.kind, MachineKind())
            stopped = replace(kind, stopped=event.reason, stopped_at_s=time_s, probes=0)
            return _with_kind(state, event.kind, stopped)
        case BuyingResumed():
            kind = state.kinds.get(event.kind, MachineKind())
            return _with_kind(state, event.kind, replace(kind, stopped="", probes=0, broke_in_a_row=0))
        case FleetSized():
            return replace(state, size=FleetSize(event.nodes, time_s))
        case MachineBought():
            node, disk = state.nodes[event.node], event.disk_usd_per_h
            bought = replace(
                node,
                market=event.market,
                price_usd_per_h=event.price_usd_per_h,
                on_demand_usd_per_h=event.on_demand_usd_per_h,
                pool=landed_in(node.pool, event.pool),
                came_at_s=time_s if node.came_at_s is None else node.came_at_s,
                disk_usd_per_h=node.disk_usd_per_h if disk is None else disk,
            )
            if node.role is Role.TRAINER and event.price_usd_per_h > 0:
                state = replace(state, money=replace(state.money, trainer_usd_per_h=bought.usd_per_h))
            return _with_node(note_bought(state, event, node.pool, time_s), bought)
        case RebalanceRecommended():
            return _with_node(state, replace(state.nodes[event.node], rebalance_recommended=True))
        case JobExited():
            return _exited(state, event, time_s)
        case JobRestarted():
            node = replace(state.nodes[event.node], attempt=event.attempt, attempt_ended_at_s=None)
            slot = state.slots.get(node.slot, Slot())
            state = _with_slot(state, node.slot, replace(slot, job_restarts=slot.job_restarts + 1))
            return _with_node(state, node)
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
        most_usd_per_h=event.most_usd_per_h,
        pool=event.pool,
        stand_in=event.stand_in,
        disk_usd_per_h=event.disk_usd_per_h,
    )
    if kind := state.kinds.get(node.kind):
        state = _with_kind(state, node.kind, replace(kind, probes=kind.probes + bool(kind.stopped)))
    slot = state.slots.get(event.slot, Slot())
    return _with_node(_with_slot(state, event.slot, replace(slot, incarnations=event.incarnation)), node)


def _moved(state: RunState, event: NodeMoved, time_s: float) -> RunState:
    node = state.nodes[event.node]
    check_move(NODE_EDGES, node.phase, event.phase)
    state = note_moved(state, node, event, time_s)
    slot = state.slots.get(node.slot, Slot())
    unserved = node.phase in (NodePhase.REQUESTED, NodePhase.BOOTING) and not node.served
    lost = unserved and event.phase in (NodePhase.GONE, NodePhase.DRAINING)
    state = _noting_spot(state, node, event, time_s)
    if node.stand_in:
        pass  # its slot's own tries go on beside it
    elif event.phase is NodePhase.REFUSED or event.refusal is not None or lost:
        refusals = slot.refusals_in_a_row + 1
        slot = replace(slot, refusals_in_a_row=refusals, refused_at_s=time_s, last_refusal=event.refusal)
    elif event.phase is NodePhase.SERVING:
        slot = replace(slot, refusals_in_a_row=0, last_refusal=None)
    state = _with_slot(state, node.slot, slot)
    kind = state.kinds.get(node.kind, MachineKind())
    came, at_s = node.phase is not NodePhase.REQUESTED, node.requested_at_s
    kind = after_move(kind, event, time_s, came=came, served=node.served, lost=lost, asked_at_s=at_s)
    state = _with_kind(state, node.kind, kind)
    money = state.money
    if event.phase is NodePhase.GONE and event.refusal is not None:  # it was never bought
        unspent_usd = node.cost_usd(time_s) if money.is_reached else 0.0
        state = replace(state, money=replace(money, unspent_usd=money.unspent_usd + unspent_usd))
    elif event.phase is NodePhase.GONE:
        spent_usd = money.spent_usd + node.cost_usd(time_s)
        on_demand_usd = money.spent_on_demand_usd + node.on_demand_cost_usd(time_s)
        state = replace(state, money=replace(money, spent_usd=spent_usd, spent_on_demand_usd=on_demand_usd))
    if event.phase in (NodePhase.GONE, NodePhase.REFUSED):
        state = replace(state, nodes=without_item(state.nodes, node.id))
    else:
        served = node.served or event.phase is NodePhase.SERVING
        node = replace(node, phase=event.phase, since_s=time_s, reason=event.reason, served=served)
        state = _with_node(state, node)
    return _noting_machines(state, node.role, event.phase, time_s)


def _noting_spot(state: RunState, node: Node, move: NodeMoved, time_s: float) -> RunState:
    """Note since when spot does not give what is asked of it: from a refusal or loss on, unless one has held."""
    taken = move.phase in (NodePhase.REFUSED, NodePhase.GONE) and node.phase is not NodePhase.TERMINATING
    if node.role is not Role.ROLLOUT or node.stand_in or node.market is not Market.SPOT or not taken:
        return state
    mine = [one for one in state.nodes.values() if one.kind == node.kind and one.phase is NodePhase.SERVING]
    held = any(time_s - one.since_s >= SPOT_STABLE_S for one in mine)
    again = state.kinds.get(node.kind, MachineKind()).refused_in_a_row > 0
    if state.shortages.spot_since_s is None or (held and not again):
        return replace(state, shortages=replace(state.shortages, spot_since_s=time_s))
    return state


def _noting_machines(state: RunState, role: Role, phase: NodePhase, time_s: float) -> RunState:
    """Note since when the trainer has had no machine, or no rollout node has served, after one of `role` moved to
    `phase`. Rollout machines that come and do not serve end no shortage: the trainer waits on."""
    trainer, rollout = state.shortages.trainer_since_s, state.shortages.rollout_since_s
    if role is Role.TRAINER:
        trainer = None if state.trainer_machines else time_s if trainer is None else trainer
    if role is Role.TRAINER or rollout is None or phase is NodePhase.SERVING:
        rollout = None if _has_service(state) else time_s if rollout is None else rollout
    present = [role for role, since_s in ((Role.TRAINER, trainer), (Role.ROLLOUT, rollout)) if since_s is None]
    reports = without(state.reports, *(f"{CAPACITY} {role}" for role in present)) if present else state.reports
    shortages = replace(state.shortages, trainer_since_s=trainer, rollout_since_s=rollout)
    return replace(state, shortages=shortages, reports=reports)


def _has_service(state: RunState) -> bool:
    """Whether a rollout node serves, or drains and completes what it has."""
    serves = (NodePhase.SERVING, NodePhase.DRAINING)
    return any(node.role is Role.ROLLOUT and node.served and node.phase in serves for node in state.nodes.values())


def _exited(state: RunState, event: JobExited, time_s: float) -> RunState:
    node = state.nodes[event.node]
    state = _with_node(state, replace(node, attempt_ended_at_s=time_s))
    replaced = event.exit_code == exit_codes.FENCED or node.phase is NodePhase.DRAINING
    if node.role is not Role.TRAINER or event.exit_code in (exit_codes.OK, exit_codes.STOPPED) or replaced:
        return state
    before = state.failures
    count = 1 if event.step > before.step else before.count + 1
    is_alike = count > 1 and event.reason == before.reason
    alike = (before.alike if is_alike else 0) + bool(event.reason)
    failures = TrainerFailures(count, max(event.step, before.step), alike, event.reason)
    return replace(state, failures=failures)


def _with_node(state: RunState, node: Node) -> RunState:
    return replace(state, nodes=with_item(state.nodes, node.id, node))


def _with_kind(state: RunState, name: str, kind: MachineKind) -> RunState:
    return replace(state, kinds=with_item(state.kinds, name, kind))


def _with_slot(state: RunState, name: str, slot: Slot) -> RunState:
    return replace(state, slots=with_item(state.slots, name, slot))
