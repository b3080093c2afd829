"""The plan: the few allocations that are possible now, and the one that loses the least money.

The objective. A candidate costs c USD an hour, makes a step in t seconds, and getting there costs `change_usd`.
Over a horizon T it loses

    (c - v * 3600 / t) * T + change_usd

with v, the worth of a step: the least that one costs with what can be bought, on demand where spot is unavailable.
So the cheapest allocation loses nothing but its change, a waiting trainer loses its price, a parked run loses
nothing further. The candidate with the smallest loss is chosen; one that keeps the deadline comes before all that
do not.

The horizon is how long the present situation has lasted, and at most as long as a machine lasts: nobody knows when
spot comes back, and a shortage that has lasted for T is expected to last as long again. Waiting then costs at most
twice the best choice, however long it lasts (ski rental). Falling back to on demand, parking, returning nodes that
wait for a trainer and changing the size of the fleet all follow from this one comparison.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from policies.control.objective import steps_of_generation
from policies.control.observed import HEARTBEAT_FRESH_S
from policies.control.snapshot import GENERATES, Snapshot, Trainer
from policies.fleet.budget import Purse, caps_of
from policies.fleet.deadline import Course, course_of, nodes_in_time
from policies.fleet.deadline import boot_s as fallback_boot_s
from policies.fleet.market import LOSSES_AN_HOUR, Offers, market_of, may_fall_back
from policies.fleet.steps import HourlyPrices, StepShape, best_count, optimum, usd_a_step
from policies.model.buying import BACK_OFF_MAX_EXTRA_S, HELD_S, PROBE_MAX_S
from policies.model.phases import FILLING_NODE, LIVE_NODE, UNTRAINED_ROLLBACK
from policies.model.spec import RunSpec, processes_of, stores_checkpoints
from policies.model.state import Node, RunState
from policies.model.vocabulary import Market, NodePhase, Role, RunPhase, kind_of, slot_of

WAIT_MIN_S = 60.0  # zones that refuse for a moment are no shortage
IDLE_MIN_S = 300.0  # a machine is often available again within minutes, and returning one takes about as long
SETTLES_S = 600.0  # after a change of size: a node needs that long to come, and the next steps have to show it
STAYS_S = PROBE_MAX_S  # of an on-demand node before spot is tried instead: a try in vain then costs a few percent
TRIED_ROWS = 2  # logged steps until an own one is measured: it ends where the next generation is logged
NOISE_SHARE = 0.01  # of a step's cost: no smaller difference is told from what a measurement is off by
FEW = 8  # counts up to which all are compared
UNMEASURED = StepShape(3600.0, 0.0)  # before steps were measured: any node will do, and more help nothing


# Candidates and the objective.


@dataclass(frozen=True, slots=True)
class Candidate:
    """An allocation: what it is, what it costs, and what it makes."""

    name: str
    usd_per_h: float
    step_s: float = math.inf  # infinite: it makes no step
    change_usd: float = 0.0
    spot: int = 0
    on_demand: int = 0
    in_time: bool = True  # it keeps the deadline, or none asks for more

    @property
    def step_usd(self) -> float:
        return self.usd_per_h * self.step_s / 3600

    def loss_usd(self, worth_usd: float, horizon_s: float) -> float:
        """USD that are spent over the horizon and bring nothing, where a step is worth `worth_usd`."""
        earned = worth_usd * 3600 / self.step_s if math.isfinite(self.step_s) else 0.0
        return (self.usd_per_h - earned) * horizon_s / 3600 + self.change_usd

    @property
    def words(self) -> str:
        if math.isfinite(self.step_s):
            return f"{self.name} make a step {_usd(self.step_usd)} USD"
        return f"{self.name} costs {self.usd_per_h:.2f} USD/h and makes no step"


@dataclass(frozen=True, slots=True)
class Comparison:
    """Candidates for one question, best first."""

    question: str
    worth_usd: float  # of a step
    horizon_s: float
    candidates: tuple[Candidate, ...]
    reference: Candidate | None = None  # what a step would cost with nodes that are bought only in a shortage

    @property
    def best(self) -> Candidate:
        return self.candidates[0]

    @property
    def runner_up(self) -> Candidate | None:
        return self.candidates[1] if len(self.candidates) > 1 else None

    @property
    def difference_usd(self) -> float:
        """What the runner-up loses more, over the horizon."""
        if self.runner_up is None:
            return 0.0
        best, other = (one.loss_usd(self.worth_usd, self.horizon_s) for one in self.candidates[:2])
        return other - best

    @property
    def words(self) -> str:
        """`3 on spot at 2.10 USD/h make a step 0.83 USD; 2 on spot would make it 0.91, 2 on demand 1.10`."""
        others = [one for one in (self.runner_up, self.reference) if one is not None]
        if not math.isfinite(self.best.step_s) or any(not math.isfinite(one.step_s) for one in others):
            return "; ".join(one.words for one in (self.best, *others))
        if not others:
            return self.best.words
        would = ", ".join(f"{one.name} {_usd(one.step_usd)}" for one in others[1:])
        first = f"{others[0].name} would make it {_usd(others[0].step_usd)}"
        return f"{self.best.words}; {first}{', ' if would else ''}{would}"


def _usd(value: float) -> str:
    return f"{value:.2f}" if value >= 1 else f"{value:.3f}"


def compare(
    question: str, candidates: Sequence[Candidate], horizon_s: float, worth_usd: float | None = None
) -> Comparison:
    """Rank the candidates by what they lose. Of equals the first in order is best: put the present one first.

    `worth_usd`: of a step; None: the least that one costs with a candidate.
    """
    costs = [one.step_usd for one in candidates if math.isfinite(one.step_s)]
    worth = min(costs, default=0.0) if worth_usd is None else worth_usd
    ranked = sorted(candidates, key=lambda one: (not one.in_time, one.loss_usd(worth, horizon_s)))
    return Comparison(question, worth, horizon_s, tuple(ranked))


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
    asks_again: bool = False  # an on-demand node makes room for spot under the cap
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
        return self.comparisons[-1].words if self.comparisons else ""


# What a plan starts from.


def rollouts_wanted(state: RunState, spec: RunSpec) -> int:
    """Return how many rollout nodes there are to be on their own market."""
    replicas = spec.rollout.replicas
    return replicas.max if state.size.nodes is None else min(max(state.size.nodes, replicas.min), replicas.max)


def wanted_slots(spec: RunSpec) -> Iterator[tuple[Role, str, bool]]:
    """Every slot that there may be: role, name, and whether the run needs it immediately."""
    yield Role.TRAINER, slot_of(Role.TRAINER, 0), True
    for place in range(spec.rollout.replicas.max):
        yield Role.ROLLOUT, slot_of(Role.ROLLOUT, place), place < spec.rollout.replicas.min


def hourly_prices(state: RunState) -> HourlyPrices:
    """Return what the machines that are there cost; 0 where it is not known. Nodes: their average."""
    trainer_usd, rollouts = 0.0, list[float]()
    for node in state.nodes.values():
        if node.role is Role.TRAINER and node.phase in LIVE_NODE and node.phase is not NodePhase.REQUESTED:
            trainer_usd = max(trainer_usd, node.price_usd_per_h)
        elif node.role is Role.ROLLOUT and node.phase in LIVE_NODE and not node.stand_in:
            rollouts += [node.price_usd_per_h] if node.price_usd_per_h > 0 else []
    return HourlyPrices(trainer_usd, sum(rollouts) / len(rollouts) if rollouts else 0.0)


def size_words(shape: StepShape, prices: HourlyPrices) -> str:
    """`a step is 60.0 s and 240.0 node-seconds of generation, ...: 2.6 make it cheapest`."""
    beside = "and" if shape.ahead_s is None else "beside"
    step = f"a step is {shape.fixed_s:.1f} s {beside} {shape.generation_node_s:.1f} node-seconds of generation"
    usd = f"the trainer costs {prices.beside_usd_per_h:.2f} USD/h and a node {prices.node_usd_per_h:.2f}"
    return f"{step}, {usd}: {optimum(shape, prices):.1f} make it cheapest"


def fallback_nodes(state: RunState) -> list[Node]:
    """On-demand nodes that replace unavailable spot, and are there or come."""
    return [node for node in state.nodes.values() if node.stand_in and node.phase in FILLING_NODE]


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
        if self.market.is_paid_for(Role.ROLLOUT, Market.SPOT):
            return False
        return self.market.is_paid_for(Role.ROLLOUT, Market.ON_DEMAND)

    def waited_s(self, since_s: float) -> float:
        return self.now_s - since_s


def plan(market: Offers, state: RunState, snapshot: Snapshot, spec: RunSpec) -> Allocation:
    """Return what a live run is to have now."""
    facts = _Facts(market, state, snapshot, spec)
    caps = caps_of(state, spec)
    if caps.usd is not None and (why := Purse(state, snapshot, spec).exceeded()):
        return Allocation(stops=why)
    if state.phase is RunPhase.PARKED:
        return _parked(facts)
    size, sized = _size(facts)
    fallback, shortage = _fallback(facts)
    idle = _idle_trainer(facts) if state.phase is RunPhase.TRAINING else None
    held = _without_trainer(facts)
    compared = tuple(one for one in (sized, shortage, idle, held) if one is not None)
    changed = size != rollouts_wanted(state, spec)
    asks_again = _asks_spot_again(facts) and fallback == len(facts.fallback)
    return Allocation(
        trainer=True,
        spot=size,
        on_demand=fallback - asks_again,
        size_reason=f"{sized.words}; {_size_reason(facts)}" if changed and sized is not None else "",
        parks=_parking_reason(facts) if idle is not None and idle.best.name == PARK else "",
        releases=_release_reason(facts) if held is not None and held.best.name == RETURN else "",
        asks_again=asks_again,
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
    horizon_s = min(sized_s, lasts_s) if sized_s >= SETTLES_S else 0.0  # else the last change has not shown yet
    start_s = facts.market.start_s(Role.ROLLOUT, market)
    on_demand_usd = facts.on_demand_usd_per_h if facts.may_buy_fallback else 0.0
    found = compare_sizes(
        shape, prices, market, now, (low, replicas.max), start_s, horizon_s, _zones(facts.spot), on_demand_usd
    )
    return (found.best.spot if horizon_s else now), found


def compare_sizes(
    shape: StepShape,
    prices: HourlyPrices,
    market: Market,
    now: int,
    bounds: tuple[int, int],
    start_s: float,
    horizon_s: float = 0.0,
    zones: str = "",
    on_demand_usd_per_h: float = 0.0,
) -> Comparison:
    """Compare sizes of the fleet, the present one first.

    Args:
        shape: of a step.
        prices: both known.
        market: on which the nodes are bought.
        now: the present size.
        bounds: of the sizes that run.yaml and the deadline allow.
        start_s: of a node, which each change pays for.
        horizon_s: over which a change has to pay; 0: none does.
        zones: where the present nodes are.
        on_demand_usd_per_h: of a node on demand, for reference; 0: there are none.
    """
    low, high = bounds
    node_usd, noise_usd = prices.node_usd_per_h, NOISE_SHARE * prices.beside_usd_per_h * horizon_s / 3600
    where = "on spot" if market is Market.SPOT else "on demand"
    candidates = [
        Candidate(
            name=f"{count} {where}{zones} at {node_usd:.2f} USD/h" if count == now else f"{count} {where}",
            usd_per_h=prices.beside_usd_per_h + count * node_usd,
            step_s=shape.seconds(max(1, count)),
            change_usd=abs(count - now) * node_usd * start_s / 3600 + (count != now) * noise_usd,
            spot=count,
            in_time=count >= low or not horizon_s,
        )
        for count in dict.fromkeys([now, *_few(shape, prices, low, high)])
    ]
    reference = None
    if on_demand_usd_per_h > 0:
        bought = HourlyPrices(prices.beside_usd_per_h, on_demand_usd_per_h)
        count = best_count(shape, bought, low, max(low, high))
        usd_per_h = bought.beside_usd_per_h + count * on_demand_usd_per_h
        reference = Candidate(f"{count} on demand", usd_per_h, shape.seconds(count), on_demand=count)
    return replace(compare("size", candidates, horizon_s), reference=reference)


def size_sentence(spec: RunSpec, state: RunState, shape: StepShape) -> str:
    """Return what a step costs with the present size and with others, from what the journal knows."""
    market, replicas, live = market_of(Role.ROLLOUT, spec), spec.rollout.replicas, state.live(Role.ROLLOUT)
    bounds, now = (max(1, replicas.min), max(1, replicas.max)), rollouts_wanted(state, spec)
    on_demand = [node.on_demand_usd_per_h for node in live if node.on_demand_usd_per_h > 0]
    usd = sum(on_demand) / len(on_demand) if on_demand and may_fall_back(spec) else 0.0
    start_s, zones = fallback_boot_s(state), _zones([node for node in live if not node.stand_in])
    prices = hourly_prices(state)
    return compare_sizes(shape, prices, market, now, bounds, start_s, zones=zones, on_demand_usd_per_h=usd).words


def _zones(nodes: Sequence[Node]) -> str:
    """` in us-east-1a and us-east-1b`; empty where there are more, or none is known."""
    zones = sorted({node.pool.zone for node in nodes if node.pool is not None and node.pool.zone})
    return f" in {' and '.join(zones)}" if 0 < len(zones) <= 2 else ""


def _few(shape: StepShape, prices: HourlyPrices, low: int, high: int) -> list[int]:
    """Return the counts worth comparing: all, or those around the best."""
    if high - low < FEW:
        return list(range(low, high + 1))
    best = best_count(shape, prices, low, high)
    return sorted({low, *(count for count in (best - 1, best, best + 1) if low <= count <= high), high})


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
    held = [
        node
        for node in facts.spot
        if node.phase is NodePhase.SERVING and node.served and facts.waited_s(node.since_s) >= HELD_S
    ]
    if not held or (facts.course is not None and not facts.course.is_safe):
        return None
    most = min(len(facts.fallback), max(0, facts.spec.rollout.replicas.max - len(held)))
    candidates = _mixes(facts, len(held), range(_least(facts, len(held)), most + 1))
    return compare("return on demand", candidates, HELD_S) if candidates else None


def _fallback_to_buy(facts: _Facts) -> Comparison | None:
    """Compare waiting for spot with on-demand nodes, and with the trainer's own generation where that is measured.
    Until the shortage has lasted a minute, none are bought."""
    trainer = [node for node in facts.state.trainer_machines if node.phase is NodePhase.SERVING]
    short_s = facts.state.shortages.spot_since_s
    if not trainer or not facts.may_buy_fallback or (short_s is None and not facts.is_spot_too_expensive):
        return None
    if not facts.is_spot_too_expensive and facts.market.kind(Role.ROLLOUT, Market.SPOT).comes_and_fails:
        return None  # another market would not help machines that never serve
    present, fallback = sum(node.phase is not NodePhase.REQUESTED for node in facts.spot), len(facts.fallback)
    lasted_s = math.inf if short_s is None else facts.waited_s(max(short_s, trainer[0].since_s))
    lasts_s = 3600 / LOSSES_AN_HOUR[Market.SPOT]
    horizon_s = lasts_s if facts.is_spot_too_expensive else min(lasted_s, lasts_s)
    if horizon_s < WAIT_MIN_S:
        return None
    least = _least(facts, present)
    shape, prices = facts.snapshot.measured.step or UNMEASURED, facts.prices
    beside = prices.beside_usd_per_h - present * (facts.on_demand_usd_per_h - _spot_usd_per_h(facts))
    most = facts.spec.rollout.replicas.max - present
    if beside <= 0 or facts.snapshot.measured.step is None:
        counts = [least]
    else:
        low, high = least + present, max(most, least) + present
        around = _few(shape, HourlyPrices(beside, facts.on_demand_usd_per_h), max(1, low), max(1, high))
        counts = [count - present for count in around]
    bought = [count for count in counts if count > fallback]
    candidates = _mixes(facts, present, [fallback, *bought])
    own = facts.snapshot.measured.own_step
    if own is not None and present + fallback == 0 and facts.spec.rollout.own_generation_after_s is not None:
        seconds = own.seconds(1)
        candidates.insert(1, Candidate(OWN, prices.beside_usd_per_h, seconds, in_time=not facts.is_behind))
    return compare("shortage of spot", candidates, horizon_s)


def _least(facts: _Facts, spot: int) -> int:
    """The on-demand nodes without which `spot` nodes are fewer than run.yaml or the deadline ask for."""
    shape, replicas = facts.snapshot.measured.step, facts.spec.rollout.replicas
    needed = 0
    if shape is not None:
        needed = nodes_in_time(facts.course, shape, replicas.max, spot + len(facts.fallback))
    return max(0, min(max(1, replicas.min, needed), max(1, replicas.max)) - spot)


def _mixes(facts: _Facts, spot: int, counts: Sequence[int]) -> list[Candidate]:
    """Return candidates with that many spot nodes, and each count of on-demand nodes; the present one first."""
    shape, prices, usd = facts.snapshot.measured.step or UNMEASURED, facts.prices, facts.on_demand_usd_per_h
    start_usd = usd * fallback_boot_s(facts.state) / 3600
    least, fallback = _least(facts, spot), len(facts.fallback)
    enough = max(1, facts.spec.rollout.replicas.min)  # a smaller fleet counts as none
    return [
        Candidate(
            name=_mix_words(spot, count),
            usd_per_h=prices.beside_usd_per_h + spot * _spot_usd_per_h(facts) + count * usd,
            step_s=math.inf if count + spot < enough else shape.seconds(spot + count),
            change_usd=max(0, count - fallback) * start_usd,
            spot=spot,
            on_demand=count,
            in_time=count >= least or not facts.is_behind,
        )
        for count in dict.fromkeys(counts)
    ]


def _mix_words(spot: int, on_demand: int) -> str:
    parts = [f"{spot} on spot" if spot else "", f"{on_demand} on demand" if on_demand else ""]
    return " and ".join(part for part in parts if part) or "waiting for spot"


def _spot_usd_per_h(facts: _Facts) -> float:
    return min(facts.prices.node_usd_per_h, facts.on_demand_usd_per_h)


def _asks_spot_again(facts: _Facts) -> bool:
    """Whether an on-demand node is returned because a spot machine would fit under the cap an hour instead of it:
    not while machines come or go, nor before each has served for STAYS_S, nor where the deadline depends on the
    only one."""
    spec, state, snapshot = facts.spec, facts.state, facts.snapshot
    if not facts.fallback or caps_of(state, spec).usd_per_h is None or state.phase is not RunPhase.TRAINING:
        return False
    if None in (snapshot.pools, snapshot.prices, snapshot.machines):
        return False
    if facts.market.kind(Role.ROLLOUT, Market.SPOT).comes_and_fails:
        return False
    rollouts = [node for node in state.nodes.values() if node.role is Role.ROLLOUT]
    if len(rollouts) == 1 and facts.course is not None and not facts.course.is_safe:
        return False
    settled = all(node.phase is NodePhase.SERVING for node in rollouts)
    if not settled or any(facts.waited_s(node.since_s) < STAYS_S for node in facts.fallback):
        return False
    if len(facts.spot) >= rollouts_wanted(state, spec):
        return False
    leaves = max(facts.fallback, key=lambda node: node.usd_per_h)
    without = [node for node in state.nodes.values() if node is not leaves]
    with_all, with_others = (Purse(state, snapshot, spec, nodes) for nodes in (None, without))
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
        candidates.append(Candidate(OWN, facts.prices.beside_usd_per_h, own_s))
    return compare("idle trainer", candidates, _idle_s(facts, node), worth_usd)


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
        rows_s = TRIED_ROWS * max(at_once, int(facts.spec.grpo.get("logging_steps", 1))) * limit_s
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
    """Whether rollout nodes are refused, or fail, again and again on each market where they may be bought. A
    launch that takes long is no lack of machines."""
    asked = {node.kind for node in facts.state.live(Role.ROLLOUT)}
    if not facts.is_spot_too_expensive:
        asked.add(kind_of(Role.ROLLOUT, _own_market(facts)))
    # That there was no money for one once says nothing: what had taken it may be gone.
    if facts.may_buy_fallback and facts.market.is_paid_for(Role.ROLLOUT, Market.ON_DEMAND):
        asked.add(kind_of(Role.ROLLOUT, Market.ON_DEMAND))
    return all(kind in facts.state.kinds and facts.state.kinds[kind].fails for kind in asked)


# Rollout nodes that wait for a trainer.

KEEP, RETURN = "nodes that wait for a trainer", "returning them"


def _without_trainer(facts: _Facts) -> Comparison | None:
    """Compare keeping the rollout nodes while the trainer has no machine with starting them again later."""
    since_s = _trainerless_since_s(facts)
    nodes = len(facts.state.live(Role.ROLLOUT))
    if since_s is None or facts.snapshot.machines is None or not nodes:
        return None
    usd = nodes * (facts.prices.node_usd_per_h or 1.0)
    candidates = [Candidate(KEEP, usd), Candidate(RETURN, 0.0, change_usd=usd * _hold_s(facts) / 3600)]
    return compare("no trainer", candidates, facts.snapshot.silent_s(since_s))


def _trainerless_since_s(facts: _Facts) -> float | None:
    """Since when nodes wait: for the trainer's machine or, where they came while the run parks, for its old one
    to go."""
    if facts.state.phase is not RunPhase.PARKED:
        return facts.state.shortages.trainer_since_s
    there = (NodePhase.BOOTING, NodePhase.SERVING)
    return min((node.since_s for node in facts.state.live(Role.ROLLOUT) if node.phase in there), default=None)


def _hold_s(facts: _Facts) -> float:
    boot_s = min(facts.market.start_s(Role.ROLLOUT, _own_market(facts)), facts.spec.policies.boot_timeout_s)
    return max(IDLE_MIN_S, boot_s)


def _release_reason(facts: _Facts) -> str:
    held_s = _hold_s(facts)
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
    unpaid = [facts.market.excess_again(market) for market in markets]
    if all(unpaid):
        return Allocation(stops=f"there is not the money to continue: {unpaid[0]}")
    spot, on_demand = (facts.market.kind(Role.ROLLOUT, market) for market in (Market.SPOT, Market.ON_DEMAND))
    probes: list[Market] = []
    if facts.may_ask_both and (spot.failed_at_s >= on_demand.failed_at_s or facts.is_spot_too_expensive):
        probes.append(Market.ON_DEMAND)
    if not facts.is_spot_too_expensive:
        probes.append(_own_market(facts))
    return replace(kept, probes=tuple(probes), spot_too_expensive=facts.is_spot_too_expensive)


# Where spot is asked at all, it is asked at least that often.
ASKED_S = 2 * BACK_OFF_MAX_EXTRA_S
