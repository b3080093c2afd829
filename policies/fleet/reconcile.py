"""Reconcile: the events that bring the fleet from what it is to what the plan wants.

Releases come first, in one order for all nodes; then requests: the trainer, rollout nodes, and on-demand nodes
that replace unavailable spot. Each request is checked against the market (`Offers`) and the money (`Spending`), to
which it is added, so a burst of thousands costs the same for each.

The trainer comes first: rollout nodes can do nothing without it. Until one has trained, or been about to, none is
requested, so a broken configuration fails on one machine instead of the whole fleet. From then on they are
requested once the trainer's machine is there; loading the model takes it about as long as a node needs to start.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Container, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import islice

from policies.fleet.budget import PRICES_UNKNOWN, Caps, Spending
from policies.fleet.market import POOLS_UNKNOWN, Offers, Terms, market_of
from policies.fleet.objective import rollouts_wanted
from policies.fleet.plan import Allocation, wanted_slots
from policies.model.buying import BACK_OFF_MAX_EXTRA_S, SPOT_STABLE_S
from policies.model.events import (
    BudgetReached,
    BudgetRefused,
    Event,
    FleetSized,
    NodeMoved,
    NodeRequested,
    RunMoved,
)
from policies.model.phases import FILLING_NODE
from policies.model.reports import is_news
from policies.model.spec import RunSpec
from policies.model.state import Node, RunState, Slot
from policies.model.vocabulary import Market, NodePhase, Role, RunPhase, kind_of, node_id_of, slot_of
from policies.tick.snapshot import GENERATES, Snapshot

SPOT_RETRY_S = 2 * BACK_OFF_MAX_EXTRA_S  # where spot is asked at all, it is asked at least that often
RETURN_WAIT_MAX_S = 900.0  # a trainer that is always seen to generate keeps a node no longer: requests are handed on


@dataclass(slots=True)
class Changes:
    """What is to be journalled, each event with its reason, and reasons why nothing is done."""

    events: list[tuple[Event, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, event: Event, reason: str) -> None:
        self.events.append((event, reason))

    def move(self, node: Node, phase: NodePhase, reason: str) -> None:
        self.add(NodeMoved(node.id, phase, reason), f"{node.id} {phase}: {reason}")

    def move_run(self, phase: RunPhase, reason: str, parked_s: float | None = None) -> None:
        self.add(RunMoved(phase, reason, parked_s), f"run {phase}: {reason}")


def reconcile(wanted: Allocation, market: Offers, state: RunState, snapshot: Snapshot, spec: RunSpec) -> Changes:
    """Return what makes a live run's fleet the wanted one."""
    return _Reconciler(wanted, market, state, snapshot, spec).run()


def release_order(node: Node) -> tuple[int, bool, float, float]:
    """Sort nodes by who is released first: those that do not serve, those with a rebalance recommendation, the
    most expensive, the newest."""
    serves = (NodePhase.REQUESTED, NodePhase.BOOTING, NodePhase.SERVING).index(node.phase)
    return serves, not node.rebalance_recommended, -node.price_usd_per_h, -node.requested_at_s


def _surplus(nodes: list[Node], wanted: int) -> list[Node]:
    count = len(nodes) - wanted
    return sorted(nodes, key=release_order)[:count] if count > 0 else []


