"""Decide one tick: from the state, the snapshot and the spec, to events, actions and a reason.

Pure and level-triggered: actions follow from the state after this tick's events and from the cloud's listing, so
the next daemon simply requests again an action that was lost with the last one.
"""

from __future__ import annotations

from grpo_orch.policies.control.lifecycle import must_end, release_machines, run_lifecycle
from grpo_orch.policies.control.node_phases import terminate_overdue, update_node_phases
from grpo_orch.policies.control.rollback import control_timeline
from grpo_orch.policies.fleet.budget import Spending
from grpo_orch.policies.fleet.market import breakers, offers
from grpo_orch.policies.fleet.plan import plan
from grpo_orch.policies.fleet.reconcile import reconcile
from grpo_orch.policies.fleet.report import report
from grpo_orch.policies.model.phases import FILLING_NODE, LIVE_RUN, TERMINAL_RUN
from grpo_orch.policies.model.spec import RunSpec
from grpo_orch.policies.model.state import Node, RunState
from grpo_orch.policies.model.vocabulary import MachineState, NodePhase, Role, RollbackStage
from grpo_orch.policies.tick.draft import Tick
from grpo_orch.policies.tick.snapshot import (
    HEARTBEAT_FRESH_S,
    Action,
    Confirm,
    Decision,
    Launch,
    Machine,
    RequestStop,
    Snapshot,
    Terminate,
    WriteFork,
)

BUSY_TICK_S = 0.25  # after a change: the next one often follows soon
BUSY_S = 10.0  # a launch, boot or return that takes longer takes minutes, and each tick costs store requests
STEADY_TICK_S = 1.0


def decide(state: RunState, snapshot: Snapshot, spec: RunSpec) -> Decision:
    """Return the events to journal and the actions to take now.

    Raises:
        IllegalMove: the phase tables forbid a move that the rules made; a bug.
    """
    tick = Tick(state, snapshot, spec)
    update_node_phases(tick)
    control_timeline(tick)
    run_lifecycle(tick)
    control_fleet(tick)
    report(tick)
    actions = actions_of(tick.state, snapshot)
    is_steady = not tick.events and not _is_busy(tick)
    return Decision(
        events=tuple(tick.events),
        actions=actions,
        requeue_after_s=STEADY_TICK_S if is_steady else BUSY_TICK_S,
        reason="; ".join(tick.reasons) or _steady(tick.state, snapshot),
    )


def control_fleet(tick: Tick) -> None:
    """Run market, plan and reconcile for a live run; otherwise release all machines."""
    snapshot, spec = tick.snapshot, tick.spec
    if tick.state.phase in LIVE_RUN:
        terminate_overdue(tick)
        for event, reason in breakers(tick.state, snapshot, spec):
            tick.emit(event, reason)
        market = offers(tick.state, snapshot, spec)
        reconcile(plan(market, tick.state, snapshot, spec), market, tick)
    if tick.state.phase not in LIVE_RUN:
        release_machines(tick, is_affordable=not Spending(tick.state, snapshot, spec).exceeded())


def is_done(state: RunState, snapshot: Snapshot) -> bool:
    """Whether the run is finished: it has ended, and the cloud lists no machine of it."""
    is_empty = snapshot.machines is not None and not snapshot.machines
    return state.phase in TERMINAL_RUN and not state.nodes and is_empty


def actions_of(state: RunState, snapshot: Snapshot) -> tuple[Action, ...]:
    """Return an action for every difference between state and snapshot; none on machines without a listing."""
    actions = _store_actions(state, snapshot)
    if snapshot.machines is None:
        return tuple(actions)
    for node in state.nodes.values():
        machine = snapshot.machines.get(node.id)
        if _launch_due(node, machine):
            actions.append(Launch(node.id, node.slot, node.market, node.attempt, state.timeline, node.pool))
        elif node.phase is NodePhase.TERMINATING:  # listed or not: a listing may be older than its launch
            actions.append(Terminate(node.id))
        elif machine is not None and node.role is Role.TRAINER and must_end(state, node, snapshot):
            actions.append(RequestStop(node.id, node.attempt))
        elif machine is not None and _is_silent(node, machine, snapshot):
            actions.append(Confirm(node.id))
    # Machines without a journalled intent: of a lost race, or left over from nodes that are gone.
    actions += [Terminate(name) for name in snapshot.machines if name not in state.nodes]
    return tuple(actions)


def _store_actions(state: RunState, snapshot: Snapshot) -> list[Action]:
    actions: list[Action] = []
    begun = state.rollback if state.rollback and state.rollback.stage is RollbackStage.BEGUN else None
    if begun is not None and snapshot.store.timeline < begun.fork.timeline:
        actions.append(WriteFork(begun.fork))
    return actions


def _launch_due(node: Node, machine: Machine | None) -> bool:
    if node.phase not in FILLING_NODE:
        return False
    return machine is None or (machine.state is not MachineState.GONE and machine.attempt < node.attempt)


def _is_silent(node: Node, machine: Machine, snapshot: Snapshot) -> bool:
    """Whether the cloud lists the machine as up, and nothing else shows that it works."""
    if machine.state is not MachineState.UP or machine.exit_code is not None:
        return False
    if node.phase is NodePhase.SERVING and node.role is Role.TRAINER:
        beat = snapshot.trainer
        return beat is None or snapshot.silent_s(beat.beat_at_s) > HEARTBEAT_FRESH_S
    return node.phase is NodePhase.BOOTING


def _is_busy(tick: Tick) -> bool:
    """Whether a node that does not serve, or a rollback, has changed its phase within BUSY_S."""
    rollback = tick.state.rollback
    changed_s = [node.since_s for node in tick.state.nodes.values() if node.phase is not NodePhase.SERVING]
    if rollback is not None and rollback.stage is not RollbackStage.PROBATION:
        changed_s.append(rollback.since_s)
    return any(tick.waited_s(since_s) < BUSY_S for since_s in changed_s)


def _steady(state: RunState, snapshot: Snapshot) -> str:
    nodes = state.nodes.values()
    serving = sum(node.phase is NodePhase.SERVING and node.role is Role.ROLLOUT for node in nodes)
    where = f"step {snapshot.trainer.step} of {snapshot.trainer.max_steps}" if snapshot.trainer else "no step yet"
    return f"run {state.phase}, {where}, {serving} rollout nodes serving"
