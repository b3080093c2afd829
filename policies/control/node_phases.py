"""Update the nodes' phases from what was observed, and terminate nodes that do not work in time.

A node that drains or terminates no longer fills its slot (`FILLING_NODE`), and `policies.fleet.reconcile` then
requests its replacement.
"""

from __future__ import annotations

from dataclasses import replace

from grpo_orch.policies.model import exit_codes
from grpo_orch.policies.model.events import RebalanceRecommended
from grpo_orch.policies.model.fold import PREEMPTION_NOTICE
from grpo_orch.policies.model.state import Node
from grpo_orch.policies.model.vocabulary import MachineState, NodePhase, Refusal, Role
from grpo_orch.policies.serving import joining
from grpo_orch.policies.serving.joining import JoiningNode
from grpo_orch.policies.tick.draft import Tick
from grpo_orch.policies.tick.snapshot import HEARTBEAT_FRESH_S, Machine

# A trainer without heartbeats for longer hangs, if the gateway next to it is alive: its machine works and reaches
# the store.
HEARTBEAT_LOST_S = 120.0
# Without contact to the whole machine, the cloud is polled and reports when the machine is lost. Until then the
# trainer may be working, cut off from the store, and gets this long.
MACHINE_LOST_S = 3600.0
# A gateway younger than this may not know every node, so an absence means nothing yet.
MEMBERSHIP_SETTLES_S = 5.0
BOOT_TIMEOUTS_MAX = 4.0  # a node may boot for this many boot timeouts, even if snapshots failed meanwhile


def update_node_phases(tick: Tick) -> None:
    """Update every node's phase from the snapshot."""
    for refused in tick.snapshot.refused:
        node = tick.node(refused.node)
        if node is not None and node.phase is NodePhase.REQUESTED and refused.machine_exists:
            reason = f"its launch failed and left a machine: {refused.message}"
            tick.move(node, NodePhase.TERMINATING, reason, Refusal.NEVER_SERVED)
        elif node is not None and node.phase is NodePhase.REQUESTED:
            tick.move(node, NodePhase.REFUSED, refused.message, refused.refusal)
        elif node is not None and _was_released_unbought(tick, node):
            tick.move(node, NodePhase.GONE, f"released before it was bought: {refused.message}", refused.refusal)
    if tick.snapshot.machines is None:
        return
    for node in list(tick.state.nodes.values()):
        machine = tick.snapshot.machines.get(node.id)
        if machine is None or machine.state is MachineState.GONE:
            _machine_absent(tick, node, machine)
        else:
            _machine_present(tick, node, machine)
    _rebalance_recommendations(tick)


def _rebalance_recommendations(tick: Tick) -> None:
    """Journal each machine's rebalance recommendation once, unless it already has a preemption notice."""
    for machine in (tick.snapshot.machines or {}).values():
        node = tick.node(machine.node) if machine.rebalance_recommended else None
        if node is None or node.rebalance_recommended or node.phase not in (NodePhase.BOOTING, NodePhase.SERVING):
            continue
        record = None if node.pool is None else tick.state.pools.get(str(node.pool))
        count, taken = (record.rebalances, record.rebalances_preempted) if record else (0, 0)
        where = node.pool or "its pool"
        reason = f"the cloud preempted {taken} of {count} earlier machines with one in {where}"
        tick.emit(RebalanceRecommended(node.id, reason), f"{node.id} has a rebalance recommendation: {reason}")


def _was_released_unbought(tick: Tick, node: Node) -> bool:
    """Whether a node whose launch is refused had been released before and never had a machine."""
    had_no_machine = node.arrived_at_s is None and not node.served and node.attempt == 1
    machines = tick.snapshot.machines
    is_unlisted = machines is not None and node.id not in machines
    return node.phase is NodePhase.TERMINATING and had_no_machine and is_unlisted


def _machine_absent(tick: Tick, node: Node, machine: Machine | None) -> None:
    if node.phase is NodePhase.REQUESTED and machine is None:
        return  # the launch is requested again until the machine exists or is refused
    reason = machine.reason if machine and machine.reason else "the cloud no longer has it"
    if node.phase is NodePhase.TERMINATING:
        reason = "terminated"
    cost_usd = node.cost_usd(tick.snapshot.now_s)
    hours = (tick.snapshot.now_s - node.requested_at_s) / 3600
    tick.move(
        node, NodePhase.GONE, f"{reason}, after {hours:.1f} h and {cost_usd:.2f} USD" if cost_usd else reason
    )


