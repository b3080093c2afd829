"""The plan: what the run is to have now, by the objective (`policies.fleet.objective`) over few allocations.

Five questions are compared in the same way: how many nodes there are to be if spot comes; how many on-demand nodes
replace spot that does not; whether those may go again; what a trainer does for which no market has a node (wait,
generate by itself, park); whether nodes without a trainer are kept. Limits, the budget's caps, `replicas` and the
deadline, bound the candidates. Nothing here requests anything.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from policies.costs.steps import HourlyPrices, StepShape, best_count, usd_a_step
from policies.fleet.budget import Spending, caps_of
from policies.fleet.deadline import Course, course_of, nodes_in_time
from policies.fleet.deadline import boot_s as fallback_boot_s
from policies.fleet.market import LOSSES_AN_HOUR, Offers, market_of, may_fall_back
from policies.fleet.objective import (
    NOISE_SHARE,
    Candidate,
    Comparison,
    compare,
    compare_sizes,
    candidate_counts,
    hourly_prices,
    rollouts_wanted,
    size_words,
    zones_of,
)
from policies.model.buying import SPOT_STABLE_S, PROBE_MAX_S
from policies.model.loss import steps_of_generation
from policies.model.phases import FILLING_NODE, UNTRAINED_ROLLBACK
from policies.model.spec import RunSpec, processes_of, stores_checkpoints
from policies.model.state import Node, RunState
from policies.model.vocabulary import Market, NodePhase, Role, RunPhase, kind_of, slot_of
from policies.tick.snapshot import GENERATES, HEARTBEAT_FRESH_S, Snapshot, Trainer

WAIT_MIN_S = 60.0  # zones that refuse for a moment are no shortage
IDLE_MIN_S = 300.0  # a machine is often available again within minutes, and returning one takes about as long
SIZE_SETTLE_S = 600.0  # after a change of size: a node needs that long to come, and the next steps have to show it
FALLBACK_MIN_S = PROBE_MAX_S  # of an on-demand node before spot is tried instead: a try in vain then costs a few percent
OWN_STEP_ROWS = 2  # logged steps until an own one is measured: it ends where the next generation is logged
NOT_MEASURED, NOT_PRICED = "no steps are measured yet", "prices are not known"
UNMEASURED = StepShape(3600.0, 0.0)  # before steps were measured: any node will do, and more help nothing


@dataclass(frozen=True, slots=True)
class Allocation:
    """What the run is to have, and why. Printable as it is."""

    trainer: bool = False
    spot: int = 0  # rollout nodes on the market that run.yaml names for them
    on_demand: int = 0  # in place of unavailable spot
    probes: tuple[Market, ...] = ()  # where a parked run asks for its one node, the first open one
    size_reason: str = ""  # why `spot` is another number than before
    parks: str = ""  # why the trainer's machine is returned, too
    releases: str = ""  # why all rollout nodes are returned
    retries_spot: bool = False  # an on-demand node makes room for spot under the cap
    spot_too_expensive: bool = False  # for the budget
    is_behind: bool = False  # the deadline's pace
    stops: str = ""  # the budget's reason to stop the run
    comparisons: tuple[Comparison, ...] = ()

    @property
    def words(self) -> str:
        """The plan in a sentence."""
        if self.stops:
            return self.stops
        if self.parks:
            return self.parks
        if self.releases:
            return self.releases
        if not self.trainer:
            return f"parked: {_probe_sentence(self.probes)}"
        return self.comparisons[-1].words if self.comparisons else ""


def _probe_sentence(probes: Sequence[Market]) -> str:
    if not probes:
        return "no rollout node is asked for now, for machines come or go"
    where = " or ".join("on spot" if market is Market.SPOT else "on demand" for market in probes)
    return f"one rollout node is asked for now and then, {where}, and the trainer's machine once it is there"


# What a plan starts from.


def wanted_slots(spec: RunSpec) -> Iterator[tuple[Role, str, bool]]:
    """Every slot that there may be: role, name, and whether the run needs it immediately."""
    yield Role.TRAINER, slot_of(Role.TRAINER, 0), True
    for place in range(spec.rollout.replicas.max):
        yield Role.ROLLOUT, slot_of(Role.ROLLOUT, place), place < spec.rollout.replicas.min


@dataclass(frozen=True)
class _Facts:
    """A run's fleet as the plan sees it; each figure is worked out once."""

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
                (self.fallback if node.stand_in else self.spot).append(node)
        object.__setattr__(self, "prices", hourly_prices(self.state))

    @property
    def now_s(self) -> float:
        return self.snapshot.now_s

    @cached_property
    def course(self) -> Course | None:
        return course_of(self.state, self.spec, self.snapshot.trainer, self.now_s)

    @property
    def is_behind(self) -> bool:
        return self.course is not None and self.course.is_behind

    @cached_property
    def held(self) -> list[Node]:
        """Spot nodes that have served for so long that they are taken to stay."""
        serving = [node for node in self.spot if node.phase is NodePhase.SERVING]
        return [node for node in serving if self.waited_s(node.since_s) >= SPOT_STABLE_S]

    @cached_property
    def on_demand_usd_per_h(self) -> float:
        """USD an hour of an on-demand rollout node: of those seen, else the most; 0: not known."""
        live = [*self.spot, *self.fallback]
        seen = [node.on_demand_usd_per_h for node in live if node.on_demand_usd_per_h > 0]
        return sum(seen) / len(seen) if seen else self.market.most_usd_per_h(Role.ROLLOUT, Market.ON_DEMAND)

    @cached_property
    def may_ask_both(self) -> bool:
        """Whether on demand may replace spot, and spot does not fail with machines that never serve. To a parked
        run that is refused spot no spot machine can show whether they serve by now: one on demand may."""
        kind = self.market.kind(Role.ROLLOUT, Market.SPOT)
        unknown = self.state.phase is RunPhase.PARKED and kind.refused_in_a_row > 0
        return may_fall_back(self.spec) and self.on_demand_usd_per_h > 0 and (unknown or not kind.never_serves)

    @property
    def may_buy_fallback(self) -> bool:
        return self.may_ask_both and self.prices.beside_usd_per_h > 0

    @cached_property
    def is_spot_too_expensive(self) -> bool:
        """Whether the budget has no room for the first node on spot, and has for one on demand: then waiting for
        spot gains nothing, and the budget is not reached either."""
        parked = self.state.phase is RunPhase.PARKED  # without a trainer, by whose price `may_buy_fallback` goes
        if not (self.may_ask_both if parked else self.may_buy_fallback) or self.spot:
            return False
        if self.market.is_paid_for(Market.SPOT):
            return False
        return self.market.is_paid_for(Market.ON_DEMAND)

    def waited_s(self, since_s: float) -> float:
        return self.now_s - since_s


