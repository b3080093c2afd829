"""Plan the fleet: choose what the run should have now, by the objective in `policies.fleet.objective`.

Five questions are answered by comparing a few candidates each:

- how many nodes to run if spot is available;
- how many on-demand nodes replace unavailable spot;
- whether to return those on-demand nodes;
- whether a trainer without rollout nodes waits, generates alone, or parks;
- whether rollout nodes without a trainer are kept.

`replicas` and the deadline limit the candidates. A run that has reached its budget gets no machines here; single
purchases are checked against the budget in `policies.fleet.reconcile`. This module requests nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from grpo_orch.policies.costs.steps import HourlyPrices, StepShape, best_count, step_usd
from grpo_orch.policies.fleet.budget import Spending, caps_of
from grpo_orch.policies.fleet.deadline import DeadlineProgress, deadline_progress, nodes_in_time
from grpo_orch.policies.fleet.deadline import boot_s as fallback_boot_s
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
    zones_of,
)
from grpo_orch.policies.model.breaker import PROBE_MAX_S, SPOT_STABLE_S
from grpo_orch.policies.model.loss import steps_of_generation
from grpo_orch.policies.model.phases import FILLING_NODE, UNTRAINED_ROLLBACK
from grpo_orch.policies.model.spec import RunSpec, processes_of, stores_checkpoints
from grpo_orch.policies.model.state import Node, RunState
from grpo_orch.policies.model.vocabulary import Market, NodePhase, Role, RunPhase, kind_of, slot_of
from grpo_orch.policies.tick.snapshot import GENERATES, HEARTBEAT_FRESH_S, Snapshot, Trainer

WAIT_MIN_S = 60.0  # a shorter run of refusals is no shortage
IDLE_MIN_S = 300.0  # a machine is often available again within minutes, and returning one takes about as long
SIZE_SETTLE_S = 600.0  # after a change of size: a node takes that long to start and to show in the next steps
# An on-demand node serves this long before spot is retried; a failed try costs a few %.
FALLBACK_MIN_S = PROBE_MAX_S
# Logged steps until a step with the trainer's own generation is measured: it ends at the next generation's row.
OWN_STEP_ROWS = 2
NOT_MEASURED, NOT_PRICED = "no steps are measured yet", "prices are not known"
UNMEASURED = StepShape(3600.0, 0.0)  # before any measurement: one node is enough, more do not help


@dataclass(frozen=True, slots=True)
class Allocation:
    """The machines that the run should have, and why."""

    trainer: bool = False
    spot: int = 0  # rollout nodes on the market that run.yaml names for them
    on_demand: int = 0  # rollout nodes that replace unavailable spot
    probes: tuple[Market, ...] = ()  # where a parked run requests its one node: the first market that is open
    size_reason: str = ""  # why `spot` changed
    park_reason: str = ""  # why the run parks and returns the trainer's machine too
    release_reason: str = ""  # why all rollout nodes are returned
    retries_spot: bool = False  # return an on-demand node to make room for spot under the cap
    spot_too_expensive: bool = False  # for the budget
    is_behind: bool = False  # behind the deadline's pace
    stop_reason: str = ""  # why the budget stops the run
    comparisons: tuple[Comparison, ...] = ()

    @property
    def sentence(self) -> str:
        """The plan as one sentence; empty while nothing was compared."""
        if reason := self.stop_reason or self.park_reason or self.release_reason:
            return reason
        if not self.trainer:
            return f"parked: {_probe_sentence(self.probes)}"
        return self.comparisons[-1].sentence if self.comparisons else ""


def _probe_sentence(probes: Sequence[Market]) -> str:
    if not probes:
        return "no rollout node is requested until the machines that are starting or leaving have settled"
    where = " or ".join("on spot" if market is Market.SPOT else "on demand" for market in probes)
    return (
        f"one rollout node is requested periodically, {where}; the trainer's machine follows once it has started"
    )


# The inputs of a plan.


def wanted_slots(spec: RunSpec) -> Iterator[tuple[Role, str, bool]]:
    """Yield every slot that the run may have: role, name, and whether the run needs it immediately."""
    yield Role.TRAINER, slot_of(Role.TRAINER, 0), True
    for index in range(spec.rollout.replicas.max):
        yield Role.ROLLOUT, slot_of(Role.ROLLOUT, index), index < spec.rollout.replicas.min


@dataclass(frozen=True)
class _Facts:
    """The run's fleet as the plan sees it. Each derived value is computed once."""

    market: Offers
    state: RunState
    snapshot: Snapshot
    spec: RunSpec
    spot: list[Node] = field(init=False, default_factory=list)
    fallback: list[Node] = field(init=False, default_factory=list)
    prices: HourlyPrices = field(init=False, default=HourlyPrices(0.0, 0.0))

    def __post_init__(self) -> None:
        for node in self.state.nodes.values():
            if node.role is Role.ROLLOUT and node.phase in FILLING_NODE:
                (self.fallback if node.is_fallback else self.spot).append(node)
        object.__setattr__(self, "prices", hourly_prices(self.state))

    @property
    def now_s(self) -> float:
        return self.snapshot.now_s

    @cached_property
    def progress(self) -> DeadlineProgress | None:
        return deadline_progress(self.state, self.spec, self.snapshot.trainer, self.now_s)

    @property
    def is_behind(self) -> bool:
        return self.progress is not None and self.progress.is_behind

    @cached_property
    def held(self) -> list[Node]:
        """Spot nodes that have served long enough to count as stable."""
        serving = [node for node in self.spot if node.phase is NodePhase.SERVING]
        return [node for node in serving if self.waited_s(node.since_s) >= SPOT_STABLE_S]

    @cached_property
    def on_demand_usd_per_h(self) -> float:
        """USD an hour of an on-demand rollout node: the average seen, else the maximum; 0: unknown."""
        live = [*self.spot, *self.fallback]
        seen = [node.on_demand_usd_per_h for node in live if node.on_demand_usd_per_h > 0]
        return sum(seen) / len(seen) if seen else self.market.max_usd_per_h(Role.ROLLOUT, Market.ON_DEMAND)

    @cached_property
    def may_use_both(self) -> bool:
        """Whether on demand may replace spot: run.yaml allows it, and spot machines do not fail to serve.

        While a parked run is refused spot, no spot machine can show that they serve again, so on demand is tried.
        """
        kind = self.market.kind(Role.ROLLOUT, Market.SPOT)
        is_unknown = self.state.phase is RunPhase.PARKED and kind.refused_in_a_row > 0
        return may_fall_back(self.spec) and self.on_demand_usd_per_h > 0 and (is_unknown or not kind.never_serves)

    @property
    def may_buy_fallback(self) -> bool:
        return self.may_use_both and self.prices.other_usd_per_h > 0

    @cached_property
    def is_spot_too_expensive(self) -> bool:
        """Whether a first node fits the budget on demand but not on spot. Waiting for spot would not help."""
        is_parked = self.state.phase is RunPhase.PARKED  # no trainer, whose price `may_buy_fallback` needs
        if not (self.may_use_both if is_parked else self.may_buy_fallback) or self.spot:
            return False
        if self.market.is_paid_for(Market.SPOT):
            return False
        return self.market.is_paid_for(Market.ON_DEMAND)

    def waited_s(self, since_s: float) -> float:
        return self.now_s - since_s