def _machine_present(tick: Tick, node: Node, machine: Machine) -> None:
    if node.phase is NodePhase.TERMINATING:
        return
    if machine.state is MachineState.STARTING:
        return  # it may still be refused
    if node.phase is NodePhase.REQUESTED:
        tick.move(node, NodePhase.BOOTING, "the machine is up")
        if machine.price_usd_per_h > 0 or machine.pool is not None:
            tick.bought(machine)
    elif machine.pool is not None and (node.pool is None or node.arrived_at_s is None):  # not known until now
        tick.bought(_at_known_price(node, machine))
    if machine.notice and node.phase is not NodePhase.DRAINING:
        tick.move(tick.state.nodes[node.id], NodePhase.DRAINING, PREEMPTION_NOTICE)
        return
    node = tick.state.nodes[node.id]
    if machine.attempt == node.attempt and machine.exit_code is not None and node.attempt_ended_at_s is None:
        tick.exited(node, machine.exit_code, machine.exit_reason)
        if node.phase is NodePhase.SERVING and machine.exit_code != exit_codes.OK:
            tick.move(node, NodePhase.BOOTING, f"its work ended with exit code {machine.exit_code}")
        return
    if node.attempt_ended_at_s is not None:
        return  # between two attempts: a heartbeat that is still fresh is the ended one's
    is_working = _is_working(tick, node)
    if node.phase is NodePhase.BOOTING and is_working is True:
        tick.move(node, NodePhase.SERVING, "joined the gateway" if node.role is Role.ROLLOUT else "heartbeat")
    elif node.phase is NodePhase.SERVING and is_working is False:
        tick.move(node, NodePhase.BOOTING, "left the gateway while its machine is up")


def _at_known_price(node: Node, machine: Machine) -> Machine:
    if not node.price_usd_per_h:
        return machine
    return replace(machine, price_usd_per_h=node.price_usd_per_h, on_demand_usd_per_h=node.on_demand_usd_per_h)


def _is_working(tick: Tick, node: Node) -> bool | None:
    """Whether the node works; None if unknown."""
    snapshot = tick.snapshot
    if node.role is Role.TRAINER:
        beat = snapshot.heartbeat_of(node)
        is_fresh = beat is not None and tick.waited_s(beat.beat_at_s) < HEARTBEAT_FRESH_S
        # A missed heartbeat proves nothing: `lifecycle` waits for HEARTBEAT_LOST_S.
        return True if is_fresh else None
    if snapshot.members is None:
        return None
    if snapshot.is_member(node):
        return True
    return False if snapshot.gateway.age_s > MEMBERSHIP_SETTLES_S else None


# Machines whose work does not start in time.


def terminate_overdue(tick: Tick) -> None:
    """Terminate machines whose work did not start in time, so that others are requested instead."""
    for node in list(tick.state.nodes.values()):
        if node.phase not in (NodePhase.REQUESTED, NodePhase.BOOTING) or node.attempt_ended_at_s is not None:
            continue
        limit_s = tick.spec.policies.boot_timeout_s
        if (coming := tick.snapshot.joining.get(node.id)) is not None:
            _replace_if_stuck(tick, node, coming)
            continue
        if node.role is Role.TRAINER and tick.snapshot.members is None and _has_worked(tick, node):
            limit_s = max(limit_s, MACHINE_LOST_S)  # it may be cut off, with checkpoints that are not stored yet
        if _unseen_s(tick, node) > limit_s or _boots_too_long(tick, node, limit_s):
            reason = f"its work did not start within {limit_s:.0f} s (`policies.boot_timeout_s`)"
            tick.move(node, NodePhase.TERMINATING, reason, None if node.served else Refusal.NEVER_SERVED)


def _replace_if_stuck(tick: Tick, node: Node, coming: JoiningNode) -> None:
    """Replace a joining rollout node that makes no progress for too long."""
    boot_timeout_s, waited_s = tick.spec.policies.boot_timeout_s, tick.waited_s(node.since_s)
    # `stalled_s` is on the gateway's clock: failed snapshots or a new gateway do not prolong it. `waited_s` limits
    # a node whose gateway is restarted repeatedly.
    limit_s = joining.stage_limit_s(coming.stage, boot_timeout_s)
    is_stuck = min(coming.stalled_s, waited_s) > limit_s
    if is_stuck or waited_s > joining.max_join_s(boot_timeout_s) + limit_s:
        problem = f"no progress for {coming.stalled_s:.0f} s" if is_stuck else f"no member after {waited_s:.0f} s"
        reason = f"{coming.stage.name}: {problem} (`policies.boot_timeout_s`)"
        tick.move(node, NodePhase.TERMINATING, reason, None if node.served else Refusal.NEVER_SERVED)


def _boots_too_long(tick: Tick, node: Node, limit_s: float) -> bool:
    """Whether a rollout node has exceeded its time several times over, even if some snapshots failed."""
    if node.role is Role.TRAINER or node.phase is not NodePhase.BOOTING:
        return False
    return _unseen_s(tick, node) > HEARTBEAT_LOST_S and tick.waited_s(node.since_s) > BOOT_TIMEOUTS_MAX * limit_s


def _has_worked(tick: Tick, node: Node) -> bool:
    """Whether the node ever worked, even if only a heartbeat shows it that was not journalled."""
    return node.served or tick.snapshot.heartbeat_of(node) is not None


def _unseen_s(tick: Tick, node: Node) -> float:
    """Return the seconds in which the node's work would have been noticed and was not.

    The gateway notices rollout nodes. A trainer that has worked is returning once the gateway on its machine is
    alive.
    """
    snapshot, silent_s = tick.snapshot, tick.silent_s(node.since_s)
    if node.role is Role.TRAINER and _has_worked(tick, node):
        is_gateway_alive = snapshot.members is not None
        return (snapshot.trainer_only_silent_s if is_gateway_alive else snapshot.machine_silent_s)(node.since_s)
    if node.role is Role.TRAINER or node.phase is NodePhase.REQUESTED:
        return silent_s
    return 0.0 if snapshot.members is None else min(silent_s, snapshot.gateway.age_s)