def plan(market: Offers, state: RunState, snapshot: Snapshot, spec: RunSpec) -> Allocation:
    """Return what a live run is to have now."""
    facts = _Facts(market, state, snapshot, spec)
    caps = caps_of(state, spec)
    if caps.usd is not None and (why := Spending(state, snapshot, spec).exceeded()):
        return Allocation(stops=why)
    if state.phase is RunPhase.PARKED:
        return _parked(facts)
    size, sized = _size(facts)
    fallback, shortage = _fallback(facts)
    idle = _idle_trainer(facts) if state.phase is RunPhase.TRAINING else None
    held = _without_trainer(facts)
    compared = tuple(one for one in (sized, shortage, idle, held) if one is not None)
    changed = size != rollouts_wanted(state, spec)
    retries_spot = fallback >= len(facts.fallback) and _retries_spot(facts)
    return Allocation(
        trainer=True,
        spot=size,
        on_demand=len(facts.fallback) - 1 if retries_spot else fallback,
        size_reason=f"{sized.words}; {_size_reason(facts)}" if changed and sized is not None else "",
        parks=_parking_reason(facts) if idle is not None and idle.best.name == PARK else "",
        releases=_release_reason(facts) if held is not None and held.best.name == RETURN else "",
        retries_spot=retries_spot,
        spot_too_expensive=facts.is_spot_too_expensive,
        is_behind=facts.is_behind,
        comparisons=compared,
    )


