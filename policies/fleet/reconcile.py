"""Reconcile: find the events that bring the fleet to what the plan wants.

Releases come first, in one order for all nodes. Requests follow: the trainer, rollout nodes, and on-demand nodes
that replace unavailable spot. Each request is checked against the market (`Offers`) and the budget (`Spending`)
and then added to both, so the cost per request stays constant in a burst of thousands.

The trainer comes first, because rollout nodes are useless without it. None is requested until a trainer has
trained, or was about to, so a broken configuration fails on one machine instead of the whole fleet. After that
they are requested as soon as the trainer has a machine: it loads the model in about the time that a node starts.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Container, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import islice

from grpo_orch.policies.fleet.budget import PRICES_UNKNOWN, Caps, Spending
from grpo_orch.policies.fleet.market import POOLS_UNKNOWN, Offers, Terms, market_of
from grpo_orch.policies.fleet.objective import rollouts_wanted
from grpo_orch.policies.fleet.plan import Allocation, wanted_slots
from grpo_orch.policies.model.breaker import BACK_OFF_MAX_EXTRA_S, SPOT_STABLE_S
from grpo_orch.policies.model.events import (
    BudgetReached,
    BudgetRefused,
    Event,
    FleetSized,
    NodeMoved,
    NodeRequested,
    RunMoved,
)
from grpo_orch.policies.model.phases import FILLING_NODE
from grpo_orch.policies.model.reports import is_news
from grpo_orch.policies.model.spec import RunSpec
from grpo_orch.policies.model.state import Node, RunState, Slot
from grpo_orch.policies.model.vocabulary import Market, NodePhase, Role, RunPhase, kind_of, node_id_of, slot_of
from grpo_orch.policies.tick.snapshot import GENERATES, Snapshot

SPOT_RETRY_S = 2 * BACK_OFF_MAX_EXTRA_S  # spot is requested at least this often, where it is requested at all
RETURN_WAIT_MAX_S = 900.0  # a surplus node waits this long for the trainer to stop generating; then requests move


@dataclass(slots=True)
class Changes:
    """Events to journal, each with its reason, and reasons why nothing is done."""

    events: list[tuple[Event, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, event: Event, reason: str) -> None:
        self.events.append((event, reason))

    def move(self, node: Node, phase: NodePhase, reason: str) -> None:
        self.add(NodeMoved(node.id, phase, reason), f"{node.id} {phase}: {reason}")

    def move_run(self, phase: RunPhase, reason: str, parked_s: float | None = None) -> None:
        self.add(RunMoved(phase, reason, parked_s), f"run {phase}: {reason}")


def reconcile(wanted: Allocation, market: Offers, state: RunState, snapshot: Snapshot, spec: RunSpec) -> Changes:
    """Return the changes that bring a live run's fleet to `wanted`."""
    return _Reconciler(wanted, market, state, snapshot, spec).run()


