"""How each journalled event changes the run's state.

State changes only through `apply`, in a running controller as on `resume`. So the next daemon, once it has read
the journal, knows everything the last one knew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import assert_never

from grpo_orch.policies.model import exit_codes
from grpo_orch.policies.model.breaker import SPOT_STABLE_S, MachineKind, after_move
from grpo_orch.policies.model.events import (
    BudgetNeared,
    BudgetReached,
    BudgetRefused,
    BudgetSet,
    BuyingResumed,
    BuyingStopped,
    CapacityShortage,
    CommandTaken,
    ControllerTookOver,
    Diverged,
    DivergenceCleared,
    DivergenceSuspected,
    DocumentUnreadable,
    Event,
    FleetMoved,
    FleetSized,
    GatewayRestarted,
    JobExited,
    JobRestarted,
    MachineBought,
    MachineEvent,
    NodeMoved,
    NodeRequested,
    PitfallFound,
    ProbationPassed,
    RebalanceRecommended,
    RollbackStarted,
    RunCreated,
    RunMoved,
    SpecProved,
    StoreCaughtUp,
    StoreSlowed,
    TimelineEvent,
    TimelineForked,
    TimelineResumed,
    TrainerFenced,
)
from grpo_orch.policies.model.phases import NODE_EDGES, ROLLBACK_EDGES, RUN_EDGES, Phase
from grpo_orch.policies.model.pools import Pool, PoolRecord, with_launch, with_refusal, with_stay
from grpo_orch.policies.model.reports import BUDGET, CAPACITY, with_report, without
from grpo_orch.policies.model.state import FleetSize, Node, Rollback, RunState, Shortages, TrainerFailures
from grpo_orch.policies.model.vocabulary import Market, NodePhase, Refusal, Role, RollbackStage, RunPhase, kind_of


class IllegalMove(Exception):
    """A move that is not in the tables: a bug in a decision, never a user's error."""


def check_move(edges: Mapping[tuple[Phase, Phase], str], old: Phase, new: Phase) -> None:
    """Raise IllegalMove unless the table has the edge."""
    if (old, new) not in edges:
        raise IllegalMove(f"{type(new or old).__name__}: {old} -> {new} is not in the table")


# A fold changes the state's mappings in place: to copy them for each event would take the square of their size.
# So a state that was given to `apply` must not be used again; `fold` and a tick begin with a copy.


def copied(state: RunState) -> RunState:
    """Return the state with mappings of its own, which `apply` may change."""
    return replace(
        state,
        nodes=dict(state.nodes),
        slots=dict(state.slots),
        kinds=dict(state.kinds),
        pools=dict(state.pools),
    )


# A controller may take over on a host with another clock: no time in the state may be in its future.


UNSEEN_MAX_S = 86400.0  # if the store's clock shows a larger difference than this, it is wrong itself


def clock_lag_s(last_event_s: float, time_s: float, since_last_event_s: float) -> float:
    """Return how far the clock of a new controller is known to be behind its predecessor's, in seconds.

    The new one takes over at `time_s`; the last event was journalled at `last_event_s`. Time does not go back, and
    by the store's clock at least `since_last_event_s` have passed, in which machines cost money.
    """
    unseen_s = since_last_event_s - max(0.0, time_s - last_event_s)
    return max(0.0, last_event_s - time_s) + (unseen_s if 0.0 < unseen_s <= UNSEEN_MAX_S else 0.0)