# How many nodes, if spot comes.


def _size(facts: _Facts) -> tuple[int, Comparison | None]:
    """Compare sizes of the fleet. Until steps were measured and prices are known, there are `replicas.max`."""
    shape, prices, replicas = facts.snapshot.measured.step, facts.prices, facts.spec.rollout.replicas
    now, market = rollouts_wanted(facts.state, facts.spec), _own_market(facts)
    if shape is None or not prices.known or replicas.min >= replicas.max:
        return now, None
    if facts.spec.policies.fleet.deadline is not None and facts.course is None:
        return now, None  # how far the run is, is not known at this moment
    low = max(1, replicas.min, nodes_in_time(facts.course, shape, replicas.max, now))
    lasts_s = 3600 / LOSSES_AN_HOUR[market]
    sized_s = math.inf if facts.state.size.nodes is None else facts.waited_s(facts.state.size.at_s)
    horizon_s = min(sized_s, lasts_s) if sized_s >= SIZE_SETTLE_S else 0.0  # else the last change has not shown yet
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
    shape, course = facts.snapshot.measured.step, facts.course
    assert shape is not None
    now, most = rollouts_wanted(facts.state, facts.spec), facts.spec.rollout.replicas.max
    needed = nodes_in_time(course, shape, most, now)
    words = size_words(shape, facts.prices)
    if course is None or not needed:
        return words
    return f"{words}; {needed} keep the deadline: {course.left} steps are left, each of {course.step_s:.1f} s"


def _own_market(facts: _Facts) -> Market:
    return market_of(Role.ROLLOUT, facts.spec)


# How many on-demand nodes replace unavailable spot.


def _fallback(facts: _Facts) -> tuple[int, Comparison | None]:
    """Compare numbers of on-demand nodes, next to the spot nodes that are there."""
    if (found := _fallback_to_return(facts)) is not None and found.best.on_demand < len(facts.fallback):
        return found.best.on_demand, found
    if (found := _fallback_to_buy(facts)) is not None:
        return max(found.best.on_demand, len(facts.fallback)), found
    return len(facts.fallback), None


def _fallback_to_return(facts: _Facts) -> Comparison | None:
    """Spot nodes that have held do the work as well, and the deadline is as safe with them. None are returned
    while the cloud does not answer: nobody knows which machines are still there."""
    if facts.snapshot.machines is None or not facts.fallback:
        return None
    held = facts.held
    if not held or (facts.course is not None and not facts.course.is_safe):
        return None
    most = min(len(facts.fallback), max(0, facts.spec.rollout.replicas.max - len(held)))
    candidates = _fallback_candidates(facts, len(held), range(_fallback_min(facts, len(held)), most + 1))
    # The present number is in front by what a measurement may be off, or noise would buy and return a node.
    present_usd = sum(one.usd_per_h for one in candidates if one.on_demand == len(facts.fallback))
    noise_usd = NOISE_SHARE * present_usd * SPOT_STABLE_S / 3600
    candidates = [
        one if one.on_demand == len(facts.fallback) else replace(one, change_usd=noise_usd) for one in candidates
    ]
    return _mark_guess(facts, compare("return on demand", candidates, SPOT_STABLE_S)) if candidates else None


