"""Reconcile: decide the events that bring the fleet to what the plan wants.

Releases come first, in one order for all nodes. Requests follow: the trainer, rollout nodes, and on-demand nodes
that replace unavailable spot. Each request is checked against the market (`Offers`) and the budget (`Spending`)
and then added to both, so the cost per request stays constant in a burst of thousands.

The trainer comes first, because rollout nodes are useless without it. None is requested until a trainer has
trained, or was about to, so a broken configuration fails on one machine instead of the whole fleet. After that
they are requested as soon as the trainer has a machine: it loads the model in about the time that a node starts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import islice

from grpo_orch.policies.fleet.budget import PRICES_UNKNOWN, Spending, caps_of
from grpo_orch.policies.fleet.market import POOLS_UNKNOWN, Offers, market_of
from grpo_orch.policies.fleet.objective import rollouts_wanted
from grpo_orch.policies.fleet.plan import Allocation, wanted_slots
from grpo_orch.policies.model.breaker import BACK_OFF_MAX_EXTRA_S, SPOT_STABLE_S
from grpo_orch.policies.model.events import BudgetReached, BudgetRefused, FleetSized, NodeMoved, NodeRequested
from grpo_orch.policies.model.phases import FILLING_NODE, LIVE_RUN
from grpo_orch.policies.model.state import Node
from grpo_orch.policies.model.vocabulary import Market, NodePhase, Role, RunPhase, kind_of, node_id_of
from grpo_orch.policies.tick.draft import Tick
from grpo_orch.policies.tick.snapshot import GENERATES

SPOT_RETRY_S = 2 * BACK_OFF_MAX_EXTRA_S  # spot is requested at least this often, where it is requested at all
RETURN_WAIT_MAX_S = 900.0  # a surplus node waits this long for the trainer to stop generating; then requests move


def reconcile(wanted: Allocation, market: Offers, tick: Tick) -> None:
    """Decide the changes that bring a live run's fleet to `wanted`."""
    _Reconciler(wanted, market, tick).run()


def release_order(node: Node) -> tuple[int, bool, float, float]:
    """Sort key for releases: first nodes that do not serve, then those with a rebalance recommendation, the most
    expensive, the newest."""
    phase_rank = (NodePhase.REQUESTED, NodePhase.BOOTING, NodePhase.SERVING).index(node.phase)
    return phase_rank, not node.rebalance_recommended, -node.price_usd_per_h, -node.requested_at_s