class _Reconciler:
    """The nodes as this tick's releases and requests leave them."""

    def __init__(
        self, wanted: Allocation, market: Offers, state: RunState, snapshot: Snapshot, spec: RunSpec
    ) -> None:
        self.wanted, self.market, self.state, self.snapshot, self.spec = wanted, market, state, snapshot, spec
        self.found = Changes()
        self.filling = {node.id: node for node in state.nodes.values() if node.phase in FILLING_NODE}
        rollouts = [node for node in self.filling.values() if node.role is Role.ROLLOUT]
        self.fallback = {node.id: node for node in rollouts if node.stand_in}
        self.spot = {node.id: node for node in rollouts if not node.stand_in}  # on the market that run.yaml names
        self.requested: dict[str, int] = {}  # how many of each kind in this tick
        self.incarnations: dict[str, int] = {}  # of slots that were
        self.is_parked = not wanted.trainer

    def run(self) -> Changes:
        wanted, state = self.wanted, self.state
        if wanted.stops:
            self._stop(wanted.stops)
            return self.found
        if wanted.parks:
            self._park(wanted.parks)
            return self.found
        if wanted.size_reason:
            before = rollouts_wanted(state, self.spec)
            text = f"{wanted.spot} rollout nodes in place of {before}: {wanted.size_reason}"
            self.found.add(FleetSized(wanted.spot, before, wanted.size_reason), text)
        self._release()
        # The first one to request takes the room under a cap: spot, unless it has just been asked in vain.
        if self._is_spot_refused():
            self._request_fallback()
            self._request_others()
        else:
            self._request_others()
            self._request_fallback()
        return self.found

    # What the whole run does.

    def _stop(self, why: str) -> None:
        spending = Spending(self.state, self.snapshot, self.spec)
        self.found.add(BudgetReached(spending.spent_usd, why, self.spec.budget.at), f"budget: {why}")
        parked_at_s = self.state.parked_at_s
        parked_s = None if parked_at_s is None else self.snapshot.now_s - parked_at_s
        self.found.move_run(RunPhase.STOPPING, f"the budget is reached: {why}", parked_s)

    def _park(self, why: str) -> None:
        self.found.move_run(RunPhase.PARKED, why)
        for node in self.state.live(Role.TRAINER):
            self.found.move(node, NodePhase.DRAINING, "the run parks: asked to store what it has, and to end")

    # Releases.

    def _release(self) -> None:
        if self.snapshot.machines is None:  # nobody knows which machines are still there
            return
        if self.wanted.releases:
            for node in self.state.live(Role.ROLLOUT):
                self._release_node(node, self.wanted.releases)
            return
        if self.is_parked:
            return
        fallback, spot = list(self.fallback.values()), list(self.spot.values())
        surplus = [*_surplus(fallback, self.wanted.on_demand), *_surplus(spot, self.wanted.spot)]
        calm = self._may_release_serving()
        for node in sorted(surplus, key=release_order):
            if node.phase is not NodePhase.SERVING or calm:
                self._release_node(node, self._release_reason(node, len(spot)))

    def _release_reason(self, node: Node, spot: int) -> str:
        if node.stand_in and self.wanted.retries_spot:
            return "spot is asked again, for which `budget.usd_per_h` had no room"
        if node.stand_in:
            return f"spot has held for {SPOT_STABLE_S:.0f} s"
        pays = "are enough in time" if self.spec.policies.fleet.deadline else "make a step cheapest"
        price = f" at {node.price_usd_per_h:.2f} USD/h" if node.price_usd_per_h else ""
        return f"returned{price}, one of {spot} where {self.wanted.spot} {pays}"

    def _release_node(self, node: Node, why: str) -> None:
        self.found.move(node, NodePhase.TERMINATING, why)
        for nodes in (self.filling, self.fallback, self.spot):
            nodes.pop(node.id, None)

    def _may_release_serving(self) -> bool:
        """Whether a node can go without handing on requests; or has waited for that for long enough."""
        beat = self.snapshot.trainer
        calm = beat is not None and beat.activity not in GENERATES
        sized_s = 0.0 if self.wanted.size_reason else self.snapshot.now_s - self.state.size.at_s
        return calm or sized_s > RETURN_WAIT_MAX_S

    # Requests: the trainer, rollout nodes on their own market, and on demand in place of unavailable spot.

    def _is_spot_refused(self) -> bool:
        spot = self.market.kind(Role.ROLLOUT, Market.SPOT)
        return spot.refused_in_a_row > 0 and self.snapshot.now_s - spot.failed_at_s < SPOT_RETRY_S

    def _request_others(self) -> None:
        places = self._places()
        if not places:
            return
        spending, near = self._spending(), self._is_trainer_ready()
        closed: set[Role] = set()  # one was not to be bought, and the others are needed no more than it was
        for role, name, needed in places:
            market = market_of(role, self.spec)
            if role in closed:
                continue
            slot = self.state.slots.get(name, Slot())
            if self.market.is_backing_off(role, market, slot, needed=needed):
                continue
            if (role is Role.ROLLOUT and not near) or not self._room(role, market):
                closed.add(role)
                continue
            if not self.market.are_pools_known:
                self.found.notes.append(f"{name} {POOLS_UNKNOWN}")
                break
            words = "" if role is Role.TRAINER else self._count_note()
            if not self._buy(spending, role, name, market, words):
                break

    def _request_fallback(self) -> None:
        count = self.wanted.on_demand - len(self.fallback)
        if self.is_parked:
            own = market_of(Role.ROLLOUT, self.spec)
            count = int(Market.ON_DEMAND in self.wanted.probes and own is Market.SPOT and not self.requested)
        if count <= 0 or self.wanted.releases or self.market.fallback_is_backing_off():
            return
        if not self._is_trainer_ready():
            return
        spending = self._spending()
        if self.is_parked:  # it must leave room for the trainer, which will be requested again
            self.market.reserve_trainer(spending)
        if not self.market.are_pools_known:
            return
        lacks = "is too expensive" if self.wanted.spot_too_expensive else "is unavailable"
        words = f"on demand, for spot {lacks}", "the run is behind its deadline" if self.wanted.is_behind else ""
        taken = {node.slot for node in self.fallback.values()}
        for name in list(islice(self._free(taken), count)):
            if not self._room(Role.ROLLOUT, Market.ON_DEMAND):
                return
            if not self._buy(spending, Role.ROLLOUT, name, Market.ON_DEMAND, *words, fallback=True):
                return

    def _places(self) -> list[tuple[Role, str, bool]]:
        """The slots to fill now: role, name, and whether the run needs it immediately."""
        if self.is_parked:
            asks = market_of(Role.ROLLOUT, self.spec) in self.wanted.probes and not self.requested
            return [(Role.ROLLOUT, slot_of(Role.ROLLOUT, 0), False)] if asks else []
        trainer = slot_of(Role.TRAINER, 0)
        filled = {node.slot for node in self.filling.values() if not node.stand_in}
        trainers = [] if trainer in filled else [(Role.TRAINER, trainer, True)]
        present = self._present
        needed = max(0, self.spec.rollout.replicas.min - present)
        names = islice(self._free(filled), self._spot_missing())
        return [*trainers, *((Role.ROLLOUT, name, place < needed) for place, name in enumerate(names))]

    def _spot_missing(self) -> int:
        """How many nodes are to be requested on the market that run.yaml names. One more than `replicas.max` with
        on-demand nodes, so that spot can show that it holds and the next of them can go."""
        fallback = len(self.fallback) + self.requested.get(kind_of(Role.ROLLOUT, Market.ON_DEMAND), 0)
        if market_of(Role.ROLLOUT, self.spec) is Market.ON_DEMAND:
            fallback = 0
        most = self.spec.rollout.replicas.max - fallback + (fallback > 0)
        return max(0, min(most, self.wanted.spot) - len(self.spot))

    def _free(self, taken: Container[str]) -> Iterator[str]:
        """The rollout slots that are not taken; found one by one, for there may be thousands."""
        return (name for role, name, _ in wanted_slots(self.spec) if role is Role.ROLLOUT and name not in taken)

    def _count_note(self) -> str:
        wanted = rollouts_wanted(self.state, self.spec) if self.is_parked else self.wanted.spot
        return f"{self._present + 1} of {wanted} rollout nodes"

    @property
    def _present(self) -> int:
        """Rollout nodes that are there or requested."""
        requested = sum(count for kind, count in self.requested.items() if kind.startswith(Role.ROLLOUT))
        return len(self.fallback) + len(self.spot) + requested

    def _is_trainer_ready(self) -> bool:
        """Whether the trainer has a machine on which it works, or will: what it cannot work with is known. A
        parked run requests the trainer's once it has another."""
        if not self.state.is_proved or self.is_parked:
            return self.state.is_proved
        kinds = self.state.kinds.items()
        fails = any(kind.never_serves for name, kind in kinds if name.startswith(Role.TRAINER))
        return any(node.served or not fails for node in self.state.trainer_machines)

    def _room(self, role: Role, market: Market) -> bool:
        return self.market.room(role, market) > self.requested.get(kind_of(role, market), 0)

    # One request.

    def _spending(self) -> Spending:
        """What is spent and runs, with what this tick has requested."""
        spending = Spending(self.state, self.snapshot, self.spec)
        for event, _ in self.found.events:
            if isinstance(event, NodeRequested):
                spending.add(event.role, event.most_usd_per_h + event.disk_usd_per_h)
        return spending

    def _buy(
        self, spending: Spending, role: Role, name: str, market: Market, *words: str, fallback: bool = False
    ) -> bool:
        """Request a node for the slot where it is best bought; False: there is no money for it, and what follows
        from that is done."""
        kind = kind_of(role, market)
        terms = self.market.terms(role, market, partial(spending.fits, role))
        if why := spending.refusal(role, kind, terms.usd_per_h):
            self._refuse(role, kind, terms.usd_per_h, why, fallback=fallback)
            return False
        self._request(role, name, market, terms, *words, spending.words, fallback=fallback)
        spending.add(role, terms.usd_per_h or 0.0)
        self.market.add(role, terms)
        return True

    def _request(self, role: Role, name: str, market: Market, terms: Terms, *words: str, fallback: bool) -> None:
        before = self.incarnations.get(name, self.state.slots.get(name, Slot()).incarnations)
        incarnation = self.incarnations[name] = before + 1
        kind = kind_of(role, market)
        self.requested[kind] = self.requested.get(kind, 0) + 1
        first = "first" if incarnation == 1 else f"in place of {node_id_of(name, before)}"
        node, pool = node_id_of(name, incarnation), None if terms.choice is None else terms.choice.offer.pool
        reason = "; ".join(part for part in (first, *words, terms.place) if part)
        most_usd, disk_usd = terms.machine_usd_per_h or 0.0, terms.disk_usd_per_h
        event = NodeRequested(node, role, name, incarnation, market, reason, most_usd, pool, fallback, disk_usd)
        self.found.add(event, f"{node} requested ({reason})")

    def _refuse(self, role: Role, kind: str, usd_per_h: float | None, why: str, *, fallback: bool) -> None:
        """A machine is not bought for lack of money: the run waits, goes on with what it has, or stops.

        It waits while machines leave whose money the new one may cost, and while no price is known. It goes on
        without a fallback node. A trainer comes before rollout nodes, which are returned for what it may cost an
        hour, and requested again next to what it does cost. Without a trainer, or any rollout node, it stops.
        """
        stay = list(self.filling.values())
        staying = Spending(self.state, self.snapshot, self.spec, stay)
        leave = len(self.state.nodes) - len(stay)
        why += ", though the deadline takes it" if fallback and self.wanted.is_behind else ""
        fallback = fallback or (role is Role.ROLLOUT and self.wanted.spot_too_expensive)
        what = kind if fallback else f"{role}"
        if why == PRICES_UNKNOWN:
            self.found.notes.append(why)
        elif usd_per_h is not None and leave and not staying.excess_with(role, usd_per_h):
            self.found.notes.append(f"{role} waits for {leave} machines to be gone: {why}")
        elif role is Role.TRAINER and usd_per_h is not None and (idle := self._nodes_over_cap(usd_per_h, stay)):
            for node in idle:
                self._release_node(node, f"the trainer's machine comes first: {why}")
        elif usd_per_h is not None and not fallback and (role is Role.TRAINER or not self._has_rollouts):
            self._stop(why)
        elif is_news(self.state.reports, refused := BudgetRefused(what, why)):
            self.found.add(refused, f"no more {what} machines: {why}")

    @property
    def _has_rollouts(self) -> bool:
        nodes = self.state.nodes.values()
        drains = any(node.role is Role.ROLLOUT and node.phase is NodePhase.DRAINING for node in nodes)
        return drains or self._present > 0

    def _nodes_over_cap(self, trainer_usd_per_h: float, nodes: list[Node]) -> list[Node]:
        """Return the rollout nodes, the most expensive first, without which the cap an hour has room for a
        trainer's machine; none where that is not all it takes."""
        total = Caps(Spending(self.state, self.snapshot, self.spec).caps.usd, None)
        if Spending(self.state, self.snapshot, self.spec, nodes, total).excess_with(Role.TRAINER, trainer_usd_per_h):
            return []
        rollouts = sorted((node for node in nodes if node.role is Role.ROLLOUT), key=lambda node: -node.usd_per_h)
        others = [node for node in nodes if node.role is not Role.ROLLOUT]

        def has_room(without: int) -> bool:
            stay = [*others, *rollouts[without:]]
            return not Spending(self.state, self.snapshot, self.spec, stay).excess_with(
                Role.TRAINER, trainer_usd_per_h
            )

        count = bisect_left(range(len(rollouts) + 1), True, lo=1, key=has_room)  # each that goes makes more room
        return rollouts[:count] if count <= len(rollouts) else []
