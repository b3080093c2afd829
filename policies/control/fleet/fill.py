"""How many nodes there should be, and which are requested or released now.

The trainer comes first: rollout nodes can do nothing without it. Until one has trained, or been about to, none is
requested: what it cannot work with is found on one machine and not on all. From then on they are requested once
the trainer's machine is there; loading the model takes it about as long as a rollout node needs to start. When the
trainer's machine is lost and no other can be had, they are kept for as long as starting them again would take: so
waiting costs at most twice what the best choice would have. A parked run (`parking`) asks for one rollout node,
and for no trainer. Machines whose work does not come within its time are released and replaced.

On-demand nodes may fill the cap per hour while spot is unavailable, so that no spot machine fits any more. Now and
then one of them is released, and spot is requested before another is bought instead.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import replace
from functools import partial
from itertools import islice

from policies.control.fleet.deadline import course_now, is_behind
from policies.control.fleet.markets import market_of
from policies.control.fleet.probing import may_probe
from policies.control.fleet.size import may_go, return_surplus, rollouts_wanted, size_fleet
from policies.control.fleet.spending import Purse, caps_of, excess_with, may_go_on, refuse
from policies.control.fleet.stand_ins import is_spot_too_dear, missing, stand_ins_of, surplus
from policies.control.fleet.where import (
    POOLS_UNKNOWN,
    Crowds,
    Terms,
    another_pool,
    keep_for_trainer,
    may_choose,
    terms_of,
)
from policies.control.observed import HEARTBEAT_LOST_S, MACHINE_LOST_S
from policies.control.stopping import release_machines
from policies.control.tick import Tick
from policies.model.buying import (
    BACK_OFF_MAX_EXTRA_S,
    HELD_S,
    PROBE_MAX_S,
    REFUSALS,
    WORKS_S,
    MachineKind,
    back_off_s,
    probe_wait_s,
)
from policies.model.events import BuyingResumed, BuyingStopped, NodeRequested, RebalanceRecommended
from policies.model.phases import FILLING_NODE, TERMINAL_RUN
from policies.model.spec import RunSpec
from policies.model.state import Node, Slot
from policies.model.vocabulary import (
    Market,
    NodePhase,
    Refusal,
    Role,
    RunPhase,
    kind_of,
    node_id_of,
    slot_of,
)
from policies.serving import joining
from policies.serving.joining import Coming

HOLD_MIN_S = 300.0  # a machine for the trainer is often found again within minutes
BOOT_TIMEOUTS_MAX = 4.0  # a node may boot for so many, however many looks failed meanwhile
ASKED_S = 2 * BACK_OFF_MAX_EXTRA_S  # where spot may be asked at all, it is asked at least so often
STAYS_S = PROBE_MAX_S  # of which asking spot in vain, and the start of another in its place, is a few percent


def wanted_slots(spec: RunSpec) -> Iterator[tuple[Role, str, bool]]:
    """Every place that there may be: role, name, and whether the run needs it at once."""
    yield Role.TRAINER, slot_of(Role.TRAINER, 0), True
    for place in range(spec.rollout.replicas.max):
        yield Role.ROLLOUT, slot_of(Role.ROLLOUT, place), place < spec.rollout.replicas.min


def fill_slots(tick: Tick) -> None:
    """Request a node for every empty slot where one may help; release those that are overdue or idle."""
    if tick.state.phase in TERMINAL_RUN or tick.state.phase is RunPhase.STOPPING:
        release_machines(tick, affordable=may_go_on(tick))
        return
    _replace_overdue(tick)
    _release_idle(tick)
    _note_rebalance_recommendations(tick)
    size_fleet(tick)
    if tick.snapshot.machines is not None:  # else nobody knows which of them are still there
        return_surplus(tick)
    _judge_kinds(tick)
    _stand_in(tick)
    _fill(tick, _empty_slots(tick))


def _note_rebalance_recommendations(tick: Tick) -> None:
    """Journal each machine's rebalance recommendation once, unless its preemption notice is there already."""
    for machine in (tick.snapshot.machines or {}).values():
        node = tick.node(machine.node) if machine.rebalance_recommended else None
        if node is None or node.rebalance_recommended or node.phase not in (NodePhase.BOOTING, NodePhase.SERVING):
            continue
        record = None if node.pool is None else tick.state.pools.get(str(node.pool))
        count, taken = (record.rebalances, record.rebalances_taken) if record else (0, 0)
        reason = f"of {count} machines with one in {node.pool or 'its pool'}, the cloud took {taken}"
        text = f"{node.id} has a rebalance recommendation: {reason}"
        tick.emit(RebalanceRecommended(node.id, reason), text)