class _Reconciler:
    """The nodes as this tick's releases and requests leave them."""

    def __init__(self, wanted: Allocation, market: Offers, tick: Tick) -> None:
        self.wanted, self.market, self.tick, self.spec = wanted, market, tick, tick.spec
        self.rollouts = len([node for node in self._filling() if node.role is Role.ROLLOUT])

    def run(self) -> None:
        wanted, tick = self.wanted, self.tick
        if wanted.stop_reason:
            self._stop(wanted.stop_reason)
            return
        if wanted.park_reason:
            tick.move_run(RunPhase.PARKED, wanted.park_reason)
            for node in tick.state.live(Role.TRAINER):
                tick.move(node, NodePhase.DRAINING, "the run parks: the trainer is storing its state")
            return
        if wanted.size_reason:
            before = rollouts_wanted(tick.state, self.spec)
            text = f"{wanted.spot} rollout nodes instead of {before}: {wanted.size_reason}"
            tick.emit(FleetSized(wanted.spot, before, wanted.size_reason), text)
        self._release()
        # The first request takes the money under a cap: spot's, unless spot has just refused.
        spot = self.market.kind(Role.ROLLOUT, Market.SPOT)
        is_refused = spot.refused_in_a_row > 0 and tick.waited_s(spot.failed_at_s) < SPOT_RETRY_S
        for is_fallback in (True, False) if is_refused else (False, True):
            if tick.state.phase in LIVE_RUN:
                self._request(is_fallback=is_fallback)

    def _filling(self) -> list[Node]:
        return [node for node in self.tick.state.nodes.values() if node.phase in FILLING_NODE]

    def _rollouts(self, *, is_fallback: bool) -> list[Node]:
        """The rollout nodes that replace unavailable spot, or those on the market that run.yaml names."""
        return [node for node in self._filling() if node.role is Role.ROLLOUT and node.is_fallback is is_fallback]

    # Releases.

    def _release(self) -> None:
        """Release the surplus: nodes that work only between generations, or after a long wait."""
        state, snapshot = self.tick.state, self.tick.snapshot
        if snapshot.machines is None:  # it is unknown which machines still exist
            return
        if self.wanted.release_reason:
            for node in state.live(Role.ROLLOUT):
                self._release_node(node, self.wanted.release_reason)
            return
        fallback, spot = self._rollouts(is_fallback=True), self._rollouts(is_fallback=False)
        surplus: list[Node] = []
        for nodes, count in ((fallback, self.wanted.on_demand), (spot, self.wanted.spot)):
            surplus += sorted(nodes, key=release_order)[: len(nodes) - count] if len(nodes) > count else []
        beat = snapshot.trainer
        is_idle = beat is not None and beat.activity not in GENERATES
        may_release_serving = is_idle or self.tick.waited_s(state.size.at_s) > RETURN_WAIT_MAX_S
        for node in sorted(surplus, key=release_order):
            if node.phase is not NodePhase.SERVING or may_release_serving:
                self._release_node(node, self._release_reason(node, len(spot)))

    def _release_reason(self, node: Node, spot: int) -> str:
        if node.is_fallback and self.wanted.retries_spot:
            return "returned so that spot fits under `budget.usd_per_h`; spot is requested again"
        if node.is_fallback:
            return f"spot has been stable for {SPOT_STABLE_S:.0f} s"
        price = f" at {node.price_usd_per_h:.2f} USD/h" if node.price_usd_per_h else ""
        return f"returned{price}: {self.wanted.spot} of {spot} nodes make a step cheapest"

    def _release_node(self, node: Node, reason: str) -> None:
        moved = NodeMoved(node.id, NodePhase.TERMINATING, reason, is_released=True)
        self.tick.emit(moved, f"{node.id} {NodePhase.TERMINATING}: {reason}")
        self.rollouts -= node.phase in FILLING_NODE

    # Requests.

    def _request(self, *, is_fallback: bool) -> None:
        """Request on-demand nodes that replace spot, or the trainer and nodes on their own market."""
        roles = [Role.ROLLOUT] if is_fallback or self.wanted.parked else list(Role)  # the trainer first
        if not self._is_trainer_ready():
            roles.remove(Role.ROLLOUT)
        slots = {role: self._open_slots(role, is_fallback=is_fallback) for role in roles}
        if not any(slots.values()):
            return
        if not self.market.are_pools_known:
            self.tick.reasons.append(POOLS_UNKNOWN)
            return
        spending = self._spending()
        if self.wanted.parked and is_fallback:  # reserve the money for the trainer, which will be requested again
            self.market.reserve_trainer(spending)
        for role, names in slots.items():
            market = Market.ON_DEMAND if is_fallback else market_of(role, self.spec)
            allowed = self.market.launches_allowed(role, market)
            for index, name in enumerate(names):
                if index >= allowed:
                    break
                if not self._buy(spending, role, name, market, is_fallback=is_fallback):
                    return

    def _open_slots(self, role: Role, *, is_fallback: bool) -> list[str]:
        """Return the slots to fill now.

        With on-demand nodes, one more spot node than `replicas.max` is allowed, so spot can prove itself and
        replace one.
        """
        present = [node for node in self._filling() if node.role is role and node.is_fallback is is_fallback]
        if role is Role.TRAINER:
            wanted = 1
        elif self.wanted.release_reason or (self.wanted.parked and self.rollouts):
            wanted = 0
        elif is_fallback:
            wanted = self.wanted.on_demand
        else:
            wanted, fallback = self.wanted.spot, self._rollouts(is_fallback=True)
            if fallback:
                wanted = min(wanted, self.spec.rollout.replicas.max - len(fallback) + 1)
        taken = {node.slot for node in present}
        slots = (name for of_role, name, _ in wanted_slots(self.spec) if of_role is role and name not in taken)
        return list(islice(slots, max(0, wanted - len(present))))

    def _is_trainer_ready(self) -> bool:
        """Whether rollout nodes may be requested: a trainer has trained, and its machine works or will.

        A parked run requests the trainer's machine only after the rollout node's.
        """
        state = self.tick.state
        if not state.is_proved or self.wanted.parked:
            return state.is_proved
        kinds = state.kinds.items()
        fails = any(kind.never_serves for name, kind in kinds if name.startswith(Role.TRAINER))
        return any(node.served or not fails for node in state.trainer_machines)

    def _buy(self, spending: Spending, role: Role, name: str, market: Market, *, is_fallback: bool) -> bool:
        """Request a node for the slot in the best pool. Return False if the budget refused it."""
        kind, terms = kind_of(role, market), self.market.terms(role, market, spending)
        if refusal := spending.refusal(role, kind, terms.usd_per_h):
            self._refuse(role, kind, terms.usd_per_h, refusal, is_fallback=is_fallback)
            return False
        state = self.tick.state
        before = state.slots.get(name, 0)
        node, incarnation = node_id_of(name, before + 1), before + 1
        notes = ["first" if not before else f"replaces {node_id_of(name, before)}"]
        if is_fallback:
            problem = "too expensive" if self.wanted.spot_too_expensive else "unavailable"
            notes.append(f"on demand, because spot is {problem}")
        elif role is Role.ROLLOUT:
            wanted = rollouts_wanted(state, self.spec) if self.wanted.parked else self.wanted.spot
            notes.append(f"{self.rollouts + 1} of {wanted} rollout nodes")
        notes += [spending.summary, "" if terms.choice is None else terms.choice.sentence]
        reason = "; ".join(note for note in notes if note)
        max_usd, disk_usd = terms.machine_usd_per_h or 0.0, terms.disk_usd_per_h
        event = NodeRequested(
            node, role, name, incarnation, market, reason, max_usd, terms.pool, is_fallback, disk_usd
        )
        self.tick.emit(event, f"{node} requested ({reason})")
        self.rollouts += role is Role.ROLLOUT
        spending.add(role, terms.usd_per_h or 0.0)
        self.market.add(role, terms)
        return True

    # The budget.

    def _spending(self, nodes: Iterable[Node] | None = None) -> Spending:
        return Spending(self.tick.state, self.tick.snapshot, self.spec, nodes)

    def _stop(self, reason: str) -> None:
        reached = BudgetReached(self._spending().spent_usd, reason)
        self.tick.emit(reached, f"budget: {reason}")
        self.tick.move_run(RunPhase.STOPPING, f"the budget is reached: {reason}")

    def _refuse(self, role: Role, kind: str, usd_per_h: float | None, reason: str, *, is_fallback: bool) -> None:
        """Handle a machine that the budget refuses: the run waits, continues without it, or stops.

        It waits while prices are unknown, and while leaving machines free the money for the new one. It continues
        without a fallback node. For a trainer, rollout nodes are returned until its maximum price fits under the
        hourly cap, and requested again once its actual price is known. Without a trainer, or any rollout node, the
        run stops.
        """
        nodes, staying = self.tick.state.nodes.values(), self._filling()
        leaving = len(nodes) - len(staying)
        is_draining = any(node.role is Role.ROLLOUT and node.phase is NodePhase.DRAINING for node in nodes)
        may_lack = is_fallback or (role is Role.ROLLOUT and self.wanted.spot_too_expensive)
        refused = BudgetRefused(kind if may_lack else f"{role}", reason)
        if reason == PRICES_UNKNOWN:
            self.tick.reasons.append(reason)
        elif usd_per_h is None:
            self.tick.report(refused, f"no more {refused.role} machines: {reason}")
        elif leaving and not self._spending(staying).excess_with(role, usd_per_h):
            self.tick.reasons.append(f"{role} waits for {leaving} machines to leave: {reason}")
        elif role is Role.TRAINER and (released := self._nodes_over_cap(usd_per_h)):
            for node in released:
                self._release_node(node, f"the trainer's machine comes first: {reason}")
        elif not may_lack and (role is Role.TRAINER or not (self.rollouts or is_draining)):
            self._stop(reason)
        else:
            self.tick.report(refused, f"no more {refused.role} machines: {reason}")

    def _nodes_over_cap(self, trainer_usd_per_h: float) -> list[Node]:
        """Return rollout nodes to release, the most expensive first, for a trainer to fit under the hourly cap.

        Empty if that would not suffice.
        """
        state, snapshot, spec = self.tick.state, self.tick.snapshot, self.spec
        nodes, found = sorted(self._filling(), key=lambda node: -node.usd_per_h), list[Node]()
        total = Spending(state, snapshot, spec, nodes, replace(caps_of(state, spec), usd_per_h=None))
        spending = self._spending(nodes)
        for node in nodes if not total.excess_with(Role.TRAINER, trainer_usd_per_h) else ():
            if node.role is Role.ROLLOUT:
                spending.add(node.role, -node.usd_per_h)
                found.append(node)
                if not spending.excess_with(Role.TRAINER, trainer_usd_per_h):
                    return found
        return []