def with_times_clamped(state: RunState, time_s: float, back_s: float) -> RunState:
    """Clamp all times to `time_s`, at which a controller takes over on a clock that is `back_s` behind.

    Journalled events are in the past, whatever the clock showed. Machines keep their known age, which is paid
    for.
    """
    nodes = {
        name: replace(
            node,
            since_s=min(node.since_s, time_s),
            requested_at_s=min(node.requested_at_s - back_s, time_s),
            attempt_ended_at_s=_not_after(node.attempt_ended_at_s, time_s),
        )
        for name, node in state.nodes.items()
    }
    kinds = {
        name: replace(kind, failed_at_s=min(kind.failed_at_s, time_s), stopped_at_s=kind.stopped_at_s - back_s)
        for name, kind in state.kinds.items()
    }
    pools = {
        name: replace(
            record,
            refused_at_s=min(record.refused_at_s, time_s),
            preempted_at_s=min(record.preempted_at_s, time_s),
        )
        for name, record in state.pools.items()
    }
    return replace(
        state,
        nodes=nodes,
        kinds=kinds,
        pools=pools,
        size=replace(state.size, at_s=min(state.size.at_s, time_s)),
        shortages=Shortages(
            _not_after(state.shortages.spot_since_s, time_s),
            _not_after(state.shortages.trainer_since_s, time_s),
            _not_after(state.shortages.rollout_since_s, time_s),
        ),
        reports={name: replace(report, at_s=min(report.at_s, time_s)) for name, report in state.reports.items()},
        parked_at_s=_not_after(state.parked_at_s, time_s),
        diverged_at_s=min(state.diverged_at_s, time_s),
        rollbacks=tuple(replace(rollback, since_s=min(rollback.since_s, time_s)) for rollback in state.rollbacks),
    )


def _not_after(since_s: float | None, time_s: float) -> float | None:
    return None if since_s is None else min(since_s, time_s)


# How journalled events change the pools' records.


PREEMPTION_NOTICE = "preemption notice"  # a node's reason to drain; its stay in the pool has ended


def note_bought(state: RunState, event: MachineBought, requested: Pool | None, time_s: float) -> RunState:
    """Record a machine's arrival in its pool, and a refusal by the requested pool if that is another one."""
    landed = landed_in(requested, event.pool)
    if landed is None or event.pool is None:
        return state
    if requested is not None and requested != landed:
        state = _with(state, requested, lambda record: with_refusal(record, time_s, time_s))
    if landed != landed.in_region and str(landed.in_region) in state.pools:  # its quota has room again
        state = _with(state, landed.in_region, lambda record: with_launch(record, time_s))
    return _with(state, landed, lambda record: with_launch(record, time_s))


def landed_in(requested: Pool | None, landed: Pool | None) -> Pool | None:
    """Return the pool of a machine: the requested one if that leaves the zone to the cloud."""
    if requested is None or landed is None:
        return landed or requested
    return requested if requested == replace(landed, zone=requested.zone and landed.zone) else landed


def note_moved(state: RunState, node: Node, move: NodeMoved, time_s: float) -> RunState:
    """Record a node's refusal or the end of its stay in its pool. `node`: as it was before the move.

    Refused credentials do not count against a pool.
    """
    if node.pool is None:
        return state
    if move.phase is NodePhase.REFUSED:
        if move.refusal is Refusal.CREDENTIALS:
            return state
        pool = node.pool.in_region if move.refusal is Refusal.QUOTA else node.pool  # a quota is the region's
        return _with(state, pool, lambda record: with_refusal(record, node.requested_at_s, time_s))
    has_notice = node.phase is NodePhase.DRAINING and node.reason == PREEMPTION_NOTICE
    if node.arrived_at_s is None or node.phase is NodePhase.TERMINATING or has_notice:
        return state  # recorded already
    since_s, taken = node.arrived_at_s, move.phase is NodePhase.GONE or move.reason == PREEMPTION_NOTICE
    if not taken and move.phase is not NodePhase.TERMINATING:
        return state
    recommended = node.rebalance_recommended
    return _with(
        state,
        node.pool,
        lambda record: with_stay(record, since_s, time_s, preempted=taken, rebalance_recommended=recommended),
    )


def _with(state: RunState, pool: Pool, change: Callable[[PoolRecord], PoolRecord]) -> RunState:
    state.pools[str(pool)] = change(state.pools.get(str(pool), PoolRecord(pool)))
    return state


# How each journalled event changes the run's state.