def plan(market: Offers, state: RunState, snapshot: Snapshot, spec: RunSpec) -> Allocation:
    """Return what a live run should have now."""
    facts = _Facts(market, state, snapshot, spec)
    caps = caps_of(state, spec)
    if caps.usd is not None and (reason := Spending(state, snapshot, spec).exceeded()):
        return Allocation(stop_reason=reason)
    if state.phase is RunPhase.PARKED:
        return _parked(facts)
    size, sized = _size(facts)
    fallback, shortage = _fallback(facts)
    idle = _idle_trainer(facts) if state.phase is RunPhase.TRAINING else None
    held = _without_trainer(facts)
    comparisons = tuple(compared for compared in (sized, shortage, idle, held) if compared is not None)
    is_changed = size != rollouts_wanted(state, spec)
    retries_spot = fallback >= len(facts.fallback) and _retries_spot(facts)
    return Allocation(
        trainer=True,
        spot=size,
        on_demand=len(facts.fallback) - 1 if retries_spot else fallback,
        size_reason=f"{sized.sentence}; {_size_reason(facts)}" if is_changed and sized is not None else "",
        park_reason=_park_reason(facts) if idle is not None and idle.best.name == PARK else "",
        release_reason=_release_reason(facts) if held is not None and held.best.name == RETURN else "",
        retries_spot=retries_spot,
        spot_too_expensive=facts.is_spot_too_expensive,
        is_behind=facts.is_behind,
        comparisons=comparisons,
    )


