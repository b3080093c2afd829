"""A run for which no rollout node can be had parks: its trainer stores what it has and its machine goes back. From
then on one rollout node is asked for now and then; once its machine is there, so is the trainer's asked for again.

A node's work is seen by the gateway, which stands beside the trainer: so it is the machine that counts here.
"""

from __future__ import annotations

from policies.control.fleet.markets import market_of
from policies.control.fleet.own_generation import own_generation_pays
from policies.control.fleet.probing import may_probe
from policies.control.fleet.size import GENERATES, hourly_prices
from policies.control.fleet.spending import reach_cap
from policies.control.fleet.stand_ins import is_open, is_spot_too_dear, may_be_bought
from policies.control.fleet.where import excess_again, is_paid_for
from policies.control.observed import HEARTBEAT_FRESH_S, MACHINE_LOST_S
from policies.control.snapshot import Trainer
from policies.control.tick import Tick
from policies.fleet.parking import idle_limit_s
from policies.model import exit_codes
from policies.model.buying import MachineKind
from policies.model.phases import UNTRAINED_ROLLBACK
from policies.model.spec import stores_checkpoints
from policies.model.state import Node
from policies.model.vocabulary import Market, NodePhase, Role, RunPhase, kind_of

# With these a trainer has ended as it should, or for what another attempt on its machine would not mend.
ENDED = frozenset(
    {exit_codes.OK, exit_codes.STOPPED, exit_codes.FENCED, exit_codes.DIVERGED, exit_codes.OUT_OF_MEMORY}
)


def steer_parking(tick: Tick) -> None:
    """Park a run whose trainer waits for nothing, and have a parked one go on."""
    if tick.state.phase is RunPhase.TRAINING:
        _park(tick)
    elif tick.state.phase is RunPhase.PARKED:
        _unpark(tick)
        _end_unpaid(tick)


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


def _park(tick: Tick) -> None:
    node = _waiting_trainer(tick)
    since_s = tick.state.rolloutless_since_s
    if node is None or since_s is None or not _nothing_to_be_had(tick):
        return
    trainer_usd = hourly_prices(tick.state).beside_usd_per_h
    boot_s = tick.state.kinds.get(node.kind, MachineKind()).boot_s
    limit_s = idle_limit_s(
        tick.spec.policies.boot_timeout_s if boot_s is None else boot_s, trainer_usd, _node_usd_per_h(tick)
    )
    # As it lost its last node it may have had a step's training to do.
    trained_s = 0.0 if tick.snapshot.step_shape is None else tick.snapshot.step_shape.fixed_s
    idle_s = tick.silent_s(max(since_s, node.since_s)) - trained_s
    if idle_s < limit_s or own_generation_pays(tick, limit_s):
        return
    cost = f", which cost {trainer_usd * idle_s / 3600:.2f} USD" if trainer_usd else ""
    waited = f"no rollout node can be had, and the trainer has waited for {idle_s / 60:.0f} min{cost}"
    tick.move_run(RunPhase.PARKED, f"{waited}, as much as its restart: its machine goes back until one can be had")
    tick.move(node, NodePhase.DRAINING, "the run parks: asked to store what it has, and to end")


def _unpark(tick: Tick) -> None:
    nodes = tick.state.nodes.values()
    there = [one for one in tick.state.live(Role.ROLLOUT) if one.phase in (NodePhase.BOOTING, NodePhase.SERVING)]
    if not there or any(one.role is Role.TRAINER for one in nodes):
        return
    parked_s = tick.waited_s(tick.state.parked_at_s or tick.snapshot.now_s)
    why = f"{there[0].id} has a machine, after {parked_s / 60:.0f} min of being parked"
    tick.move_run(RunPhase.STARTING, f"{why}: the trainer's is asked for again")


def _end_unpaid(tick: Tick) -> None:
    """End a parked run that has not the money left to go on, on any market: it would wait for ever, or buy a node
    and then not the trainer's machine."""
    if tick.state.phase is not RunPhase.PARKED or not may_probe(tick.state):
        return
    markets = [market_of(Role.ROLLOUT, tick.spec), *([Market.ON_DEMAND] if is_open(tick) else [])]
    whys = [excess_again(tick, market) for market in markets]
    if all(whys):
        reach_cap(tick, f"there is not the money to go on: {whys[0]}")


def _waiting_trainer(tick: Tick) -> Node | None:
    """The trainer's node, if all it does is wait for rollout nodes, and what it has trained can be stored."""
    state, trainers = tick.state, tick.state.live(Role.TRAINER)
    if len(trainers) != 1 or tick.snapshot.machines is None or not stores_checkpoints(tick.spec):
        return None
    if state.rollback is not None and state.rollback.stage in UNTRAINED_ROLLBACK:
        return None
    if state.diverged is not None and tick.spec.policies.kl.action != "alert":
        return None  # which is answered first
    node = trainers[0]
    beat = tick.snapshot.heartbeat_of(node)
    works = node.phase is NodePhase.SERVING and node.attempt_ended_at_s is None
    return node if works and beat is not None and _only_waits(tick, beat) else None


def _only_waits(tick: Tick, beat: Trainer) -> bool:
    fresh = tick.silent_s(beat.beat_at_s) < HEARTBEAT_FRESH_S
    return fresh and beat.activity in GENERATES and beat.timeline == tick.state.timeline and not beat.leaving


def _nothing_to_be_had(tick: Tick) -> bool:
    """Whether rollout nodes are refused, or come to nothing, again and again on each market where they may be
    bought. A launch that takes long is no lack of machines."""
    asked = {one.kind for one in tick.state.live(Role.ROLLOUT)}
    if not is_spot_too_dear(tick):
        asked.add(kind_of(Role.ROLLOUT, market_of(Role.ROLLOUT, tick.spec)))
    # That there was no money for one once says nothing: what had taken it may be gone.
    if may_be_bought(tick) and is_paid_for(tick, Role.ROLLOUT, Market.ON_DEMAND):
        asked.add(kind_of(Role.ROLLOUT, Market.ON_DEMAND))
    return all(tick.state.kinds.get(kind, MachineKind()).fails for kind in asked)


def _node_usd_per_h(tick: Tick) -> float:
    """The most that a rollout node may cost; 0: not known."""
    kind = kind_of(Role.ROLLOUT, market_of(Role.ROLLOUT, tick.spec))
    return (tick.snapshot.prices or {}).get(kind, 0.0)