def _replace_overdue(tick: Tick) -> None:
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


def _release_idle(tick: Tick) -> None:
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


class _Buyer:
    """Requests machines. In a burst of thousands each costs the same: what they are decided by is looked up once,
    and each that is asked for is added."""

    def __init__(self, tick: Tick) -> None:
        self._tick, self._purse, self.crowds = tick, Purse(tick), Crowds(tick)

    def keeps_back(self, market: Market) -> None:
        """Count the most that a rollout node may cost on that market as spent."""
        terms = terms_of(self._tick, self.crowds, Role.ROLLOUT, market, lambda _: True)
        self._purse.add(Role.ROLLOUT, terms.usd_per_h or 0.0)

    def keeps_for_trainer(self) -> None:
        keep_for_trainer(self._tick, self._purse, self.crowds)

    def has_room(self, market: Market) -> bool:
        """Whether there is money for a rollout node on that market."""
        fits = partial(self._purse.fits, Role.ROLLOUT)
        usd_per_h = terms_of(self._tick, self.crowds, Role.ROLLOUT, market, fits).usd_per_h
        return usd_per_h is not None and fits(usd_per_h)

    def buys(self, role: Role, name: str, market: Market, *words: str, stand_in: bool = False) -> bool:
        """Request a node for the slot where it is best bought, because of `words`; False: there is no money for
        it, and what follows from that is done."""
        tick, purse, kind = self._tick, self._purse, kind_of(role, market)
        terms = terms_of(tick, self.crowds, role, market, partial(purse.fits, role))
        if why := purse.refusal(role, kind, terms.usd_per_h):
            why += ", though the deadline takes it" if stand_in and is_behind(tick) else ""
            elsewhere = stand_in or (role is Role.ROLLOUT and is_spot_too_dear(tick))
            refuse(tick, role, kind, terms.usd_per_h, why, stand_in=elsewhere)
            return False
        _request(tick, role, name, market, terms, *words, purse.words(), stand_in=stand_in)
        purse.add(role, terms.usd_per_h or 0.0)
        self.crowds.add(role, terms.where)
        return True


def _fill(tick: Tick, places: list[tuple[Role, str, bool]]) -> None:
    """Request nodes for the places that may be filled now."""
    if not places:
        return
    buyer, near, there = _Buyer(tick), _trainer_is_near(tick), _rollouts_there(tick)
    choosing = may_choose(tick)
    closed: set[Role] = set()  # one of these was not to be bought, and the others are needed no more than it was
    for role, name, needed in places:
        slot = tick.state.slots.get(name, Slot())
        if role in closed:
            continue
        market = market_of(role, tick.spec)
        kind = kind_of(role, market)
        waits = tick.waited_s(slot.refused_at_s) < back_off_s(slot.refusals_in_a_row, needed)
        if waits and not another_pool(tick, buyer.crowds, kind, slot.last_refusal):
            continue
        if (role is Role.ROLLOUT and not near) or _is_tried(tick, kind) or not _may_buy(tick, kind, needed):
            closed.add(role)
            continue
        if not choosing:
            tick.reasons.append(f"{name} {POOLS_UNKNOWN}")
            break
        there += role is Role.ROLLOUT
        counted = f"{there} of {rollouts_wanted(tick.state, tick.spec)} rollout nodes"
        if not buyer.buys(role, name, market, "" if role is Role.TRAINER else counted):
            break


def _stand_in(tick: Tick) -> None:
    """Buy rollout nodes on demand while spot cannot be had, and return them once spot has held."""
    for node in stand_ins_of(tick.state)[: surplus(tick)]:
        if node.phase is not NodePhase.SERVING or may_go(tick):
            tick.move(node, NodePhase.TERMINATING, f"spot has held for {HELD_S:.0f} s")
    if _lacks_spot(tick):
        _make_room(tick)
    kind = kind_of(Role.ROLLOUT, Market.ON_DEMAND)
    failed = tick.state.kinds.get(kind, MachineKind())
    needed = tick.state.phase is not RunPhase.PARKED
    if tick.waited_s(failed.failed_at_s) < back_off_s(failed.refused_in_a_row, needed):
        return
    if not (count := missing(tick)):
        return
    buyer, near = _Buyer(tick), _trainer_is_near(tick)
    if not needed:  # a parked run, which it would have the trainer bought for again
        buyer.keeps_for_trainer()
    spot_first = needed and _lacks_spot(tick) and not _is_spot_asked(tick) and buyer.has_room(Market.SPOT)
    if spot_first:
        buyer.keeps_back(Market.SPOT)
    late = "the run is behind its deadline" if is_behind(tick) else ""
    if not near or not may_choose(tick):
        return
    lacks = "is too dear" if is_spot_too_dear(tick) else "cannot be had"
    for name in list(islice(_free(tick.spec, {node.slot for node in stand_ins_of(tick.state)}), count)):
        if not _may_buy(tick, kind, needed):
            return
        if spot_first and not buyer.has_room(Market.ON_DEMAND):
            tick.reasons.append("spot is asked before another node on demand takes the room for it")
            return
        words = (f"on demand, for spot {lacks}", late)
        if not buyer.buys(Role.ROLLOUT, name, Market.ON_DEMAND, *words, stand_in=True):
            return