# How many nodes to run, if spot is available.


def _size(facts: _Facts) -> tuple[int, Comparison | None]:
    """Compare sizes of the fleet. Before steps are measured and prices known, the size is `replicas.max`."""
    shape, prices, replicas = facts.snapshot.measured.step, facts.prices, facts.spec.rollout.replicas
    now, market = rollouts_wanted(facts.state, facts.spec), _own_market(facts)
    if shape is None or not prices.known or replicas.min >= replicas.max:
        return now, None
    if facts.spec.policies.fleet.deadline is not None and facts.progress is None:
        return now, None  # the run's progress is unknown at this moment
    low = max(1, replicas.min, nodes_in_time(facts.progress, shape, replicas.max, now))
    lifetime_s = 3600 / LOSSES_PER_H[market]
    sized_s = math.inf if facts.state.size.nodes is None else facts.waited_s(facts.state.size.at_s)
    horizon_s = min(sized_s, lifetime_s) if sized_s >= SIZE_SETTLE_S else 0.0  # 0: the last change has not settled
    start_s = facts.market.start_s(Role.ROLLOUT, market)
    on_demand_usd = facts.on_demand_usd_per_h if facts.may_buy_fallback else 0.0
    found = compare_sizes(
        shape,
        prices,
        market,
        now,
        (low, replicas.max),
        start_s,
        horizon_s,
        zones_of(facts.spot),
        on_demand_usd,
        [node.price_usd_per_h for node in facts.spot if node.price_usd_per_h > 0],
        facts.market.next_usd_per_h(Role.ROLLOUT, market),
    )
    return (found.best.spot if horizon_s else now), found


def _size_reason(facts: _Facts) -> str:
    shape, course = facts.snapshot.measured.step, facts.progress
    assert shape is not None
    now, max_nodes = rollouts_wanted(facts.state, facts.spec), facts.spec.rollout.replicas.max
    needed = nodes_in_time(course, shape, max_nodes, now)
    cheapest = size_summary(shape, facts.prices)
    if course is None or not needed:
        return cheapest
    pace = f"{course.steps_left} steps remain, with {course.step_s:.1f} s for each"
    return f"{cheapest}; {needed} nodes meet the deadline: {pace}"


def _own_market(facts: _Facts) -> Market:
    return market_of(Role.ROLLOUT, facts.spec)


# How many on-demand nodes replace unavailable spot.


def _fallback(facts: _Facts) -> tuple[int, Comparison | None]:
    """Compare numbers of on-demand nodes, in addition to the present spot nodes."""
    if (found := _fallback_to_return(facts)) is not None and found.best.on_demand < len(facts.fallback):
        return found.best.on_demand, found
    if (found := _fallback_to_buy(facts)) is not None:
        return max(found.best.on_demand, len(facts.fallback)), found
    return len(facts.fallback), None


def _fallback_to_return(facts: _Facts) -> Comparison | None:
    """Compare returning on-demand nodes, once stable spot nodes can replace them and the deadline stays safe.

    None are returned while the cloud does not answer: it is unknown which machines still exist.
    """
    if facts.snapshot.machines is None or not facts.fallback:
        return None
    held = facts.held
    if not held or (facts.progress is not None and not facts.progress.is_safe):
        return None
    count, max_count = len(facts.fallback), max(0, facts.spec.rollout.replicas.max - len(held))
    counts = range(_fallback_min(facts, len(held)), min(count, max_count) + 1)
    candidates = _fallback_candidates(facts, len(held), counts)
    # Another count has to be cheaper by more than the measurement error, or noise would buy and return nodes.
    present_usd = sum(candidate.usd_per_h for candidate in candidates if candidate.on_demand == count)
    noise_usd = NOISE_SHARE * present_usd * SPOT_STABLE_S / 3600
    candidates = [
        candidate if candidate.on_demand == count else replace(candidate, change_usd=noise_usd)
        for candidate in candidates
    ]
    return _mark_guess(facts, compare("return on demand", candidates, SPOT_STABLE_S)) if candidates else None


