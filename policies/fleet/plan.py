"""Plan the fleet: choose what the run should have now, by the objective in `policies.fleet.objective`.

Three questions are answered by comparing a few candidates each:

- how many nodes to run if spot is available;
- how many on-demand nodes replace unavailable spot;
- whether a trainer without rollout nodes waits or parks.

`replicas` limits the candidates. A run that has reached its budget gets no machines here; single purchases are
checked against the budget in `policies.fleet.reconcile`. This module requests nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from grpo_orch.policies.costs.steps import HourlyPrices, StepShape
from grpo_orch.policies.fleet.budget import Spending, are_set, caps_of
from grpo_orch.policies.fleet.market import LOSSES_PER_H, Offers, market_of, may_fall_back
from grpo_orch.policies.fleet.objective import (
    NOISE_SHARE,
    Candidate,
    Comparison,
    candidate_counts,
    compare,
    compare_sizes,
    hourly_prices,
    rollouts_wanted,
    size_summary,
)
from grpo_orch.policies.model.breaker import PROBE_MAX_S, SPOT_STABLE_S
from grpo_orch.policies.model.phases import FILLING_NODE, UNTRAINED_ROLLBACK
from grpo_orch.policies.model.spec import Budget, RunSpec, stores_checkpoints
from grpo_orch.policies.model.state import Node, RunState
from grpo_orch.policies.model.vocabulary import Market, NodePhase, Role, RunPhase, kind_of, slot_of
from grpo_orch.policies.tick.snapshot import GENERATES, HEARTBEAT_FRESH_S, Snapshot

WAIT_MIN_S = 60.0  # a shorter run of refusals is no shortage
IDLE_MIN_S = 300.0  # a machine is often available again within minutes, and returning one takes about as long
SIZE_SETTLE_S = 600.0  # after a change of size: a node takes that long to start and to show in the next steps
# An on-demand node serves this long before spot is retried; a failed try costs a few %.
FALLBACK_MIN_S = PROBE_MAX_S
BOOT_S = 300.0  # of a rollout node, before one has served
NOT_MEASURED, NOT_PRICED = "no steps are measured yet", "prices are not known"
UNMEASURED = StepShape(3600.0, 0.0)  # before any measurement: one node is enough, more do not help
WAIT, PARK = "a waiting trainer", "parking"


@dataclass(frozen=True, slots=True)
class Allocation:
    """The machines that the run should have, and why."""

    spot: int = 0  # rollout nodes on the market that run.yaml names for them
    on_demand: int = 0  # rollout nodes that replace unavailable spot
    parked: str = ""  # what a parked run waits for: it has no trainer, and requests one node, the first available
    size_reason: str = ""  # why `spot` changed
    park_reason: str = ""  # why the run parks and returns the trainer's machine too
    release_reason: str = ""  # why all rollout nodes are returned
    retries_spot: bool = False  # return an on-demand node to make room for spot under the cap
    spot_too_expensive: bool = False  # for the budget
    stop_reason: str = ""  # why the budget stops the run
    comparisons: tuple[Comparison, ...] = ()

    @property
    def sentence(self) -> str:
        """The plan as one sentence; empty while nothing was compared."""
        reason = self.stop_reason or self.park_reason or self.release_reason or self.parked
        return reason or (self.comparisons[-1].sentence if self.comparisons else "")


def wanted_slots(spec: RunSpec) -> Iterator[tuple[Role, str, bool]]:
    """Yield every slot that the run may have: role, name, and whether the run needs it immediately."""
    yield Role.TRAINER, slot_of(Role.TRAINER, 0), True
    for index in range(spec.rollout.replicas.max):
        yield Role.ROLLOUT, slot_of(Role.ROLLOUT, index), index < spec.rollout.replicas.min


def plan(market: Offers, state: RunState, snapshot: Snapshot, spec: RunSpec) -> Allocation:
    """Return what a live run should have now."""
    if caps_of(state, spec).usd is not None and (reason := Spending(state, snapshot, spec).exceeded()):
        return Allocation(stop_reason=reason)
    return _Planner(market, state, snapshot, spec).plan()


class _Planner:
    """The run's fleet in this tick, and the comparisons of what it could be."""

    def __init__(self, market: Offers, state: RunState, snapshot: Snapshot, spec: RunSpec) -> None:
        self.market, self.state, self.snapshot, self.spec = market, state, snapshot, spec
        self.replicas, self.own_market = spec.rollout.replicas, market_of(Role.ROLLOUT, spec)
        self.is_parked = state.phase is RunPhase.PARKED
        rollouts = [node for node in state.nodes.values() if node.role is Role.ROLLOUT]
        self.filling = [node for node in rollouts if node.phase in FILLING_NODE]
        self.fallback = [node for node in self.filling if node.is_fallback]
        self.spot = [node for node in self.filling if not node.is_fallback]
        stable_s = snapshot.now_s - SPOT_STABLE_S
        serving = [node for node in self.spot if node.phase is NodePhase.SERVING]
        self.stable = len([node for node in serving if node.since_s <= stable_s])
        self.wanted = rollouts_wanted(state, spec)
        self.shape, self.prices = snapshot.step_shape, hourly_prices(state)
        # Of an on-demand rollout node: the average seen, else the maximum; 0: unknown.
        seen = [node.on_demand_usd_per_h for node in self.filling if node.on_demand_usd_per_h > 0]
        most_usd = market.max_usd_per_h(Role.ROLLOUT, Market.ON_DEMAND)
        self.on_demand_usd = sum(seen) / len(seen) if seen else most_usd
        self.spot_usd = min(self.prices.node_usd_per_h, self.on_demand_usd)
        # On demand may replace spot if run.yaml allows it, and spot machines do not fail to serve. While a parked
        # run is refused spot, no spot machine can show that they serve again, so on demand is tried.
        kind = market.kind(Role.ROLLOUT, Market.SPOT)
        may_serve = not kind.never_serves or (self.is_parked and kind.refused_in_a_row > 0)
        is_priced = self.is_parked or self.prices.other_usd_per_h > 0  # a parked run has no trainer with a price
        self.may_fall_back = may_fall_back(spec) and self.on_demand_usd > 0 and may_serve and is_priced
        # A first node fits the budget on demand but not on spot: waiting for spot would not help.
        self.is_spot_too_expensive = (
            self.may_fall_back
            and not self.spot
            and bool(self.refusal(Market.SPOT))
            and not self.refusal(Market.ON_DEMAND)
        )

    def plan(self) -> Allocation:
        present = Allocation(
            spot=len(self.spot),
            on_demand=len(self.fallback),
            release_reason=self.release_reason(),
            spot_too_expensive=self.is_spot_too_expensive,
        )
        if self.is_parked:
            return self.parked(present)
        sized, (on_demand, shortage), idle = self.size(), self.on_demand(), self.idle_trainer()
        size = self.wanted if sized is None or not sized.horizon_s else sized.best.spot
        retries_spot = on_demand >= len(self.fallback) and self.retries_spot()
        return replace(
            present,
            spot=size,
            on_demand=len(self.fallback) - 1 if retries_spot else on_demand,
            size_reason=self.size_reason(sized) if sized is not None and size != self.wanted else "",
            park_reason=self.park_reason(idle) if idle is not None and idle.best.name == PARK else "",
            retries_spot=retries_spot,
            comparisons=tuple(compared for compared in (sized, shortage, idle) if compared is not None),
        )

    def waited_s(self, since_s: float) -> float:
        return self.snapshot.now_s - since_s

    # How many nodes to run, if spot is available.

    def size(self) -> Comparison | None:
        """Compare sizes of the fleet; None before steps are measured and prices known."""
        if self.shape is None or not self.prices.known or self.replicas.min >= self.replicas.max:
            return None
        sized_s = math.inf if self.state.size.nodes is None else self.waited_s(self.state.size.at_s)
        lifetime_s = 3600 / LOSSES_PER_H[self.own_market]
        return compare_sizes(
            self.shape,
            self.prices,
            self.own_market,
            self.wanted,
            (max(1, self.replicas.min), self.replicas.max),
            self.market.start_s(Role.ROLLOUT, self.own_market),
            min(sized_s, lifetime_s) if sized_s >= SIZE_SETTLE_S else 0.0,  # 0: the last change has not settled
            [node.price_usd_per_h for node in self.spot if node.price_usd_per_h > 0],
            self.market.next_usd_per_h(Role.ROLLOUT, self.own_market),
        )

    def size_reason(self, sized: Comparison) -> str:
        assert self.shape is not None
        return f"{sized.sentence}; {size_summary(self.shape, self.prices)}"

    # How many on-demand nodes replace unavailable spot.

    def on_demand(self) -> tuple[int, Comparison | None]:
        """Compare numbers of on-demand nodes: fewer next to stable spot nodes, or more in a shortage.

        Fewer, but not while the cloud does not answer: it is unknown which machines still exist. More, once the
        shortage has lasted a minute.
        """
        count = len(self.fallback)
        present = len([node for node in self.spot if node.phase is not NodePhase.REQUESTED])
        if count and self.stable and self.snapshot.machines is not None:
            fewer = range(min(count, max(0, self.replicas.max - self.stable)) + 1)
            found = self.compare_mixes("return on demand", self.stable, fewer, SPOT_STABLE_S)
            if found.best.on_demand < count:
                return found.best.on_demand, found
        if (horizon_s := self.shortage_s(present)) < WAIT_MIN_S:
            return count, None
        # With k nodes on spot at q an hour, j on demand at p and P for everything else, a step costs
        # (P - k (p - q) + (k + j) p)(a + b/(k + j)): the formula of `policies.costs.steps` with a smaller P.
        other_usd = self.prices.other_usd_per_h - present * (self.on_demand_usd - self.spot_usd)
        prices, low = HourlyPrices(other_usd, self.on_demand_usd), max(1, self.needed(present) + present)
        totals = candidate_counts(self.shape or UNMEASURED, prices, low, max(low, self.replicas.max))
        more = [count, *(total - present for total in totals if total - present > count)]
        found = self.compare_mixes("shortage of spot", present, more, horizon_s)
        return max(found.best.on_demand, count), found

    def compare_mixes(self, question: str, spot: int, counts: Iterable[int], horizon_s: float) -> Comparison:
        """Compare `spot` spot nodes with each count of on-demand nodes.

        Another count than the present one costs its starts, or has to be cheaper by more than the measurement
        error: noise must not buy and return nodes.
        """
        present, needed, shape = len(self.fallback), self.needed(spot), self.shape or UNMEASURED
        spot_usd = self.prices.other_usd_per_h + spot * self.spot_usd
        start_usd = self.on_demand_usd * self.fallback_boot_s() / 3600
        noise_usd = NOISE_SHARE * (spot_usd + present * self.on_demand_usd) * horizon_s / 3600
        candidates = [
            Candidate(
                name=_mix_name(spot, count),
                usd_per_h=spot_usd + count * self.on_demand_usd,
                # A smaller fleet than run.yaml's minimum makes no step.
                step_s=shape.seconds(spot + count) if spot + count >= max(1, self.replicas.min) else None,
                change_usd=(count - present) * start_usd if count >= present else noise_usd,
                spot=spot,
                on_demand=count,
            )
            for count in dict.fromkeys(counts)
            if count >= min(needed, present)
        ]
        return compare(question, candidates, horizon_s, unknown="" if self.shape else NOT_MEASURED)

    def needed(self, spot: int) -> int:
        """Return how many on-demand nodes run.yaml's minimum needs in addition to `spot` nodes."""
        return max(0, max(1, self.replicas.min) - spot)

    def fallback_boot_s(self) -> float:
        """Seconds from a rollout node's request until it works, as last seen: on demand, else on spot."""
        kinds = [self.market.kind(Role.ROLLOUT, market) for market in (Market.ON_DEMAND, Market.SPOT)]
        return next((kind.boot_s for kind in kinds if kind.boot_s is not None), BOOT_S)

    def shortage_s(self, present: int) -> float:
        """Return for how long on-demand nodes would have helped a working trainer; 0: they would not, or may not.

        A shortage ends when a spot node is stable and none is refused. After that, a larger fleet, or a
        replacement for a broken machine, counts only from its request on.
        """
        kind, lifetime_s = self.market.kind(Role.ROLLOUT, Market.SPOT), 3600 / LOSSES_PER_H[Market.SPOT]
        trainers = [node for node in self.state.trainer_machines if node.phase is NodePhase.SERVING]
        since_s = self.state.shortages.spot_since_s
        if not trainers or not self.may_fall_back or present >= self.wanted:
            return 0.0
        if self.is_spot_too_expensive:
            return lifetime_s
        if since_s is None or kind.machines_never_work:
            return 0.0  # machines that never serve would not on another market either
        if self.stable and not kind.refused_in_a_row:
            requested_s = [node.requested_at_s for node in self.spot if node.phase is NodePhase.REQUESTED]
            since_s = max(since_s, min(requested_s, default=self.snapshot.now_s))
        return min(self.waited_s(max(since_s, trainers[0].since_s)), lifetime_s)

    def retries_spot(self) -> bool:
        """Whether to return an on-demand node because a spot machine fits under the cap only in its place.

        Not while machines start or leave, and not before each has served for FALLBACK_MIN_S.
        """
        if not self.fallback or len(self.spot) >= self.wanted:
            return False
        nodes = self.state.nodes.values()
        if any(node.role is Role.ROLLOUT and node.phase is not NodePhase.SERVING for node in nodes):
            return False
        if any(self.waited_s(node.since_s) < FALLBACK_MIN_S for node in self.fallback):
            return False
        if not self.market.launches_allowed(Role.ROLLOUT, Market.SPOT):
            return False
        returned = max(self.fallback, key=lambda node: node.usd_per_h)
        others = [node for node in nodes if node is not returned]
        spending = [Spending(self.state, self.snapshot, self.spec, nodes) for nodes in (None, others)]
        refused, refused_without = (self.market.refusal(Market.SPOT, money) for money in spending)
        return bool(refused) and not refused_without

    # What the budget covers.

    def refusal(self, market: Market, caps: Budget | None = None) -> str:
        """Return why the budget refuses one more rollout node next to the nodes that stay; empty: it does not.

        Rollout nodes without a machine do not count; the trainer that a parked run will request again does.
        """
        caps = caps or caps_of(self.state, self.spec)
        if not are_set(caps):
            return ""
        nodes = [
            node
            for node in self.state.nodes.values()
            if node.phase in FILLING_NODE and (node.role is Role.TRAINER or node.phase is not NodePhase.REQUESTED)
        ]
        spending = Spending(self.state, self.snapshot, self.spec, nodes, caps)
        if self.is_parked:
            self.market.reserve_trainer(spending)
        return self.market.refusal(market, spending)

    # A trainer without rollout nodes: it waits, or the run parks.

    def idle_trainer(self) -> Comparison | None:
        """Compare waiting and parking for a waiting trainer for which no market has a node."""
        node = self.waiting_trainer()
        if node is None or self.state.shortages.rollout_since_s is None or not self.is_nothing_available():
            return None
        # A restart costs the trainer's boot, during which the first rollout node waits. Where a price is unknown,
        # a node counts as much as the trainer, so the trainer waits longer before it parks.
        usd, node_usd = self.prices.other_usd_per_h, self.market.max_usd_per_h(Role.ROLLOUT, self.own_market)
        unknown, usd = ("", usd) if usd > 0 else (NOT_PRICED, 1.0)
        node_usd = usd if unknown or node_usd <= 0 else node_usd
        boot_s = self.market.start_s(Role.TRAINER, node.market)
        restart_usd = max(IDLE_MIN_S * usd, boot_s * (usd + node_usd)) / 3600
        candidates = [
            Candidate(PARK, 0.0, change_usd=restart_usd),
            Candidate(WAIT, usd),
        ]
        return compare("idle trainer", candidates, self.idle_s(node), unknown)

    def idle_s(self, node: Node) -> float:
        since_s = self.state.shortages.rollout_since_s or 0.0
        # It may have had a step to train when it lost its last node.
        trained_s = 0.0 if self.shape is None else self.shape.fixed_s
        return self.snapshot.silent_s(max(since_s, node.since_s)) - trained_s

    def waiting_trainer(self) -> Node | None:
        """Return the trainer's node if it only waits for rollout nodes and its progress can be stored."""
        state, trainers = self.state, self.state.live(Role.TRAINER)
        if state.phase is not RunPhase.TRAINING or len(trainers) != 1 or not stores_checkpoints(self.spec):
            return None
        if state.rollback is not None and state.rollback.stage in UNTRAINED_ROLLBACK:
            return None
        if state.diverged is not None and self.spec.policies.kl.action != "alert":
            return None  # the divergence is handled first
        node, beat = trainers[0], self.snapshot.heartbeat_of(trainers[0])
        is_working = node.phase is NodePhase.SERVING and node.attempt_ended_at_s is None
        if self.snapshot.machines is None or not is_working or beat is None or beat.leaving:
            return None
        is_waiting = beat.activity in GENERATES and beat.timeline == state.timeline
        return node if is_waiting and self.snapshot.silent_s(beat.beat_at_s) < HEARTBEAT_FRESH_S else None

    def is_nothing_available(self) -> bool:
        """Whether no rollout node has a machine, and requests keep failing on each market that may be used.

        A slow launch does not count as a failure.
        """
        live = self.state.live(Role.ROLLOUT)
        if any(node.phase is not NodePhase.REQUESTED for node in live):
            return False
        kinds = {node.kind for node in live}
        if not self.is_spot_too_expensive:
            kinds.add(kind_of(Role.ROLLOUT, self.own_market))
        # Checked now, not by an earlier refusal: the machines that had used up the budget may have left.
        if self.may_fall_back and not self.refusal(Market.ON_DEMAND):
            kinds.add(kind_of(Role.ROLLOUT, Market.ON_DEMAND))
        return all(kind in self.state.kinds and self.state.kinds[kind].fails for kind in kinds)

    def park_reason(self, idle: Comparison) -> str:
        usd = self.prices.other_usd_per_h
        cost = f", which cost {usd * idle.horizon_s / 3600:.2f} USD" if usd else ""
        waited = (
            f"no rollout node is available, and the trainer has waited for {idle.horizon_s / 60:.0f} min{cost}"
        )
        return f"{waited}, as much as a restart; its machine is returned until a node is available"

    # Rollout nodes that wait for a trainer.

    def release_reason(self) -> str:
        """Return why rollout nodes without a trainer are returned; empty: they are kept.

        They are kept for about as long as a start takes, because starting them again would cost that much. In a
        parked run, they wait for the trainer's old machine to leave.
        """
        since_s, nodes = self.state.shortages.trainer_since_s, self.state.live(Role.ROLLOUT)
        if self.is_parked:
            started = (NodePhase.BOOTING, NodePhase.SERVING)
            since_s = min((node.since_s for node in nodes if node.phase in started), default=None)
        if self.snapshot.machines is None or since_s is None or not nodes:
            return ""
        start_s = self.market.start_s(Role.ROLLOUT, self.own_market)
        limit_s = max(IDLE_MIN_S, min(start_s, self.spec.policies.boot_timeout_s))
        if self.snapshot.silent_s(since_s) <= limit_s:
            return ""
        if self.is_parked:
            return f"the trainer's old machine has not left for {limit_s:.0f} s; nodes are requested once it has"
        return f"the trainer has had no machine for {limit_s:.0f} s; nodes are requested once it has one"

    # A parked run.

    def parked(self, present: Allocation) -> Allocation:
        """Plan one rollout node, on spot and on demand in turn where both are allowed.

        Plan nothing while the old trainer drains, when the node could not be used. Stop the run if the budget
        allows it to continue on no market: it would wait forever, or buy a node and then not the trainer's
        machine.
        """
        trainers = [node for node in self.state.nodes.values() if node.role is Role.TRAINER]
        if self.state.live(Role.ROLLOUT) or trainers:
            text = "no rollout node is requested until the machines that are starting or leaving have settled"
            return replace(present, parked=f"parked: {text}")
        markets = [self.own_market, *([Market.ON_DEMAND] if self.may_fall_back else [])]
        caps = replace(caps_of(self.state, self.spec), usd_per_h=None)
        prices = [self.market.terms(Role.ROLLOUT, market).usd_per_h for market in markets]
        is_known = self.snapshot.prices is not None and None not in prices
        excesses = [self.refusal(market, caps) for market in markets] if is_known else []
        if excesses and all(excesses):
            return Allocation(stop_reason=f"the budget does not allow the run to continue: {excesses[0]}")
        spot, on_demand = (self.market.kind(Role.ROLLOUT, market) for market in (Market.SPOT, Market.ON_DEMAND))
        tries_own = not self.is_spot_too_expensive
        tries_other = self.may_fall_back and (spot.failed_at_s >= on_demand.failed_at_s or not tries_own)
        tried = [
            market for market, tries in ((self.own_market, tries_own), (Market.ON_DEMAND, tries_other)) if tries
        ]
        where = " or ".join("on spot" if market is Market.SPOT else "on demand" for market in tried)
        text = f"one rollout node is requested periodically, {where}"
        text += "; the trainer's machine follows once it has started"
        return replace(present, spot=int(tries_own), on_demand=int(tries_other), parked=f"parked: {text}")


def _mix_name(spot: int, on_demand: int) -> str:
    parts = [f"{spot} on spot" if spot else "", f"{on_demand} on demand" if on_demand else ""]
    return " and ".join(part for part in parts if part) or "waiting for spot"