def release_order(node: Node) -> tuple[int, bool, float, float]:
    """Sort key for releases: first nodes that do not serve, then those with a rebalance recommendation, the most
    expensive, the newest."""
    phase_rank = (NodePhase.REQUESTED, NodePhase.BOOTING, NodePhase.SERVING).index(node.phase)
    return phase_rank, not node.rebalance_recommended, -node.price_usd_per_h, -node.requested_at_s


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
        self.fallback = {node.id: node for node in rollouts if node.is_fallback}
        self.spot = {
            node.id: node for node in rollouts if not node.is_fallback
        }  # on the market that run.yaml names
        self.requested: dict[str, int] = {}  # in this tick, by kind
        self.incarnations: dict[str, int] = {}  # requested in this tick, by slot
        self.is_parked = not wanted.trainer

    def run(self) -> Changes:
        wanted, state = self.wanted, self.state
        if wanted.stop_reason:
            self._stop(wanted.stop_reason)
            return self.found
        if wanted.park_reason:
            self._park(wanted.park_reason)
            return self.found
        if wanted.size_reason:
            before = rollouts_wanted(state, self.spec)
            text = f"{wanted.spot} rollout nodes instead of {before}: {wanted.size_reason}"
            self.found.add(FleetSized(wanted.spot, before, wanted.size_reason), text)
        self._release()
        # The first request takes the money under a cap: spot's, unless spot has just refused.
        if self._is_spot_refused():
            self._request_fallback()
            self._request_others()
        else:
            self._request_others()
            self._request_fallback()
        return self.found

    # Changes of the whole run.

    def _stop(self, reason: str) -> None:
        spending = Spending(self.state, self.snapshot, self.spec)
        self.found.add(BudgetReached(spending.spent_usd, reason, self.spec.budget.at), f"budget: {reason}")
        parked_at_s = self.state.parked_at_s
        parked_s = None if parked_at_s is None else self.snapshot.now_s - parked_at_s
        self.found.move_run(RunPhase.STOPPING, f"the budget is reached: {reason}", parked_s)

    def _park(self, reason: str) -> None:
        self.found.move_run(RunPhase.PARKED, reason)
        for node in self.state.live(Role.TRAINER):
            self.found.move(node, NodePhase.DRAINING, "the run parks: the trainer is storing its state")

    # Releases.

    def _release(self) -> None:
        if self.snapshot.machines is None:  # it is unknown which machines still exist
            return
        if self.wanted.release_reason:
            for node in self.state.live(Role.ROLLOUT):
                self._release_node(node, self.wanted.release_reason)
            return
        if self.is_parked:
            return
        fallback, spot = list(self.fallback.values()), list(self.spot.values())
        surplus = [*_surplus(fallback, self.wanted.on_demand), *_surplus(spot, self.wanted.spot)]
        may_release_serving = self._may_release_serving()
        for node in sorted(surplus, key=release_order):
            if node.phase is not NodePhase.SERVING or may_release_serving:
                self._release_node(node, self._release_reason(node, len(spot)))

    def _release_reason(self, node: Node, spot: int) -> str:
        if node.is_fallback and self.wanted.retries_spot:
            return "returned so that spot fits under `budget.usd_per_h`; spot is requested again"
        if node.is_fallback:
            return f"spot has been stable for {SPOT_STABLE_S:.0f} s"
        benefit = "meet the deadline" if self.spec.policies.fleet.deadline else "make a step cheapest"
        price = f" at {node.price_usd_per_h:.2f} USD/h" if node.price_usd_per_h else ""
        return f"returned{price}: {self.wanted.spot} of {spot} nodes {benefit}"

    def _release_node(self, node: Node, reason: str) -> None:
        moved = NodeMoved(node.id, NodePhase.TERMINATING, reason, is_released=True)
        self.found.add(moved, f"{node.id} {NodePhase.TERMINATING}: {reason}")
        for nodes in (self.filling, self.fallback, self.spot):
            nodes.pop(node.id, None)

    def _may_release_serving(self) -> bool:
        """Whether a serving node may leave: the trainer does not generate, or the node has waited long enough."""
        beat = self.snapshot.trainer
        is_idle = beat is not None and beat.activity not in GENERATES
        sized_s = 0.0 if self.wanted.size_reason else self.snapshot.now_s - self.state.size.at_s
        return is_idle or sized_s > RETURN_WAIT_MAX_S

    # Requests: the trainer, rollout nodes on their own market, and on-demand nodes instead of unavailable spot.

    def _is_spot_refused(self) -> bool:
        spot = self.market.kind(Role.ROLLOUT, Market.SPOT)
        return spot.refused_in_a_row > 0 and self.snapshot.now_s - spot.failed_at_s < SPOT_RETRY_S

    def _request_others(self) -> None:
        slots = self._open_slots()
        if not slots:
            return
        spending, is_trainer_ready = self._spending(), self._is_trainer_ready()
        closed: set[Role] = set()  # after one could not be bought, the role's later slots are skipped
        for role, name, needed in slots:
            market = market_of(role, self.spec)
            if role in closed:
                continue
            slot = self.state.slots.get(name, Slot())
            if self.market.is_backing_off(role, market, slot, needed=needed):
                continue
            if (role is Role.ROLLOUT and not is_trainer_ready) or not self._may_launch(role, market):
                closed.add(role)
                continue
            if not self.market.are_pools_known:
                self.found.notes.append(f"{name} {POOLS_UNKNOWN}")
                break
            note = "" if role is Role.TRAINER else self._count_note()
            if not self._buy(spending, role, name, market, note):
                break

    def _request_fallback(self) -> None:
        count = self.wanted.on_demand - len(self.fallback)
        if self.is_parked:
            own = market_of(Role.ROLLOUT, self.spec)
            count = int(Market.ON_DEMAND in self.wanted.probes and own is Market.SPOT and not self.requested)
        if count <= 0 or self.wanted.release_reason or self.market.is_fallback_backing_off():
            return
        if not self._is_trainer_ready():
            return
        spending = self._spending()
        if self.is_parked:  # reserve the money for the trainer, which will be requested again
            self.market.reserve_trainer(spending)
        if not self.market.are_pools_known:
            return
        problem = "is too expensive" if self.wanted.spot_too_expensive else "is unavailable"
        behind = "the run is behind its deadline" if self.wanted.is_behind else ""
        taken = {node.slot for node in self.fallback.values()}
        for name in list(islice(self._free_slots(taken), count)):
            if not self._may_launch(Role.ROLLOUT, Market.ON_DEMAND):
                return
            notes = f"on demand, because spot {problem}", behind
            if not self._buy(spending, Role.ROLLOUT, name, Market.ON_DEMAND, *notes, fallback=True):
                return

    def _open_slots(self) -> list[tuple[Role, str, bool]]:
        """The slots to fill now: role, name, and whether the run needs it immediately."""
        if self.is_parked:
            may_request = market_of(Role.ROLLOUT, self.spec) in self.wanted.probes and not self.requested
            return [(Role.ROLLOUT, slot_of(Role.ROLLOUT, 0), False)] if may_request else []
        trainer = slot_of(Role.TRAINER, 0)
        filled = {node.slot for node in self.filling.values() if not node.is_fallback}
        trainers = [] if trainer in filled else [(Role.TRAINER, trainer, True)]
        needed = max(0, self.spec.rollout.replicas.min - self._present)
        names = islice(self._free_slots(filled), self._spot_missing())
        return [*trainers, *((Role.ROLLOUT, name, index < needed) for index, name in enumerate(names))]

    def _spot_missing(self) -> int:
        """Return how many nodes to request on the market that run.yaml names.

        With on-demand nodes, one more than `replicas.max` is allowed, so spot can prove itself and replace one.
        """
        fallback = len(self.fallback) + self.requested.get(kind_of(Role.ROLLOUT, Market.ON_DEMAND), 0)
        if market_of(Role.ROLLOUT, self.spec) is Market.ON_DEMAND:
            fallback = 0
        max_spot = self.spec.rollout.replicas.max - fallback + (fallback > 0)
        return max(0, min(max_spot, self.wanted.spot) - len(self.spot))

    def _free_slots(self, taken: Container[str]) -> Iterator[str]:
        """Yield the rollout slots that are not taken; lazily, because there may be thousands."""
        return (name for role, name, _ in wanted_slots(self.spec) if role is Role.ROLLOUT and name not in taken)

    def _count_note(self) -> str:
        wanted = rollouts_wanted(self.state, self.spec) if self.is_parked else self.wanted.spot
        return f"{self._present + 1} of {wanted} rollout nodes"

    @property
    def _present(self) -> int:
        """Number of rollout nodes, those requested in this tick included."""
        requested = sum(count for kind, count in self.requested.items() if kind.startswith(Role.ROLLOUT))
        return len(self.fallback) + len(self.spot) + requested

    def _is_trainer_ready(self) -> bool:
        """Whether rollout nodes may be requested: a trainer has trained, and its machine works or will.

        A parked run requests the trainer's machine only after the rollout node's.
        """
        if not self.state.is_proved or self.is_parked:
            return self.state.is_proved
        kinds = self.state.kinds.items()
        fails = any(kind.never_serves for name, kind in kinds if name.startswith(Role.TRAINER))
        return any(node.served or not fails for node in self.state.trainer_machines)

    def _may_launch(self, role: Role, market: Market) -> bool:
        return self.market.launches_allowed(role, market) > self.requested.get(kind_of(role, market), 0)

    # One request.

    def _spending(self) -> Spending:
        """Spending with this tick's requests included."""
        spending = Spending(self.state, self.snapshot, self.spec)
        for event, _ in self.found.events:
            if isinstance(event, NodeRequested):
                spending.add(event.role, event.max_usd_per_h + event.disk_usd_per_h)
        return spending

    def _buy(
        self, spending: Spending, role: Role, name: str, market: Market, *notes: str, fallback: bool = False
    ) -> bool:
        """Request a node for the slot in the best pool. Return False if the budget refused it."""
        kind = kind_of(role, market)
        terms = self.market.terms(role, market, partial(spending.fits, role))
        if refusal := spending.refusal(role, kind, terms.usd_per_h):
            self._refuse(role, kind, terms.usd_per_h, refusal, fallback=fallback)
            return False
        self._request(role, name, market, terms, *notes, spending.summary, fallback=fallback)
        spending.add(role, terms.usd_per_h or 0.0)
        self.market.add(role, terms)
        return True

    def _request(self, role: Role, name: str, market: Market, terms: Terms, *notes: str, fallback: bool) -> None:
        before = self.incarnations.get(name, self.state.slots.get(name, Slot()).incarnations)
        incarnation = self.incarnations[name] = before + 1
        kind = kind_of(role, market)
        self.requested[kind] = self.requested.get(kind, 0) + 1
        replaced = "first" if incarnation == 1 else f"replaces {node_id_of(name, before)}"
        node, pool = node_id_of(name, incarnation), None if terms.choice is None else terms.choice.offer.pool
        reason = "; ".join(part for part in (replaced, *notes, terms.place) if part)
        max_usd, disk_usd = terms.machine_usd_per_h or 0.0, terms.disk_usd_per_h
        event = NodeRequested(node, role, name, incarnation, market, reason, max_usd, pool, fallback, disk_usd)
        self.found.add(event, f"{node} requested ({reason})")

    def _refuse(self, role: Role, kind: str, usd_per_h: float | None, reason: str, *, fallback: bool) -> None:
        """Handle a machine that the budget refuses: the run waits, continues without it, or stops.

        It waits while prices are unknown, and while leaving machines free the money for the new one. It continues
        without a fallback node. For a trainer, rollout nodes are returned until its maximum price fits under the
        hourly cap, and requested again once its actual price is known. Without a trainer, or any rollout node, the
        run stops.
        """
        staying = list(self.filling.values())
        spending = Spending(self.state, self.snapshot, self.spec, staying)
        leaving = len(self.state.nodes) - len(staying)
        reason += ", although the deadline needs it" if fallback and self.wanted.is_behind else ""
        fallback = fallback or (role is Role.ROLLOUT and self.wanted.spot_too_expensive)
        refused_kind = kind if fallback else f"{role}"
        if reason == PRICES_UNKNOWN:
            self.found.notes.append(reason)
        elif usd_per_h is not None and leaving and not spending.excess_with(role, usd_per_h):
            self.found.notes.append(f"{role} waits for {leaving} machines to leave: {reason}")
        elif (
            role is Role.TRAINER and usd_per_h is not None and (nodes := self._nodes_over_cap(usd_per_h, staying))
        ):
            for node in nodes:
                self._release_node(node, f"the trainer's machine comes first: {reason}")
        elif usd_per_h is not None and not fallback and (role is Role.TRAINER or not self._has_rollouts):
            self._stop(reason)
        elif is_news(self.state.reports, refused := BudgetRefused(refused_kind, reason)):
            self.found.add(refused, f"no more {refused_kind} machines: {reason}")

    @property
    def _has_rollouts(self) -> bool:
        nodes = self.state.nodes.values()
        is_draining = any(node.role is Role.ROLLOUT and node.phase is NodePhase.DRAINING for node in nodes)
        return is_draining or self._present > 0

    def _nodes_over_cap(self, trainer_usd_per_h: float, nodes: list[Node]) -> list[Node]:
        """Return rollout nodes to release, the most expensive first, for a trainer to fit under the hourly cap.

        Empty if that would not suffice.
        """
        total = Caps(Spending(self.state, self.snapshot, self.spec).caps.usd, None)
        if Spending(self.state, self.snapshot, self.spec, nodes, total).excess_with(
            Role.TRAINER, trainer_usd_per_h
        ):
            return []
        rollouts = sorted((node for node in nodes if node.role is Role.ROLLOUT), key=lambda node: -node.usd_per_h)
        others = [node for node in nodes if node.role is not Role.ROLLOUT]

        def fits_without(count: int) -> bool:
            spending = Spending(self.state, self.snapshot, self.spec, [*others, *rollouts[count:]])
            return not spending.excess_with(Role.TRAINER, trainer_usd_per_h)

        count = bisect_left(range(len(rollouts) + 1), True, lo=1, key=fits_without)  # monotonic
        return rollouts[:count] if count <= len(rollouts) else []