def _fallback_to_buy(facts: _Facts) -> Comparison | None:
    """Compare waiting for spot, on-demand nodes, and the trainer's own generation where that is measured.

    No nodes are bought until the shortage has lasted a minute.

    With k nodes on spot at q an hour, j on demand at p and P for everything else, a step costs
    (P - k (p - q) + (k + j) p)(a + b/(k + j)): the formula of `policies.costs.steps` with a smaller P.
    """
    present, fallback = sum(node.phase is not NodePhase.REQUESTED for node in facts.spot), len(facts.fallback)
    horizon_s = _shortage_s(facts, present)
    if horizon_s < WAIT_MIN_S:
        return None
    shape, usd = facts.snapshot.measured.step or UNMEASURED, facts.prices.other_usd_per_h
    other_usd = usd - present * (facts.on_demand_usd_per_h - _spot_usd_per_h(facts))
    low = max(1, _fallback_min(facts, present) + present)
    totals = candidate_counts(
        shape, HourlyPrices(other_usd, facts.on_demand_usd_per_h), low, max(low, facts.spec.rollout.replicas.max)
    )
    bought = [count - present for count in totals if count - present > fallback]
    candidates = _fallback_candidates(facts, present, [fallback, *bought])
    own = facts.snapshot.measured.own_step
    if own is not None and present + fallback == 0 and facts.spec.rollout.own_generation_after_s is not None:
        candidates.insert(1, Candidate(OWN, usd, own.seconds(1), in_time=not facts.is_behind))
    return _mark_guess(facts, compare("shortage of spot", candidates, horizon_s))


def _mark_guess(facts: _Facts, compared: Comparison) -> Comparison:
    return compared if facts.snapshot.measured.step is not None else replace(compared, unknown=NOT_MEASURED)


def _shortage_s(facts: _Facts, present: int) -> float:
    """Return for how long on-demand nodes would have helped a working trainer; 0: they would not, or may not."""
    trainers = [node for node in facts.state.trainer_machines if node.phase is NodePhase.SERVING]
    lifetime_s, spot_since_s = 3600 / LOSSES_PER_H[Market.SPOT], facts.state.shortages.spot_since_s
    if not trainers or not facts.may_buy_fallback or present >= rollouts_wanted(facts.state, facts.spec):
        return 0.0
    if facts.is_spot_too_expensive:
        return lifetime_s
    if spot_since_s is None or facts.market.kind(Role.ROLLOUT, Market.SPOT).machines_never_work:
        return 0.0  # machines that never serve would not on another market either
    since_s = max(spot_since_s, trainers[0].since_s, _shortage_since_s(facts))
    return min(facts.waited_s(since_s), lifetime_s)


def _shortage_since_s(facts: _Facts) -> float:
    """Return since when a requested spot node is missing, after an earlier shortage has ended; 0: it has not.

    It has ended when a spot node is stable and none is refused. A larger fleet, or a replacement for a broken
    machine, counts as a shortage only from its request on.
    """
    if not facts.held or facts.market.kind(Role.ROLLOUT, Market.SPOT).refused_in_a_row:
        return 0.0
    requested_s = [node.requested_at_s for node in facts.spot if node.phase is NodePhase.REQUESTED]
    return min(requested_s, default=facts.now_s)


def _fallback_min(facts: _Facts, spot: int) -> int:
    """Return how many on-demand nodes run.yaml's minimum and the deadline need in addition to `spot` nodes."""
    shape, replicas = facts.snapshot.measured.step, facts.spec.rollout.replicas
    needed = 0
    if shape is not None:
        needed = nodes_in_time(facts.progress, shape, replicas.max, spot + len(facts.fallback))
    return max(0, min(max(1, replicas.min, needed), max(1, replicas.max)) - spot)