def _fallback_to_buy(facts: _Facts) -> Comparison | None:
    """Compare waiting for spot with on-demand nodes, and with the trainer's own generation where that is measured.
    Until the shortage has lasted a minute, none are bought.

    With k nodes on spot at q an hour, j on demand at p and P for everything else, a step costs
    (P - k (p - q) + (k + j) p)(a + b/(k + j)): the sum of `steps`, with less next to the nodes.
    """
    present, fallback = sum(node.phase is not NodePhase.REQUESTED for node in facts.spot), len(facts.fallback)
    horizon_s = _shortage_s(facts, present)
    if horizon_s < WAIT_MIN_S:
        return None
    shape, usd = facts.snapshot.measured.step or UNMEASURED, facts.prices.beside_usd_per_h
    beside = usd - present * (facts.on_demand_usd_per_h - _spot_usd_per_h(facts))
    low = max(1, _fallback_min(facts, present) + present)
    totals = candidate_counts(
        shape, HourlyPrices(beside, facts.on_demand_usd_per_h), low, max(low, facts.spec.rollout.replicas.max)
    )
    bought = [count - present for count in totals if count - present > fallback]
    candidates = _fallback_candidates(facts, present, [fallback, *bought])
    own = facts.snapshot.measured.own_step
    if own is not None and present + fallback == 0 and facts.spec.rollout.own_generation_after_s is not None:
        candidates.insert(1, Candidate(OWN, usd, own.seconds(1), in_time=not facts.is_behind))
    return _mark_guess(facts, compare("shortage of spot", candidates, horizon_s))


def _mark_guess(facts: _Facts, compared: Comparison) -> Comparison:
    return compared if facts.snapshot.measured.step is not None else replace(compared, lacks=NOT_MEASURED)


def _shortage_s(facts: _Facts, present: int) -> float:
    """For how long on-demand nodes would have helped a trainer that works; 0: they would not, or may not."""
    trainers = [node for node in facts.state.trainer_machines if node.phase is NodePhase.SERVING]
    lasts_s, short_s = 3600 / LOSSES_AN_HOUR[Market.SPOT], facts.state.shortages.spot_since_s
    if not trainers or not facts.may_buy_fallback or present >= rollouts_wanted(facts.state, facts.spec):
        return 0.0
    if facts.is_spot_too_expensive:
        return lasts_s
    if short_s is None or facts.market.kind(Role.ROLLOUT, Market.SPOT).machines_never_work:
        return 0.0  # another market would not help machines that never serve
    since_s = max(short_s, trainers[0].since_s, _shortage_since_s(facts))
    return min(facts.waited_s(since_s), lasts_s)


def _shortage_since_s(facts: _Facts) -> float:
    """Since when spot owes a node, where an earlier shortage is over: one has held, and none is refused. A larger
    fleet, or another machine in place of a broken one, is no shortage before spot was asked."""
    if not facts.held or facts.market.kind(Role.ROLLOUT, Market.SPOT).refused_in_a_row:
        return 0.0
    asked = [node.requested_at_s for node in facts.spot if node.phase is NodePhase.REQUESTED]
    return min(asked, default=facts.now_s)


def _fallback_min(facts: _Facts, spot: int) -> int:
    """The on-demand nodes without which `spot` nodes are fewer than run.yaml or the deadline ask for."""
    shape, replicas = facts.snapshot.measured.step, facts.spec.rollout.replicas
    needed = 0
    if shape is not None:
        needed = nodes_in_time(facts.course, shape, replicas.max, spot + len(facts.fallback))
    return max(0, min(max(1, replicas.min, needed), max(1, replicas.max)) - spot)


