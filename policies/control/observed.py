"""The passive half of a tick: what was observed moves the nodes' phases. Nothing here requests anything."""

from __future__ import annotations

from dataclasses import replace

from policies.model import exit_codes
from policies.model.events import RebalanceRecommended
from policies.model.fold import NOTICED
from policies.model.state import Node
from policies.model.vocabulary import MachineState, NodePhase, Refusal, Role
from policies.serving import joining
from policies.serving.joining import Coming
from policies.tick.draft import Tick
from policies.tick.snapshot import HEARTBEAT_FRESH_S, Machine

# A trainer that is silent for longer hangs, if the gateway beside it is heard: its machine works, and reaches the
# store.
HEARTBEAT_LOST_S = 120.0
# Where nothing on its machine is heard, the cloud is asked again and again, and says when the machine is lost.
# Until then the trainer may be at work, cut off from the store; it is waited for this long.
MACHINE_LOST_S = 3600.0
# A gateway younger than this may not have heard from every node: their absence means nothing yet.
MEMBERSHIP_SETTLES_S = 5.0
BOOT_TIMEOUTS_MAX = 4.0  # times its boot timeout that a node may boot, however many looks failed meanwhile


def update_node_phases(tick: Tick) -> None:
    """Bring every node's phase to what the snapshot shows."""
    for refused in tick.snapshot.refused:
        node = tick.node(refused.node)
        if node is not None and node.phase is NodePhase.REQUESTED and refused.left:
            why = f"its launch failed and left a machine: {refused.message}"
            tick.move(node, NodePhase.TERMINATING, why, Refusal.NEVER_SERVED)
        elif node is not None and node.phase is NodePhase.REQUESTED:
            tick.move(node, NodePhase.REFUSED, refused.message, refused.refusal)
        elif node is not None and _was_given_up_unbought(tick, node):
            why = f"given up, and never bought: {refused.message}"
            tick.move(node, NodePhase.GONE, why, refused.refusal)
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
    """Journal each machine's rebalance recommendation once, unless its preemption notice is there already."""
    for machine in (tick.snapshot.machines or {}).values():
        node = tick.node(machine.node) if machine.rebalance_recommended else None
        if node is None or node.rebalance_recommended or node.phase not in (NodePhase.BOOTING, NodePhase.SERVING):
            continue
        record = None if node.pool is None else tick.state.pools.get(str(node.pool))
        count, taken = (record.rebalances, record.rebalances_taken) if record else (0, 0)
        reason = f"of {count} machines with one in {node.pool or 'its pool'}, the cloud took {taken}"
        tick.emit(RebalanceRecommended(node.id, reason), f"{node.id} has a rebalance recommendation: {reason}")


def _was_given_up_unbought(tick: Tick, node: Node) -> bool:
    """Whether a node whose launch is refused was returned before, and never had a machine."""
    never_came = node.came_at_s is None and not node.served and node.attempt == 1
    machines = tick.snapshot.machines
    return node.phase is NodePhase.TERMINATING and never_came and machines is not None and node.id not in machines


def _machine_absent(tick: Tick, node: Node, machine: Machine | None) -> None:
    if node.phase is NodePhase.REQUESTED and machine is None:
        return  # not there yet; the launch is requested again until it is, or is refused
    why = machine.why if machine and machine.why else "the cloud no longer has it"
    if node.phase is NodePhase.TERMINATING:
        why = "taken down"
    cost_usd = node.cost_usd(tick.snapshot.now_s)
    hours = (tick.snapshot.now_s - node.requested_at_s) / 3600
    tick.move(node, NodePhase.GONE, f"{why}, after {hours:.1f} h and {cost_usd:.2f} USD" if cost_usd else why)


def _machine_present(tick: Tick, node: Node, machine: Machine) -> None:
    if node.phase is NodePhase.TERMINATING:
        return
    if machine.state is MachineState.STARTING:
        return  # it may still be refused
    if node.phase is NodePhase.REQUESTED:
        tick.move(node, NodePhase.BOOTING, "the machine is there")
        if machine.price_usd_per_h > 0 or machine.pool is not None:
            tick.bought(machine)
    elif machine.pool is not None and (node.pool is None or node.came_at_s is None):  # not known until now
        tick.bought(_at_known_price(node, machine))
    if machine.notice and node.phase is not NodePhase.DRAINING:
        tick.move(tick.state.nodes[node.id], NodePhase.DRAINING, NOTICED)
        return
    node = tick.state.nodes[node.id]
    if machine.attempt == node.attempt and machine.exit_code is not None and node.attempt_ended_at_s is None:
        tick.exited(node, machine.exit_code, machine.exit_reason)
        if node.phase is NodePhase.SERVING and machine.exit_code != exit_codes.OK:
            tick.move(node, NodePhase.BOOTING, f"its work ended with exit code {machine.exit_code}")
        return
    if node.attempt_ended_at_s is not None:
        return  # between two attempts: a heartbeat that is still fresh is the dead one's
    working = _is_working(tick, node)
    if node.phase is NodePhase.BOOTING and working is True:
        tick.move(node, NodePhase.SERVING, "in the membership" if node.role is Role.ROLLOUT else "heartbeat")
    elif node.phase is NodePhase.SERVING and working is False:
        tick.move(node, NodePhase.BOOTING, "left the membership while its machine is up")