def _make_room(tick: Tick) -> None:
    """Return a node on demand, if a spot machine would fit under the cap an hour in its place: not while machines
    come or go, nor before each has served for STAYS_S, nor where the deadline hangs on the only one."""
    there = stand_ins_of(tick.state)
    if not there or not _may_make_room(tick, there) or not may_go(tick):
        return
    nodes = list(tick.state.nodes.values())
    others = [one for one in nodes if one.id != there[0].id]
    if not _has_room(tick, nodes) and _has_room(tick, others):
        why = "spot is asked again, for which `budget.usd_per_h` had no room"
        tick.move(there[0], NodePhase.TERMINATING, why)


def _may_make_room(tick: Tick, there: list[Node]) -> bool:
    if caps_of(tick.state, tick.spec).usd_per_h is None or tick.state.phase is not RunPhase.TRAINING:
        return False
    if tick.snapshot.pools is None or tick.snapshot.prices is None or _spot(tick).comes_and_fails:
        return False
    rollouts = [one for one in tick.state.nodes.values() if one.role is Role.ROLLOUT]
    if len(rollouts) == 1 and (course := course_now(tick)) is not None and not course.is_safe:
        return False
    settled = all(one.phase is NodePhase.SERVING for one in rollouts)
    return settled and all(tick.waited_s(one.since_s) >= STAYS_S for one in there)


def _has_room(tick: Tick, nodes: list[Node]) -> bool:
    """Whether there would be money for a spot machine beside these."""

    def fits(usd_per_h: float) -> bool:
        return not excess_with(tick, Role.ROLLOUT, usd_per_h, nodes)

    usd_per_h = terms_of(tick, Crowds(tick), Role.ROLLOUT, Market.SPOT, fits).usd_per_h
    return usd_per_h is not None and fits(usd_per_h)


def _is_spot_asked(tick: Tick) -> bool:
    """Whether spot is being asked, or has refused lately: only then may a node on demand take its room."""
    kind = kind_of(Role.ROLLOUT, Market.SPOT)
    asked = any(one.kind == kind and one.phase is NodePhase.REQUESTED for one in tick.state.nodes.values())
    spot = _spot(tick)
    return asked or (spot.refused_in_a_row > 0 and tick.waited_s(spot.failed_at_s) < ASKED_S)


def _spot(tick: Tick) -> MachineKind:
    return tick.state.kinds.get(kind_of(Role.ROLLOUT, Market.SPOT), MachineKind())


def _lacks_spot(tick: Tick) -> bool:
    return any(role is Role.ROLLOUT for role, _, _ in _empty_slots(tick))


def _empty_slots(tick: Tick) -> list[tuple[Role, str, bool]]:
    """The places to be filled now: role, name, and whether the run needs it at once."""
    if tick.state.phase is RunPhase.PARKED:
        asks = may_probe(tick.state) and not is_spot_too_dear(tick)
        return [(Role.ROLLOUT, slot_of(Role.ROLLOUT, 0), False)] if asks else []
    nodes = [node for node in tick.state.nodes.values() if node.phase in FILLING_NODE and not node.stand_in]
    filled = {node.slot: node.role for node in nodes}
    rollouts, others = sum(role is Role.ROLLOUT for role in filled.values()), len(stand_ins_of(tick.state))
    # One beside those that stand in, so that spot can show that it holds and the next of them can go.
    most = tick.spec.rollout.replicas.max - others + (others > 0)
    missing = max(0, min(most, rollouts_wanted(tick.state, tick.spec)) - rollouts)
    needed = max(0, tick.spec.rollout.replicas.min - rollouts - others)
    trainer = slot_of(Role.TRAINER, 0)
    trainers = [] if trainer in filled else [(Role.TRAINER, trainer, True)]
    places = islice(_free(tick.spec, filled), missing)
    return [*trainers, *((Role.ROLLOUT, name, place < needed) for place, name in enumerate(places))]


