"""A run that is asked to stop: its trainer is given the time to store what it has; all else goes at once.

The trainer needs no rollout node for that: it leaves the step that it is in and saves the end of the one before.
"""

from __future__ import annotations

from policies.control.observed import HEARTBEAT_LOST_S
from policies.control.snapshot import AskToStop, Snapshot
from policies.control.tick import Tick
from policies.model.phases import LIVE_NODE
from policies.model.state import Node, RunState
from policies.model.vocabulary import NodePhase, Role, RunPhase

# What a checkpoint of the largest models takes into a store of 1 GB/s, with room: weights and optimizer of a model
# with 32 billion parameters are 384 GB, stored in 384 s.
STOP_WAIT_S = 900.0
DOWN = "down"
DOWN_NOW = "down_now"  # also where another `down` is being waited for


def release_machines(tick: Tick) -> None:
    """Let every machine of a run go that is over or is asked to stop, and see when all are gone."""
    for node in list(tick.state.nodes.values()):
        if node.phase not in LIVE_NODE:
            continue
        if tick.state.phase is RunPhase.STOPPING and _may_store(tick, node):
            if node.phase is not NodePhase.DRAINING:
                tick.move(node, NodePhase.DRAINING, "asked to store what it has, and to end")
            continue
        tick.move(node, NodePhase.TERMINATING, f"the run is {tick.state.phase}")
    machines = tick.snapshot.machines
    if tick.state.phase is RunPhase.STOPPING and not tick.state.nodes and not machines and machines is not None:
        tick.move_run(RunPhase.STOPPED, "every machine is gone")


def stop_at_once(tick: Tick) -> None:
    """Let every machine go without waiting for what it may be storing."""
    for node in list(tick.state.nodes.values()):
        if node.phase in LIVE_NODE:
            tick.move(node, NodePhase.TERMINATING, "asked to stop at once")


def stop_requests(state: RunState, node: Node, snapshot: Snapshot) -> list[AskToStop]:
    """What asks the node's trainer to end, until it says that it does."""
    if state.phase is not RunPhase.STOPPING or node.role is not Role.TRAINER:
        return []
    if node.phase is not NodePhase.DRAINING or node.attempt_ended_at_s is not None:
        return []
    beat = snapshot.trainer
    heard = beat is not None and (beat.node, beat.attempt) == (node.id, node.attempt) and beat.leaving
    return [] if heard else [AskToStop(node.id, node.attempt)]


def _may_store(tick: Tick, node: Node) -> bool:
    """Whether a node may still bring into the store what would be lost with it."""
    if node.role is not Role.TRAINER or node.phase not in (NodePhase.SERVING, NodePhase.DRAINING):
        return False
    if node.attempt_ended_at_s is not None:
        return False
    beat = tick.snapshot.trainer
    if node.phase is NodePhase.DRAINING and tick.waited_s(node.since_s) > STOP_WAIT_S:
        return False
    return beat is not None and beat.node == node.id and tick.silent_s(beat.beat_at_s) < HEARTBEAT_LOST_S