def _fallback_candidates(facts: _Facts, spot: int, counts: Sequence[int]) -> list[Candidate]:
    """Return candidates with `spot` spot nodes and each count of on-demand nodes, in the order of `counts`."""
    shape, prices, usd = facts.snapshot.measured.step or UNMEASURED, facts.prices, facts.on_demand_usd_per_h
    start_usd = usd * fallback_boot_s(facts.state) / 3600
    fallback_min, fallback = _fallback_min(facts, spot), len(facts.fallback)
    nodes_min = max(1, facts.spec.rollout.replicas.min)  # a smaller fleet makes no step
    return [
        Candidate(
            name=_mix_name(spot, count),
            usd_per_h=prices.other_usd_per_h + spot * _spot_usd_per_h(facts) + count * usd,
            step_s=None if count + spot < nodes_min else shape.seconds(spot + count),
            change_usd=max(0, count - fallback) * start_usd,
            spot=spot,
            on_demand=count,
            in_time=count >= fallback_min or not facts.is_behind,
        )
        for count in dict.fromkeys(counts)
    ]


def _mix_name(spot: int, on_demand: int) -> str:
    parts = [f"{spot} on spot" if spot else "", f"{on_demand} on demand" if on_demand else ""]
    return " and ".join(part for part in parts if part) or "waiting for spot"


def _spot_usd_per_h(facts: _Facts) -> float:
    return min(facts.prices.node_usd_per_h, facts.on_demand_usd_per_h)


def _retries_spot(facts: _Facts) -> bool:
    """Whether to return an on-demand node because a spot machine fits under the cap only in its place.

    Not while machines start or leave, not before each has served for FALLBACK_MIN_S, and not the only node while
    the deadline depends on it.
    """
    rollouts = [node for node in facts.state.nodes.values() if node.role is Role.ROLLOUT]
    if not facts.fallback or len(facts.spot) >= rollouts_wanted(facts.state, facts.spec):
        return False
    if any(node.phase is not NodePhase.SERVING for node in rollouts):
        return False
    if any(facts.waited_s(node.since_s) < FALLBACK_MIN_S for node in facts.fallback):
        return False
    if len(rollouts) == 1 and facts.progress is not None and not facts.progress.is_safe:
        return False
    if not facts.market.are_pools_known or not facts.market.launches_allowed(Role.ROLLOUT, Market.SPOT):
        return False
    returned = max(facts.fallback, key=lambda node: node.usd_per_h)
    others = [node for node in facts.state.nodes.values() if node is not returned]
    with_all, with_others = (Spending(facts.state, facts.snapshot, facts.spec, nodes) for nodes in (None, others))
    return not facts.market.can_afford(with_all, Market.SPOT) and facts.market.can_afford(with_others, Market.SPOT)


# A trainer without rollout nodes: it waits, generates alone, or the run parks.

WAIT, OWN, PARK = "a waiting trainer", "the trainer alone", "parking"


def _idle_trainer(facts: _Facts) -> Comparison | None:
    """Compare waiting, own generation and parking for a waiting trainer for which no market has a node."""
    node, since_s = _waiting_trainer(facts), facts.state.shortages.rollout_since_s
    if node is None or since_s is None or not _nothing_available(facts):
        return None
    usd, restart_usd = facts.prices.other_usd_per_h, _restart_usd(facts, node)
    if usd <= 0:
        usd = 1.0  # unknown: only its ratio to the restart matters
    candidates = [
        Candidate(PARK, 0.0, change_usd=restart_usd, in_time=not facts.is_behind),
        Candidate(WAIT, usd, in_time=not facts.is_behind),
    ]
    worth_usd = _own_worth_usd(facts)
    if (own_s := _own_step_s(facts, 3600 * restart_usd / usd, worth_usd)) is not None:
        step_s = own_s if math.isfinite(own_s) else None
        candidates.append(Candidate(OWN, facts.prices.other_usd_per_h, step_s))
    compared = compare("idle trainer", candidates, _idle_s(facts, node), worth_usd)
    return compared if facts.prices.other_usd_per_h > 0 else replace(compared, unknown=NOT_PRICED)


def _restart_usd(facts: _Facts, node: Node) -> float:
    """Return the cost of a restart of the trainer: its boot, during which the first rollout node waits.

    Where a price is unknown, a node counts as much as the trainer, so the trainer waits longer before it parks.
    """
    usd, node_usd = facts.prices.other_usd_per_h, facts.market.max_usd_per_h(Role.ROLLOUT, _own_market(facts))
    if usd <= 0 or node_usd <= 0:
        usd = node_usd = usd if usd > 0 else 1.0
    boot_s = facts.market.start_s(Role.TRAINER, node.market)
    return max(IDLE_MIN_S * usd, boot_s * (usd + node_usd)) / 3600