def _at_known_price(node: Node, machine: Machine) -> Machine:
    if not node.price_usd_per_h:
        return machine
    return replace(machine, price_usd_per_h=node.price_usd_per_h, on_demand_usd_per_h=node.on_demand_usd_per_h)


def _is_working(tick: Tick, node: Node) -> bool | None:
    """Whether the node's work is seen; None where nothing can be concluded."""
    snapshot = tick.snapshot
    if node.role is Role.TRAINER:
        beat = snapshot.heartbeat_of(node)
        fresh = beat is not None and tick.waited_s(beat.beat_at_s) < HEARTBEAT_FRESH_S
        return True if fresh else None  # a missed beat is no proof; `lifecycle` gives it HEARTBEAT_LOST_S
    if snapshot.members is None:
        return None
    if snapshot.is_member(node):
        return True
    return False if snapshot.gateway.age_s > MEMBERSHIP_SETTLES_S else None


# Machines whose work does not come within its time.


def replace_overdue(tick: Tick) -> None:
    """Give up machines whose work was not seen in time; others are requested instead."""
    for node in list(tick.state.nodes.values()):
        if node.phase not in (NodePhase.REQUESTED, NodePhase.BOOTING) or node.attempt_ended_at_s is not None:
            continue
        limit_s = tick.spec.policies.boot_timeout_s
        if (coming := tick.snapshot.coming.get(node.id)) is not None:
            _replace_if_stuck(tick, node, coming)
            continue
        if node.role is Role.TRAINER and tick.snapshot.members is None and _has_worked(tick, node):
            limit_s = max(limit_s, MACHINE_LOST_S)  # maybe cut off, with checkpoints that are not stored yet
        if _unseen_s(tick, node) > limit_s or _boots_too_long(tick, node, limit_s):
            reason = f"no work seen within {limit_s:.0f} s (`policies.boot_timeout_s`)"
            tick.move(node, NodePhase.TERMINATING, reason, None if node.served else Refusal.NEVER_SERVED)


def _replace_if_stuck(tick: Tick, node: Node, coming: Coming) -> None:
    """Replace a rollout node whose agent has told what it is at, once that has not got on for long."""
    boot_timeout_s, waited_s = tick.spec.policies.boot_timeout_s, tick.waited_s(node.since_s)
    # Told of on the gateway's own clock: that a look failed, or a gateway is new, makes it no longer. But gateways
    # that are new again and again would have a node stand still for ever.
    limit_s = joining.limit_s(coming.stage, boot_timeout_s)
    still = min(coming.still_s, waited_s) > limit_s
    if still or waited_s > joining.max_join_s(boot_timeout_s) + limit_s:
        for_s = f"no further for {coming.still_s:.0f} s" if still else f"no member after {waited_s:.0f} s"
        reason = f"{coming.stage.name}, and {for_s} (`policies.boot_timeout_s`)"
        tick.move(node, NodePhase.TERMINATING, reason, None if node.served else Refusal.NEVER_SERVED)


def _boots_too_long(tick: Tick, node: Node, limit_s: float) -> bool:
    """Whether a rollout node has had a multiple of its time, though looks failed now and then: it is paid for."""
    if node.role is Role.TRAINER or node.phase is not NodePhase.BOOTING:
        return False
    return _unseen_s(tick, node) > HEARTBEAT_LOST_S and tick.waited_s(node.since_s) > BOOT_TIMEOUTS_MAX * limit_s


def _has_worked(tick: Tick, node: Node) -> bool:
    """Whether it was ever seen to work, if only by a heartbeat that could not be journalled."""
    return node.served or tick.snapshot.heartbeat_of(node) is not None


def _unseen_s(tick: Tick, node: Node) -> float:
    """Seconds in which the node's work could have been seen, a rollout node's by the gateway, and was not. A
    trainer that has worked is on its way back once the gateway on its machine is heard."""
    snapshot, silent_s = tick.snapshot, tick.silent_s(node.since_s)
    if node.role is Role.TRAINER and _has_worked(tick, node):
        heard = snapshot.members is not None
        return (snapshot.trainer_only_silent_s if heard else snapshot.machine_silent_s)(node.since_s)
    if node.role is Role.TRAINER or node.phase is NodePhase.REQUESTED:
        return silent_s
    return 0.0 if snapshot.members is None else min(silent_s, snapshot.gateway.age_s)