def fold(history: Iterable[tuple[int, float, Iterable[Event]]], onto: RunState | None = None) -> RunState:
    """Fold `(entry number, time_s, events)` in order. Raises IllegalMove for an impossible history."""
    state = copied(onto or RunState())
    for number, time_s, events in history:
        for event in events:
            state = apply(state, event, time_s, number)
    return state


def apply(state: RunState, event: Event, time_s: float, number: int) -> RunState:
    """Return the state after one event of entry `number`; the state before must not be used again.

    Raises IllegalMove for a move that is not in the phase tables.
    """
    reports = with_report(state.reports, event, time_s)
    if reports is not state.reports:
        state = replace(state, reports=reports)
    return replace(_apply(state, event, time_s, number), last_event_s=time_s)


def _apply(state: RunState, event: Event, time_s: float, number: int) -> RunState:
    if isinstance(event, MachineEvent):
        return apply_to_machines(state, event, time_s)
    if isinstance(event, TimelineEvent):
        return apply_to_timelines(state, event, time_s)
    match event:
        case RunCreated():
            return replace(state, name=event.name)
        case ControllerTookOver():
            back_s = clock_lag_s(state.last_event_s, time_s, event.since_last_event_s)
            return replace(with_times_clamped(state, time_s, back_s), epoch=number)
        case RunMoved():
            return _run_moved(state, event, time_s)
        case GatewayRestarted():
            return replace(state, gateway_boot_id=event.boot_id)
        case CommandTaken():
            return replace(state, commands_taken=state.commands_taken | {event.command_id})
        case SpecProved():
            return replace(state, is_proved=True)
        case BudgetReached():
            return replace(state, money=replace(state.money, is_reached=True))
        case BudgetSet():
            money = replace(state.money, cap_usd=event.usd)
            return replace(state, money=money, reports=without(state.reports, BUDGET))
        case (
            PitfallFound()
            | StoreSlowed()
            | StoreCaughtUp()
            | DocumentUnreadable()
            | BudgetRefused()
            | BudgetNeared()
            | CapacityShortage()
        ):
            return state  # only reported
        case _:
            assert_never(event)


def _run_moved(state: RunState, event: RunMoved, time_s: float) -> RunState:
    check_move(RUN_EDGES, state.phase, event.phase)
    was_parked = state.phase is RunPhase.PARKED
    parked_at_s = time_s if event.phase is RunPhase.PARKED else None
    state = replace(state, phase=event.phase, reason=event.reason, parked_at_s=parked_at_s)
    if event.phase is not RunPhase.STARTING:
        return state
    if was_parked:  # no user acted, so failures still count; the trainer's machine is missing only from now on
        since_s = None if state.shortages.trainer_since_s is None else time_s
        return replace(state, shortages=replace(state.shortages, trainer_since_s=since_s))
    # A user has repaired something, or wants another try.
    money, failures = replace(state.money, is_reached=False, unspent_usd=0.0), replace(state.failures, count=0)
    return replace(state, money=money, failures=failures, kinds={})


# Events of divergences, rollbacks and timelines.


def apply_to_timelines(state: RunState, event: TimelineEvent, time_s: float) -> RunState:
    """Return the state after a timeline event. Raises IllegalMove for a move that is not in the phase tables."""
    match event:
        case DivergenceSuspected():
            return replace(state, suspected=event)
        case DivergenceCleared():
            return replace(state, suspected=None)
        case Diverged():
            return replace(state, suspected=None, diverged=event, diverged_at_s=time_s)
        case RollbackStarted():
            return _begun(state, event, time_s)
        case TimelineForked():
            failures = replace(state.failures, count=0, step=-1)
            state = replace(state, suspected=None, diverged=None, failures=failures)
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
        case _:
            assert_never(event)


def _begun(state: RunState, event: RollbackStarted, time_s: float) -> RunState:
    check_move(ROLLBACK_EDGES, _stage(state), RollbackStage.BEGUN)
    begun = Rollback(event.fork, event.cause, event.from_step, RollbackStage.BEGUN, time_s)
    kept = [rollback for rollback in state.rollbacks if rollback.stage is not RollbackStage.BEGUN]
    return replace(state, rollbacks=(*kept, begun))


