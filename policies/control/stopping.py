"""Stop or park a run: the trainer gets the time to store its state; all other machines are released immediately.

The trainer needs no rollout node for that: it abandons its present step and saves the end of the one before.
"""

from __future__ import annotations

from grpo_orch.policies.control.observed import HEARTBEAT_LOST_S, MACHINE_LOST_S
from grpo_orch.policies.fleet.budget import STOP_WAIT_S
from grpo_orch.policies.model import exit_codes
from grpo_orch.policies.model.phases import LIVE_NODE, UNTRAINED_ROLLBACK
from grpo_orch.policies.model.state import Node, RunState
from grpo_orch.policies.model.vocabulary import NodePhase, Role, RunPhase
from grpo_orch.policies.tick.draft import Tick
from grpo_orch.policies.tick.snapshot import RequestStop, Snapshot

REPORTED_USD_MIN = 0.01  # smaller amounts are not reported
DOWN = "down"
# A trainer with one of these has ended as intended, or for a reason that another attempt would not fix.
ENDED = frozenset(
    {exit_codes.OK, exit_codes.STOPPED, exit_codes.FENCED, exit_codes.DIVERGED, exit_codes.OUT_OF_MEMORY}
)
DOWN_NOW = "down_now"  # also while a `down` is waiting


def release_machines(tick: Tick, *, is_affordable: bool) -> None:
    """Release every machine of a run that is over or stopping, and end the stop when all are gone.

    `is_affordable`: a trainer may store for longer than STOP_WAIT_S while it makes progress.
    """
    for node in list(tick.state.nodes.values()):
        if node.phase not in LIVE_NODE:
            continue
        if tick.state.phase is RunPhase.STOPPING and _may_store(tick, node, is_affordable=is_affordable):
            if node.phase is not NodePhase.DRAINING:
                tick.move(node, NodePhase.DRAINING, "storing its state before it ends")
            continue
        tick.move(node, NodePhase.TERMINATING, f"the run is {tick.state.phase}")
    machines = tick.snapshot.machines
    if tick.state.phase is RunPhase.STOPPING and not tick.state.nodes and not machines and machines is not None:
        is_paused = tick.state.money.is_reached and tick.spec.budget.at == "pause"
        reason = tick.state.reason if tick.state.money.is_reached else "every machine is gone"
        if (unspent_usd := tick.state.money.unspent_usd) >= REPORTED_USD_MIN:
            unused = f"{unspent_usd:.2f} USD of this were reserved for requests that bought no machine"
            reason = f"{reason}; {unused}; `grpo-orch resume` continues with them"
        tick.move_run(RunPhase.PAUSED if is_paused else RunPhase.STOPPED, reason)


def drain_parked(tick: Tick, node: Node) -> None:
    """Return a parked trainer's machine once everything is stored, or after MACHINE_LOST_S.

    Sealed checkpoints that are not stored yet exist only on this machine. If the trainer fails to store them, it
    is restarted there, which stores them first, and the run continues.
    """
    if node.attempt_ended_at_s is None:
        if tick.silent_s(node.since_s) > MACHINE_LOST_S:
            tick.move(
                node, NodePhase.TERMINATING, f"still running {MACHINE_LOST_S:.0f} s after the request to end"
            )
        return
    code = tick.snapshot.exit_code_of(node)
    rollback = tick.state.rollback
    rolls_back = rollback is not None and rollback.stage in UNTRAINED_ROLLBACK
    if code in ENDED or code is None or rolls_back or tick.state.phase is not RunPhase.PARKED:
        tick.move(node, NodePhase.TERMINATING, "drained: its work has ended")
        return
    reason = f"its trainer ended with exit code {code} before everything was stored"
    tick.move(node, NodePhase.BOOTING, reason)
    tick.restart(tick.state.nodes[node.id], f"restarted: {reason}")
    tick.move_run(RunPhase.STARTING, f"not parked: {reason}")


def stop_immediately(tick: Tick) -> None:
    """Release every machine without waiting for the trainer to store its state."""
    for node in list(tick.state.nodes.values()):
        if node.phase in LIVE_NODE:
            tick.move(node, NodePhase.TERMINATING, "immediate stop requested")


def stop_requests(state: RunState, node: Node, snapshot: Snapshot) -> list[RequestStop]:
    """Return the request to the node's trainer to end; empty once the trainer reports that it is leaving."""
    if state.phase not in (RunPhase.STOPPING, RunPhase.PARKED) or node.role is not Role.TRAINER:
        return []
    if node.phase is not NodePhase.DRAINING or node.attempt_ended_at_s is not None:
        return []
    beat = snapshot.heartbeat_of(node)
    return [] if beat is not None and beat.leaving else [RequestStop(node.id, node.attempt)]


def _may_store(tick: Tick, node: Node, *, is_affordable: bool) -> bool:
    """Whether a node may still store state that would be lost with it."""
    if node.role is not Role.TRAINER or not node.may_be_working:
        return False
    beat = tick.snapshot.trainer
    since_s = max(node.since_s, tick.snapshot.trainer_moved_at_s) if is_affordable else node.since_s
    if node.phase is NodePhase.DRAINING and tick.waited_s(since_s) > STOP_WAIT_S:
        return False
    return beat is not None and beat.node == node.id and tick.silent_s(beat.beat_at_s) < HEARTBEAT_LOST_S
