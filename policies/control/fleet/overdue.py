"""Machines that have had their time: whose work does not come, and those that wait for a trainer."""

from __future__ import annotations

from policies.control.fleet.markets import market_of
from policies.control.observed import HEARTBEAT_LOST_S, MACHINE_LOST_S
from policies.control.tick import Tick
from policies.model.buying import MachineKind
from policies.model.state import Node
from policies.model.vocabulary import NodePhase, Refusal, Role, RunPhase, kind_of
from policies.serving import joining
from policies.serving.joining import Coming

HOLD_MIN_S = 300.0  # a machine for the trainer is often found again within minutes
BOOT_TIMEOUTS_MAX = 4.0  # a node may boot for so many, however many looks failed meanwhile


def replace_overdue(tick: Tick) -> None:
    """Return machines whose work was not seen in time; others are asked for in their place."""
    for node in list(tick.state.nodes.values()):
        if node.phase not in (NodePhase.REQUESTED, NodePhase.BOOTING) or node.attempt_ended_at_s is not None:
            continue
        limit_s = tick.spec.policies.boot_timeout_s
        if (coming := tick.snapshot.coming.get(node.id)) is not None:
            _replace_if_still(tick, node, coming)
            continue
        if node.role is Role.TRAINER and tick.snapshot.members is None and _has_worked(tick, node):
            limit_s = max(limit_s, MACHINE_LOST_S)  # maybe cut off, with checkpoints that are not stored yet
        if _unseen_s(tick, node) > limit_s or _boots_too_long(tick, node, limit_s):
            reason = f"no work seen within {limit_s:.0f} s (`policies.boot_timeout_s`)"
            tick.move(node, NodePhase.TERMINATING, reason, None if node.served else Refusal.NEVER_SERVED)


def _replace_if_still(tick: Tick, node: Node, coming: Coming) -> None:
    """Replace a rollout node whose agent has told what it is at, once that has not got on for long."""
    boot_timeout_s, waited_s = tick.spec.policies.boot_timeout_s, tick.waited_s(node.since_s)
    # Told of on the gateway's own clock: that a look failed, or a gateway is new, makes it no longer. But gateways
    # that are new again and again would have a node stand still for ever.
    limit_s = joining.limit_s(coming.stage, boot_timeout_s)
    still = min(coming.still_s, waited_s) > limit_s
    if still or waited_s > joining.longest_s(boot_timeout_s) + limit_s:
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
        return (snapshot.silent_beside_gateway_s if heard else snapshot.machine_silent_s)(node.since_s)
    if node.role is Role.TRAINER or node.phase is NodePhase.REQUESTED:
        return silent_s
    return 0.0 if snapshot.members is None else min(silent_s, snapshot.gateway_age_s)


def release_idle(tick: Tick) -> None:
    """Release the rollout nodes when the trainer has had no machine for long; or, where they came while the run
    parks, when the trainer's old machine does not go."""
    parked, since_s = tick.state.phase is RunPhase.PARKED, tick.state.trainerless_since_s
    if parked:
        since_s = min((node.since_s for node in tick.state.live(Role.ROLLOUT) if _is_there(node)), default=None)
    if since_s is None or tick.snapshot.machines is None:
        return
    kind = tick.state.kinds.get(kind_of(Role.ROLLOUT, market_of(Role.ROLLOUT, tick.spec)), MachineKind())
    boot_s = tick.spec.policies.boot_timeout_s if kind.boot_s is None else kind.boot_s
    hold_s = max(HOLD_MIN_S, min(boot_s, tick.spec.policies.boot_timeout_s))
    if tick.silent_s(since_s) <= hold_s:
        return
    for node in tick.state.live(Role.ROLLOUT):
        reason = f"the trainer has had no machine for {hold_s:.0f} s; asked for again when it has one"
        if parked:
            reason = f"the trainer's old machine has not gone for {hold_s:.0f} s; asked for again when it has"
        tick.move(node, NodePhase.TERMINATING, reason)


def _is_there(node: Node) -> bool:
    return node.phase in (NodePhase.BOOTING, NodePhase.SERVING)
