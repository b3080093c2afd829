"""How many nodes there should be, and which are asked for or let go now."""

from __future__ import annotations

from policies.events import NodeRequested
from policies.phases import LIVE_NODE, TERMINAL_RUN
from policies.spec import RunSpec
from policies.state import Slot
from policies.tick import Tick
from policies.vocabulary import Market, NodePhase, Role, RunPhase, node_id_of, slot_of

BACK_OFF_FIRST_S = 2.0
BACK_OFF_MAX_NEEDED_S = 15.0  # for nodes below `replicas.min`
BACK_OFF_MAX_EXTRA_S = 120.0  # for those above it

_FILLING = frozenset({NodePhase.REQUESTED, NodePhase.BOOTING, NodePhase.SERVING})


def market_of(role: Role, spec: RunSpec) -> Market:
    """Rollout nodes are bought on spot unless `use_spot: false`, the trainer on demand unless `use_spot: true`."""
    resources = spec.trainer.resources if role is Role.TRAINER else spec.rollout.resources
    spot = bool(resources.get("use_spot", role is Role.ROLLOUT))
    return Market.SPOT if spot else Market.ON_DEMAND


def wanted_slots(spec: RunSpec) -> list[tuple[Role, str, bool]]:
    """Every place to be filled: role, name, and whether the run needs it at once."""
    replicas = spec.rollout.replicas
    rollouts = [(Role.ROLLOUT, slot_of(Role.ROLLOUT, i), i < replicas.min) for i in range(replicas.max)]
    return [(Role.TRAINER, slot_of(Role.TRAINER, 0), True), *rollouts]


def back_off_s(slot: Slot, needed: bool) -> float:
    """Seconds to wait after the slot's last refusal: doubling, to a limit that the need sets."""
    if slot.refusals_in_a_row == 0:
        return 0.0
    most = BACK_OFF_MAX_NEEDED_S if needed else BACK_OFF_MAX_EXTRA_S
    return float(min(most, BACK_OFF_FIRST_S * 2 ** min(slot.refusals_in_a_row - 1, 10)))


def fill_slots(tick: Tick) -> None:
    """Request a node for every empty slot whose back-off is over; let overdue ones go."""
    if tick.state.phase in TERMINAL_RUN or tick.state.phase is RunPhase.STOPPING:
        _let_all_go(tick)
        return
    _replace_overdue(tick)
    for role, name, needed in wanted_slots(tick.spec):
        if any(node.slot == name and node.phase in _FILLING for node in tick.state.nodes.values()):
            continue
        slot = tick.state.slots.get(name, Slot())
        if tick.snapshot.now_s < slot.refused_at_s + back_off_s(slot, needed):
            continue
        _request(tick, role, name, slot)


def _request(tick: Tick, role: Role, name: str, slot: Slot) -> None:
    incarnation = slot.incarnations + 1
    reason = "first" if incarnation == 1 else f"in place of {node_id_of(name, slot.incarnations)}"
    node = node_id_of(name, incarnation)
    market = market_of(role, tick.spec)
    tick.emit(NodeRequested(node, role, name, incarnation, market, reason), f"{node} requested ({reason})")


def _replace_overdue(tick: Tick) -> None:
    limit_s = tick.spec.policies.boot_timeout_s
    for node in list(tick.state.nodes.values()):
        booting = node.phase in (NodePhase.REQUESTED, NodePhase.BOOTING) and node.attempt_ended_at_s is None
        if booting and tick.snapshot.now_s - node.since_s > limit_s:
            tick.move(node, NodePhase.TERMINATING, f"no work seen within {limit_s:.0f} s")


def _let_all_go(tick: Tick) -> None:
    for node in list(tick.state.nodes.values()):
        if node.phase in LIVE_NODE:
            tick.move(node, NodePhase.TERMINATING, f"the run is {tick.state.phase}")
    machines = tick.snapshot.machines
    if tick.state.phase is RunPhase.STOPPING and not tick.state.nodes and not machines and machines is not None:
        tick.move_run(RunPhase.STOPPED, "every machine is gone")