def _idle_s(facts: _Facts, node: Node) -> float:
    since_s, shape = facts.state.shortages.rollout_since_s, facts.snapshot.measured.step
    assert since_s is not None
    # It may have had a step to train when it lost its last node.
    trained_s = 0.0 if shape is None else shape.fixed_s
    return facts.snapshot.silent_s(max(since_s, node.since_s)) - trained_s


def _own_worth_usd(facts: _Facts) -> float | None:
    """Return the worth of a step that the trainer makes alone: its cost with the best number of on-demand nodes.

    None before any step was measured.
    """
    # Without a step made by nodes, assume that a node generates as fast as the trainer.
    shape = facts.snapshot.measured.step or facts.snapshot.measured.own_step
    if shape is None:
        return None
    replicas, other_usd = facts.spec.rollout.replicas, facts.prices.other_usd_per_h
    prices = HourlyPrices(other_usd, facts.on_demand_usd_per_h or other_usd)
    return step_usd(shape, prices, best_count(shape, prices, max(1, replicas.min), replicas.max))


def _own_step_s(facts: _Facts, idle_limit_s: float, worth_usd: float | None) -> float | None:
    """Return the seconds of a step that the trainer makes alone; None if it is not worth its price.

    Until one is measured, assume that it is. A run behind its deadline takes any step.
    """
    state, snapshot, usd = facts.state, facts.snapshot, facts.prices.other_usd_per_h
    since_s, own = state.own_generation_since_s, snapshot.measured.own_step
    if since_s is None:
        return None
    limit_s = idle_limit_s if worth_usd is None else math.inf if usd <= 0 else worth_usd * 3600 / usd
    # Completions for several steps are generated together, before the first of these steps.
    batch_steps = max(1.0, steps_of_generation(facts.spec.grpo, processes_of(facts.spec)))
    if snapshot.silent_s(max(since_s, snapshot.stepped_at_s)) >= idle_limit_s + batch_steps * limit_s:
        return None  # no progress
    if own is None:
        rows_s = OWN_STEP_ROWS * max(batch_steps, int(facts.spec.grpo.get("logging_steps", 1))) * limit_s
        return limit_s if snapshot.silent_s(since_s) < idle_limit_s + rows_s else None
    return own.seconds(1) if own.seconds(1) <= limit_s or facts.is_behind else None


def _park_reason(facts: _Facts) -> str:
    node, usd = _waiting_trainer(facts), facts.prices.other_usd_per_h
    assert node is not None
    idle_s = _idle_s(facts, node)
    cost = f", which cost {usd * idle_s / 3600:.2f} USD" if usd else ""
    waited = f"no rollout node is available, and the trainer has waited for {idle_s / 60:.0f} min{cost}"
    return f"{waited}, as much as a restart; its machine is returned until a node is available"


def _waiting_trainer(facts: _Facts) -> Node | None:
    """Return the trainer's node if it only waits for rollout nodes and its progress can be stored."""
    state, trainers = facts.state, facts.state.live(Role.TRAINER)
    if len(trainers) != 1 or facts.snapshot.machines is None or not stores_checkpoints(facts.spec):
        return None
    if state.rollback is not None and state.rollback.stage in UNTRAINED_ROLLBACK:
        return None
    if state.diverged is not None and facts.spec.policies.kl.action != "alert":
        return None  # the divergence is handled first
    node, beat = trainers[0], facts.snapshot.heartbeat_of(trainers[0])
    is_working = node.phase is NodePhase.SERVING and node.attempt_ended_at_s is None
    return node if is_working and beat is not None and _only_waits(facts, beat) else None


def _only_waits(facts: _Facts, beat: Trainer) -> bool:
    is_fresh = facts.snapshot.silent_s(beat.beat_at_s) < HEARTBEAT_FRESH_S
    return is_fresh and beat.activity in GENERATES and beat.timeline == facts.state.timeline and not beat.leaving


