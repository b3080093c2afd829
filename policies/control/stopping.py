"""A run that is asked to stop, or parks: its trainer gets the time to store what it has; all else goes at once.

The trainer needs no rollout node for that: it leaves its present step and saves the end of the one before.
"""

from __future__ import annotations

from policies.control.observed import HEARTBEAT_LOST_S, MACHINE_LOST_S
from policies.fleet.budget import STOP_WAIT_S
from policies.model import exit_codes
from policies.model.phases import LIVE_NODE, UNTRAINED_ROLLBACK
from policies.model.state import Node, RunState
from policies.model.vocabulary import NodePhase, Role, RunPhase
from policies.tick.draft import Tick
from policies.tick.snapshot import AskToStop, Snapshot

REPORTED_USD_MIN = 0.01  # of which it is worth a word
DOWN = "down"
# With these a trainer has ended as it should, or for what another attempt on its machine would not mend.
ENDED = frozenset(
    {exit_codes.OK, exit_codes.STOPPED, exit_codes.FENCED, exit_codes.DIVERGED, exit_codes.OUT_OF_MEMORY}
)
DOWN_NOW = "down_now"  # even while a `down` is being waited for


def release_machines(tick: Tick, *, affordable: bool) -> None:
    """Release every machine of a run that is over or asked to stop, and note when all are gone.

    `affordable`: a trainer that stores may do so for longer than STOP_WAIT_S, as long as it gets on.
    """
    for node in list(tick.state.nodes.values()):
        if node.phase not in LIVE_NODE:
            continue
        if tick.state.phase is RunPhase.STOPPING and _may_store(tick, node, affordable=affordable):
            if node.phase is not NodePhase.DRAINING:
                tick.move(node, NodePhase.DRAINING, "asked to store what it has, and to end")
            continue
        tick.move(node, NodePhase.TERMINATING, f"the run is {tick.state.phase}")
    machines = tick.snapshot.machines
    if tick.state.phase is RunPhase.STOPPING and not tick.state.nodes and not machines and machines is not None:
        paused = tick.state.money.is_reached and tick.spec.budget.at == "pause"
        why = tick.state.reason if tick.state.money.is_reached else "every machine is gone"
        if (unspent_usd := tick.state.money.unspent_usd) >= REPORTED_USD_MIN:
            bought_nothing = f"{unspent_usd:.2f} USD of that were counted for requests that bought nothing"
            why = f"{why}; {bought_nothing}: `grpo-orch resume` goes on with them"
        tick.move_run(RunPhase.PAUSED if paused else RunPhase.STOPPED, why)


def drain_parked(tick: Tick, node: Node) -> None:
    """Return the parked trainer's machine once all is stored; it stays while that may still be done, heard or not.

    What the trainer has sealed and not stored lies on its machine. If it breaks over that, it is begun again
    there, which stores it first, and the run goes on.
    """
    if node.attempt_ended_at_s is None:
        if tick.silent_s(node.since_s) > MACHINE_LOST_S:
            tick.move(node, NodePhase.TERMINATING, f"has not ended for {MACHINE_LOST_S:.0f} s, though told to")
        return
    code = tick.snapshot.exit_code_of(node)
    rollback = tick.state.rollback
    rolls_back = rollback is not None and rollback.stage in UNTRAINED_ROLLBACK
    if code in ENDED or code is None or rolls_back or tick.state.phase is not RunPhase.PARKED:
        tick.move(node, NodePhase.TERMINATING, "drained: its work has ended")
        return
    why = f"its trainer ended with exit code {code} before all was stored"
    tick.move(node, NodePhase.BOOTING, why)
    tick.restart(tick.state.nodes[node.id], f"begun again: {why}")
    tick.move_run(RunPhase.STARTING, f"not parked: {why}")


def stop_at_once(tick: Tick) -> None:
    """Release every machine without waiting for what it may be storing."""
    for node in list(tick.state.nodes.values()):
        if node.phase in LIVE_NODE:
            tick.move(node, NodePhase.TERMINATING, "asked to stop at once")


def stop_requests(state: RunState, node: Node, snapshot: Snapshot) -> list[AskToStop]:
    """Return what asks the node's trainer to end, until it says that it will."""
    if state.phase not in (RunPhase.STOPPING, RunPhase.PARKED) or node.role is not Role.TRAINER:
        return []
    if node.phase is not NodePhase.DRAINING or node.attempt_ended_at_s is not None:
        return []
    beat = snapshot.heartbeat_of(node)
    return [] if beat is not None and beat.leaving else [AskToStop(node.id, node.attempt)]


def _may_store(tick: Tick, node: Node, *, affordable: bool) -> bool:
    """Whether a node may still store what would be lost with it."""
    if node.role is not Role.TRAINER or not node.may_be_working:
        return False
    beat = tick.snapshot.trainer
    since_s = max(node.since_s, tick.snapshot.trainer_moved_at_s) if affordable else node.since_s
    if node.phase is NodePhase.DRAINING and tick.waited_s(since_s) > STOP_WAIT_S:
        return False
    return beat is not None and beat.node == node.id and tick.silent_s(beat.beat_at_s) < HEARTBEAT_LOST_S