def _stage(state: RunState) -> RollbackStage | None:
    return None if state.rollback is None else state.rollback.stage


def _at_stage(state: RunState, stage: RollbackStage, time_s: float) -> RunState:
    check_move(ROLLBACK_EDGES, _stage(state), stage)
    moved = replace(state.rollbacks[-1], stage=stage, since_s=time_s)
    return replace(state, rollbacks=(*state.rollbacks[:-1], moved))


# Events of machines, from the request to the end, and of their work.


def apply_to_machines(state: RunState, event: MachineEvent, time_s: float) -> RunState:
    """Return the state after a machine event. Raises IllegalMove for a move that is not in the phase tables."""
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
                arrived_at_s=time_s if node.arrived_at_s is None else node.arrived_at_s,
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
        max_usd_per_h=event.max_usd_per_h,
        pool=event.pool,
        is_fallback=event.is_fallback,
        disk_usd_per_h=event.disk_usd_per_h,
    )
    if kind := state.kinds.get(node.kind):
        state = _with_kind(state, node.kind, replace(kind, probes=kind.probes + bool(kind.stopped)))
    state.slots[event.slot] = event.incarnation
    return _with_node(state, node)


def _moved(state: RunState, event: NodeMoved, time_s: float) -> RunState:
    node = state.nodes[event.node]
    check_move(NODE_EDGES, node.phase, event.phase)
    state = note_moved(state, node, event, time_s)
    unserved = node.phase in (NodePhase.REQUESTED, NodePhase.BOOTING) and not node.served
    lost = unserved and event.phase in (NodePhase.GONE, NodePhase.DRAINING)
    state = _noting_spot(state, node, event, time_s)
    kind = state.kinds.get(node.kind, MachineKind())
    came, requested_at_s = node.phase is not NodePhase.REQUESTED, node.requested_at_s
    kind = after_move(
        kind, event, time_s, arrived=came, served=node.served, lost=lost, requested_at_s=requested_at_s
    )
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
        del state.nodes[node.id]
    else:
        served = node.served or event.phase is NodePhase.SERVING
        node = replace(node, phase=event.phase, since_s=time_s, reason=event.reason, served=served)
        state = _with_node(state, node)
    return _noting_machines(state, node.role, event.phase, time_s)


def _noting_spot(state: RunState, node: Node, move: NodeMoved, time_s: float) -> RunState:
    """Note since when spot is short: from a refusal or loss on, a new shortage if a spot node was stable."""
    is_lost = move.phase in (NodePhase.REFUSED, NodePhase.GONE) and node.phase is not NodePhase.TERMINATING
    if node.role is not Role.ROLLOUT or node.is_fallback or node.market is not Market.SPOT or not is_lost:
        return state
    serving = [
        other for other in state.nodes.values() if (other.kind, other.phase) == (node.kind, NodePhase.SERVING)
    ]
    has_stable = any(time_s - other.since_s >= SPOT_STABLE_S for other in serving)
    was_refused = state.kinds.get(node.kind, MachineKind()).refused_in_a_row > 0
    if state.shortages.spot_since_s is None or (has_stable and not was_refused):
        return replace(state, shortages=replace(state.shortages, spot_since_s=time_s))
    return state


def _noting_machines(state: RunState, role: Role, phase: NodePhase, time_s: float) -> RunState:
    """Note since when the trainer has no machine, or no rollout node serves, after a node of `role` moved.

    Rollout machines that come and do not serve end no shortage.
    """
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
    alike = (before.identical if is_alike else 0) + bool(event.reason)
    failures = TrainerFailures(count, max(event.step, before.step), alike, event.reason)
    return replace(state, failures=failures)


def _with_node(state: RunState, node: Node) -> RunState:
    state.nodes[node.id] = node
    return state


def _with_kind(state: RunState, name: str, kind: MachineKind) -> RunState:
    state.kinds[name] = kind
    return state