def _fallback_candidates(facts: _Facts, spot: int, counts: Sequence[int]) -> list[Candidate]:
    """Return candidates with that many spot nodes, and each count of on-demand nodes; the present one first."""
    shape, prices, usd = facts.snapshot.measured.step or UNMEASURED, facts.prices, facts.on_demand_usd_per_h
    start_usd = usd * fallback_boot_s(facts.state) / 3600
    least, fallback = _fallback_min(facts, spot), len(facts.fallback)
    enough = max(1, facts.spec.rollout.replicas.min)  # a smaller fleet counts as none
    return [
        Candidate(
            name=_mix_name(spot, count),
            usd_per_h=prices.beside_usd_per_h + spot * _spot_usd_per_h(facts) + count * usd,
            step_s=None if count + spot < enough else shape.seconds(spot + count),
            change_usd=max(0, count - fallback) * start_usd,
            spot=spot,
            on_demand=count,
            in_time=count >= least or not facts.is_behind,
        )
        for count in dict.fromkeys(counts)
    ]


def _mix_name(spot: int, on_demand: int) -> str:
    parts = [f"{spot} on spot" if spot else "", f"{on_demand} on demand" if on_demand else ""]
    return " and ".join(part for part in parts if part) or "waiting for spot"


def _spot_usd_per_h(facts: _Facts) -> float:
    return min(facts.prices.node_usd_per_h, facts.on_demand_usd_per_h)


def _retries_spot(facts: _Facts) -> bool:
    """Whether an on-demand node is returned because a spot machine would fit under the cap only instead of it: not
    while machines come or go, nor before each has served for FALLBACK_MIN_S, nor where the deadline depends on the only
    node."""
    rollouts = [node for node in facts.state.nodes.values() if node.role is Role.ROLLOUT]
    if not facts.fallback or len(facts.spot) >= rollouts_wanted(facts.state, facts.spec):
        return False
    if any(node.phase is not NodePhase.SERVING for node in rollouts):
        return False
    if any(facts.waited_s(node.since_s) < FALLBACK_MIN_S for node in facts.fallback):
        return False
    if len(rollouts) == 1 and facts.course is not None and not facts.course.is_safe:
        return False
    if not facts.market.are_pools_known or not facts.market.room(Role.ROLLOUT, Market.SPOT):
        return False
    leaves = max(facts.fallback, key=lambda node: node.usd_per_h)
    others = [node for node in facts.state.nodes.values() if node is not leaves]
    with_all, with_others = (Spending(facts.state, facts.snapshot, facts.spec, nodes) for nodes in (None, others))
    return not facts.market.has_room(with_all, Market.SPOT) and facts.market.has_room(with_others, Market.SPOT)


# What a trainer does for which no rollout node is available: it waits, generates by itself, or the run parks.

WAIT, OWN, PARK = "a waiting trainer", "the trainer alone", "parking"


def _idle_trainer(facts: _Facts) -> Comparison | None:
    """Compare waiting, own generation and parking, where no market has a node for a trainer that only waits."""
    node, since_s = _waiting_trainer(facts), facts.state.shortages.rollout_since_s
    if node is None or since_s is None or not _nothing_available(facts):
        return None
    usd, restart_usd = facts.prices.beside_usd_per_h, _restart_usd(facts, node)
    if usd <= 0:
        usd = 1.0  # not known: all that counts is its share of the restart
    candidates = [
        Candidate(PARK, 0.0, change_usd=restart_usd, in_time=not facts.is_behind),
        Candidate(WAIT, usd, in_time=not facts.is_behind),
    ]
    worth_usd = _own_worth_usd(facts)
    if (own_s := _own_step_s(facts, 3600 * restart_usd / usd, worth_usd)) is not None:
        step_s = own_s if math.isfinite(own_s) else None
        candidates.append(Candidate(OWN, facts.prices.beside_usd_per_h, step_s))
    compared = compare("idle trainer", candidates, _idle_s(facts, node), worth_usd)
    return compared if facts.prices.beside_usd_per_h > 0 else replace(compared, lacks=NOT_PRICED)