def _free(spec: RunSpec, taken: Container[str]) -> Iterator[str]:
    """The rollout nodes' places that are not taken; found one by one, for there may be thousands."""
    return (name for role, name, _ in wanted_slots(spec) if role is Role.ROLLOUT and name not in taken)


def _rollouts_there(tick: Tick) -> int:
    return sum(one.role is Role.ROLLOUT and one.phase in FILLING_NODE for one in tick.state.nodes.values())


def _request(
    tick: Tick, role: Role, name: str, market: Market, terms: Terms, *words: str, stand_in: bool = False
) -> None:
    slot = tick.state.slots.get(name, Slot())
    incarnation = slot.incarnations + 1
    before = "first" if incarnation == 1 else f"in place of {node_id_of(name, slot.incarnations)}"
    node = node_id_of(name, incarnation)
    place, pool = ("", None) if terms.where is None else (terms.where.words, terms.where.offer.pool)
    reason = "; ".join(part for part in (before, *words, place) if part)
    most_usd, disk_usd = terms.machine_usd_per_h or 0.0, terms.disk_usd_per_h
    event = NodeRequested(node, role, name, incarnation, market, reason, most_usd, pool, stand_in, disk_usd)
    tick.emit(event, f"{node} requested ({reason})")


def _trainer_is_near(tick: Tick) -> bool:
    """Whether the trainer has a machine on which it works, or will: what it cannot work with is known. A parked
    run asks for the trainer's once it has another."""
    if not tick.state.proved or tick.state.phase is RunPhase.PARKED:
        return tick.state.proved
    fails = any(kind.never_serves for name, kind in tick.state.kinds.items() if name.startswith(Role.TRAINER))
    return any(node.served or not fails for node in tick.state.trainer_machines)


def _is_tried(tick: Tick, name: str) -> bool:
    """Whether as many machines of a kind that never served are tried as would stop its buying: an image that does
    not work costs so many, however large the fleet is to be."""
    kind = tick.state.kinds.get(name, MachineKind())
    if kind.served or kind.stopped:
        return False
    coming = [one for one in tick.state.nodes.values() if one.kind == name and one.phase in FILLING_NODE]
    return len(coming) + kind.unserved_in_a_row >= REFUSALS


def _may_buy(tick: Tick, name: str, needed: bool) -> bool:
    """Whether machines of the kind are bought; of one whose buying has stopped, one at a time, now and then."""
    kind = tick.state.kinds.get(name, MachineKind())
    if not kind.stopped:
        return True
    if any(one.kind == name and _is_probe(one, kind) for one in tick.state.nodes.values()):
        return False
    return _elsewhere(tick, name, kind) or tick.waited_s(kind.failed_at_s) >= probe_wait_s(kind, needed)


def _elsewhere(tick: Tick, name: str, kind: MachineKind) -> bool:
    """Whether what fails is one pool after the other, and one is left."""
    return not kind.never_serves and another_pool(tick, Crowds(tick), name, kind.last_refusal)


def _is_probe(node: Node, kind: MachineKind) -> bool:
    """Whether it tests its kind: until it serves or, where machines soon broke, for as long as it lasts."""
    if kind.broke_in_a_row >= REFUSALS and node.requested_at_s >= kind.stopped_at_s:
        return node.phase in FILLING_NODE
    return node.phase in (NodePhase.REQUESTED, NodePhase.BOOTING) and not node.served


def _judge_kinds(tick: Tick) -> None:
    """Stop buying kinds that fail again and again, and resume buying those that no longer do."""
    for name, kind in list(tick.state.kinds.items()):
        if kind.fails and not kind.stopped and not _elsewhere(tick, name, kind):
            reason = f"{kind.failures_in_a_row} in a row came to nothing: {kind.last_failure}"
            tick.emit(BuyingStopped(name, reason), f"no more machines, {name}: {reason}")
        elif kind.stopped and (not kind.fails or _works_again(tick, name, kind)):
            tick.emit(BuyingResumed(name), f"machines are bought again, {name}")


def _works_again(tick: Tick, name: str, kind: MachineKind) -> bool:
    """Whether a kind that was stopped for machines that soon broke has one that lasts."""
    serving = [one for one in tick.state.nodes.values() if one.kind == name and one.phase is NodePhase.SERVING]
    stays = any(tick.waited_s(max(one.since_s, kind.failed_at_s)) > WORKS_S for one in serving)
    return stays and not replace(kind, broke_in_a_row=0).fails