def _nothing_available(facts: _Facts) -> bool:
    """Whether no rollout node has a machine, and requests keep failing on each market where they may be bought.

    A slow launch does not count as a failure.
    """
    live = facts.state.live(Role.ROLLOUT)
    if any(node.phase is not NodePhase.REQUESTED for node in live):
        return False
    kinds = {node.kind for node in live}
    if not facts.is_spot_too_expensive:
        kinds.add(kind_of(Role.ROLLOUT, _own_market(facts)))
    # Checked now, not by an earlier refusal: the machines that had used up the budget may have left.
    if facts.may_buy_fallback and facts.market.is_paid_for(Market.ON_DEMAND):
        kinds.add(kind_of(Role.ROLLOUT, Market.ON_DEMAND))
    return all(kind in facts.state.kinds and facts.state.kinds[kind].fails for kind in kinds)


# Rollout nodes that wait for a trainer.

KEEP, RETURN = "keeping the waiting nodes", "returning the waiting nodes"


def _without_trainer(facts: _Facts) -> Comparison | None:
    """Compare keeping the rollout nodes while the trainer has no machine with starting them again later."""
    since_s = _trainerless_since_s(facts)
    if since_s is None or facts.snapshot.machines is None:
        return None
    nodes = len(facts.state.live(Role.ROLLOUT))
    if not nodes:
        return None
    usd = nodes * (facts.prices.node_usd_per_h or 1.0)
    candidates = [Candidate(KEEP, usd), Candidate(RETURN, 0.0, change_usd=usd * _hold_limit_s(facts) / 3600)]
    compared = compare("no trainer", candidates, facts.snapshot.silent_s(since_s))
    return compared if facts.prices.node_usd_per_h > 0 else replace(compared, unknown=NOT_PRICED)


def _trainerless_since_s(facts: _Facts) -> float | None:
    """Return since when nodes wait for the trainer's machine or, in a parked run, for its old one to leave."""
    if facts.state.phase is not RunPhase.PARKED:
        return facts.state.shortages.trainer_since_s
    started = (NodePhase.BOOTING, NodePhase.SERVING)
    return min((node.since_s for node in facts.state.live(Role.ROLLOUT) if node.phase in started), default=None)


def _hold_limit_s(facts: _Facts) -> float:
    boot_s = min(facts.market.start_s(Role.ROLLOUT, _own_market(facts)), facts.spec.policies.boot_timeout_s)
    return max(IDLE_MIN_S, boot_s)


def _release_reason(facts: _Facts) -> str:
    held_s = _hold_limit_s(facts)
    if facts.state.phase is RunPhase.PARKED:
        return f"the trainer's old machine has not left for {held_s:.0f} s; requested again once it has"
    return f"the trainer has had no machine for {held_s:.0f} s; requested again once it has one"


# A parked run.


def _parked(facts: _Facts) -> Allocation:
    """Plan one rollout node, on spot and on demand in turn where both are allowed.

    Plan nothing while the old trainer drains, when the node could not be used. Stop the run if the budget allows
    it to continue on no market: it would wait forever, or buy a node and then not the trainer's machine.
    """
    held = _without_trainer(facts)
    kept = Allocation(
        spot=len(facts.spot),
        on_demand=len(facts.fallback),
        release_reason=_release_reason(facts) if held is not None and held.best.name == RETURN else "",
        comparisons=() if held is None else (held,),
    )
    if facts.state.live(Role.ROLLOUT) or any(node.role is Role.TRAINER for node in facts.state.nodes.values()):
        return kept
    markets = [_own_market(facts), *([Market.ON_DEMAND] if facts.may_use_both else [])]
    excesses = [facts.market.resume_excess(market) for market in markets]
    if all(excesses):
        return Allocation(stop_reason=f"the budget does not allow the run to continue: {excesses[0]}")
    spot, on_demand = (facts.market.kind(Role.ROLLOUT, market) for market in (Market.SPOT, Market.ON_DEMAND))
    probes = [] if facts.is_spot_too_expensive else [_own_market(facts)]
    if facts.may_use_both and (spot.failed_at_s >= on_demand.failed_at_s or facts.is_spot_too_expensive):
        probes.append(Market.ON_DEMAND)
    return replace(kept, probes=tuple(probes), spot_too_expensive=facts.is_spot_too_expensive)