def _restart_usd(facts: _Facts, node: Node) -> float:
    """What the trainer's restart costs: its boot, in which the first rollout node waits. Where a price is not
    known, a node counts as much as the trainer: so it is waited for longer."""
    usd, node_usd = facts.prices.beside_usd_per_h, facts.market.most_usd_per_h(Role.ROLLOUT, _own_market(facts))
    if usd <= 0 or node_usd <= 0:
        usd = node_usd = usd if usd > 0 else 1.0
    boot_s = facts.market.start_s(Role.TRAINER, node.market)
    return max(IDLE_MIN_S * usd, boot_s * (usd + node_usd)) / 3600


def _idle_s(facts: _Facts, node: Node) -> float:
    since_s, shape = facts.state.shortages.rollout_since_s, facts.snapshot.measured.step
    assert since_s is not None
    trained_s = 0.0 if shape is None else shape.fixed_s  # as it lost its last node it may have had a step to train
    return facts.snapshot.silent_s(max(since_s, node.since_s)) - trained_s


def _own_worth_usd(facts: _Facts) -> float | None:
    """The worth of a step that the trainer makes alone: what one costs with the best number of on-demand nodes.
    None before any step was measured."""
    # Where none was made with nodes: one of them generates as fast as the trainer, or faster.
    shape = facts.snapshot.measured.step or facts.snapshot.measured.own_step
    if shape is None:
        return None
    replicas, beside = facts.spec.rollout.replicas, facts.prices.beside_usd_per_h
    prices = HourlyPrices(beside, facts.on_demand_usd_per_h or beside)
    return usd_a_step(shape, prices, best_count(shape, prices, max(1, replicas.min), replicas.max))


def _own_step_s(facts: _Facts, idle_limit_s: float, worth_usd: float | None) -> float | None:
    """Seconds of a step that the trainer makes alone, if that is worth its price or may turn out to be; else None.
    A run behind its deadline takes any step."""
    state, snapshot, usd = facts.state, facts.snapshot, facts.prices.beside_usd_per_h
    since_s, own = state.own_generation_since_s, snapshot.measured.own_step
    if since_s is None:
        return None
    limit_s = idle_limit_s if worth_usd is None else math.inf if usd <= 0 else worth_usd * 3600 / usd
    # The completions of several steps are made at once, before the first of them.
    at_once = max(1.0, steps_of_generation(facts.spec.grpo, processes_of(facts.spec)))
    if snapshot.silent_s(max(since_s, snapshot.stepped_at_s)) >= idle_limit_s + at_once * limit_s:
        return None  # it makes no progress
    if own is None:
        rows_s = OWN_STEP_ROWS * max(at_once, int(facts.spec.grpo.get("logging_steps", 1))) * limit_s
        return limit_s if snapshot.silent_s(since_s) < idle_limit_s + rows_s else None
    return own.seconds(1) if own.seconds(1) <= limit_s or facts.is_behind else None


def _parking_reason(facts: _Facts) -> str:
    node, usd = _waiting_trainer(facts), facts.prices.beside_usd_per_h
    assert node is not None
    idle_s = _idle_s(facts, node)
    cost = f", which cost {usd * idle_s / 3600:.2f} USD" if usd else ""
    waited = f"no rollout node is available, and the trainer has waited for {idle_s / 60:.0f} min{cost}"
    return f"{waited}, as much as its restart: its machine is returned until one is"


def _waiting_trainer(facts: _Facts) -> Node | None:
    """The trainer's node, if all it does is wait for rollout nodes, and what it has trained can be stored."""
    state, trainers = facts.state, facts.state.live(Role.TRAINER)
    if len(trainers) != 1 or facts.snapshot.machines is None or not stores_checkpoints(facts.spec):
        return None
    if state.rollback is not None and state.rollback.stage in UNTRAINED_ROLLBACK:
        return None
    if state.diverged is not None and facts.spec.policies.kl.action != "alert":
        return None  # which is answered first
    node, beat = trainers[0], facts.snapshot.heartbeat_of(trainers[0])
    works = node.phase is NodePhase.SERVING and node.attempt_ended_at_s is None
    return node if works and beat is not None and _only_waits(facts, beat) else None


def _only_waits(facts: _Facts, beat: Trainer) -> bool:
    fresh = facts.snapshot.silent_s(beat.beat_at_s) < HEARTBEAT_FRESH_S
    return fresh and beat.activity in GENERATES and beat.timeline == facts.state.timeline and not beat.leaving


def _nothing_available(facts: _Facts) -> bool:
    """Whether rollout nodes are refused, or fail, again and again on each market where they may be bought, and no
    machine for one is there. A launch that takes long is no lack of machines."""
    live = facts.state.live(Role.ROLLOUT)
    if any(node.phase is not NodePhase.REQUESTED for node in live):
        return False
    asked = {node.kind for node in live}
    if not facts.is_spot_too_expensive:
        asked.add(kind_of(Role.ROLLOUT, _own_market(facts)))
    # That there was no money for one once says nothing: what had taken it may be gone.
    if facts.may_buy_fallback and facts.market.is_paid_for(Market.ON_DEMAND):
        asked.add(kind_of(Role.ROLLOUT, Market.ON_DEMAND))
    return all(kind in facts.state.kinds and facts.state.kinds[kind].fails for kind in asked)


# Rollout nodes that wait for a trainer.

KEEP, RETURN = "nodes that wait for a trainer", "returning them"


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
    return compared if facts.prices.node_usd_per_h > 0 else replace(compared, lacks=NOT_PRICED)


def _trainerless_since_s(facts: _Facts) -> float | None:
    """Since when nodes wait: for the trainer's machine or, where they came while the run parks, for its old one
    to go."""
    if facts.state.phase is not RunPhase.PARKED:
        return facts.state.shortages.trainer_since_s
    there = (NodePhase.BOOTING, NodePhase.SERVING)
    return min((node.since_s for node in facts.state.live(Role.ROLLOUT) if node.phase in there), default=None)


def _hold_limit_s(facts: _Facts) -> float:
    boot_s = min(facts.market.start_s(Role.ROLLOUT, _own_market(facts)), facts.spec.policies.boot_timeout_s)
    return max(IDLE_MIN_S, boot_s)


def _release_reason(facts: _Facts) -> str:
    held_s = _hold_limit_s(facts)
    if facts.state.phase is RunPhase.PARKED:
        return f"the trainer's old machine has not gone for {held_s:.0f} s; requested again when it has"
    return f"the trainer has had no machine for {held_s:.0f} s; requested again when it has one"


# A parked run.


def _parked(facts: _Facts) -> Allocation:
    """One rollout node, on spot and, where that may be, on demand in turn; nothing while the old trainer drains,
    in which it could not be used. A run without the money to continue on any market stops: it would wait forever,
    or buy a node and then not the trainer's machine."""
    held = _without_trainer(facts)
    kept = Allocation(
        spot=len(facts.spot),
        on_demand=len(facts.fallback),
        releases=_release_reason(facts) if held is not None and held.best.name == RETURN else "",
        comparisons=() if held is None else (held,),
    )
    if facts.state.live(Role.ROLLOUT) or any(node.role is Role.TRAINER for node in facts.state.nodes.values()):
        return kept
    markets = [_own_market(facts), *([Market.ON_DEMAND] if facts.may_ask_both else [])]
    unpaid = [facts.market.resume_excess(market) for market in markets]
    if all(unpaid):
        return Allocation(stops=f"there is not the money to continue: {unpaid[0]}")
    spot, on_demand = (facts.market.kind(Role.ROLLOUT, market) for market in (Market.SPOT, Market.ON_DEMAND))
    probes = [] if facts.is_spot_too_expensive else [_own_market(facts)]
    if facts.may_ask_both and (spot.failed_at_s >= on_demand.failed_at_s or facts.is_spot_too_expensive):
        probes.append(Market.ON_DEMAND)
    return replace(kept, probes=tuple(probes), spot_too_expensive=facts.is_spot_too_expensive)
