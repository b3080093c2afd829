"""Rollout nodes on demand that replace unavailable spot machines: when they pay, how many, and for how long.

With k nodes on spot at q an hour, j on demand at p and P for everything else, a step costs
(P + k q + j p)(a + b/(k + j)). With n = k + j that is (P - k (p - q) + n p)(a + b/n): the sum of
`policies.fleet.how_many`, with less beside the nodes. So the more there is on spot, the fewer stand in.
"""

from __future__ import annotations

from policies.control.fleet.deadline import boot_s, course_now, is_behind, nodes_in_time
from policies.control.fleet.markets import may_stand_in
from policies.control.fleet.probing import may_probe
from policies.control.fleet.size import hourly_prices
from policies.control.fleet.where import is_paid_for
from policies.control.tick import Tick
from policies.fleet.how_many import HourlyPrices, StepShape, best_count
from policies.model.buying import HELD_S, MachineKind
from policies.model.phases import FILLING_NODE
from policies.model.state import Node, RunState
from policies.model.vocabulary import Market, NodePhase, Role, RunPhase, kind_of

WAIT_MIN_S = 60.0  # zones that refuse for a moment are no outage


def stand_ins(
    shape: StepShape | None,
    beside_usd_per_h: float,
    on_demand_usd_per_h: float,
    spot: int,
    spot_usd_per_h: float,
    low: int,
    high: int,
) -> int:
    """Return how many nodes on demand make a step cheapest beside `spot` ones, `low` to `high` nodes in all.

    Without a measured step, what the trainer needs to go on: `low` or one node in all.
    """
    least = max(low, spot, 1)
    if shape is None or spot >= high:
        return max(0, min(least, high) - spot)
    beside = beside_usd_per_h - spot * (on_demand_usd_per_h - spot_usd_per_h)
    if beside <= 0:
        return least - spot
    return best_count(shape, HourlyPrices(beside, on_demand_usd_per_h), least, high) - spot


def wait_s(nodes: int, on_demand_usd_per_h: float, beside_usd_per_h: float, boot_s: float) -> float:
    """Seconds of an idle trainer that cost what starting so many nodes on demand does.

    Waiting so long before they are bought costs at most twice the best choice, however long spot stays away.
    Raises ValueError where a price is not known.
    """
    if beside_usd_per_h <= 0 or on_demand_usd_per_h <= 0:
        raise ValueError("the wait needs both prices")
    return max(WAIT_MIN_S, nodes * on_demand_usd_per_h * boot_s / beside_usd_per_h)


def stand_ins_of(state: RunState) -> list[Node]:
    """Those that are there or come, the newest first."""
    found = [one for one in state.nodes.values() if one.stand_in and one.phase in FILLING_NODE]
    return sorted(found, key=lambda node: node.id, reverse=True)


def surplus(tick: Tick) -> int:
    """How many may go: spot machines that have held do as well, and the deadline is as safe with them. None while
    the cloud does not answer: nobody knows which are still there."""
    if tick.snapshot.machines is None or not (there := stand_ins_of(tick.state)):
        return 0
    held = [one for one in _on_spot(tick) if tick.waited_s(one.since_s) >= HELD_S and one.served]
    held = [one for one in held if one.phase is NodePhase.SERVING]
    if not held or ((course := course_now(tick)) is not None and not course.is_safe):
        return 0
    return max(0, len(there) - _wanted(tick, len(held)))


def missing(tick: Tick) -> int:
    """How many are to be bought now: the trainer has waited for spot for as long as their start costs, the run is
    behind on the way to its deadline, or spot is too dear. A parked run asks for one in turn with one on spot."""
    if tick.state.phase is RunPhase.PARKED:
        return int(may_probe(tick.state) and _on_demand_in_turn(tick))
    trainer = [one for one in tick.state.trainer_machines if one.phase is NodePhase.SERVING]
    short_s = tick.state.spot_short_since_s
    if not trainer or not may_be_bought(tick):
        return 0
    too_dear = is_spot_too_dear(tick)
    if short_s is None and not too_dear:
        return 0
    spot = tick.state.kinds.get(kind_of(Role.ROLLOUT, Market.SPOT), MachineKind())
    if spot.comes_and_fails and not too_dear:
        return 0  # another market would not mend what never serves
    there = [one for one in _on_spot(tick) if one.phase is not NodePhase.REQUESTED]
    wanted = _wanted(tick, len(there))
    lacking = max(0, wanted - len(stand_ins_of(tick.state)))
    if short_s is None or too_dear:
        return lacking
    beside = hourly_prices(tick.state).beside_usd_per_h
    pays_s = wait_s(max(1, wanted), on_demand_usd_per_h(tick), beside, boot_s(tick.state))
    limit_s = WAIT_MIN_S if is_behind(tick) else pays_s
    return lacking if tick.waited_s(max(short_s, trainer[0].since_s)) >= limit_s else 0


def may_be_bought(tick: Tick) -> bool:
    """Whether nodes on demand may stand in at all, sooner or later."""
    return is_open(tick) and hourly_prices(tick.state).beside_usd_per_h > 0


def is_spot_too_dear(tick: Tick) -> bool:
    """Whether there is no money for the first node on spot, which may cost more than one on demand, and there is
    for that one: then nothing is gained by waiting for spot, nor is the budget reached. Also where the last of
    them never worked, for no other can show that it does."""
    parked = tick.state.phase is RunPhase.PARKED  # without a trainer, by whose price `may_be_bought` goes
    if not (is_open(tick) if parked else may_be_bought(tick)) or _on_spot(tick):
        return False
    return not is_paid_for(tick, Role.ROLLOUT, Market.SPOT) and is_paid_for(tick, Role.ROLLOUT, Market.ON_DEMAND)


def is_open(tick: Tick) -> bool:
    """Whether both markets may be asked, and what fails on spot is not that machines never serve. To a parked run
    that is refused spot no other machine of it can show that they do by now: one on demand may."""
    spot = tick.state.kinds.get(kind_of(Role.ROLLOUT, Market.SPOT), MachineKind())
    unknown = tick.state.phase is RunPhase.PARKED and spot.refused_in_a_row > 0
    return may_stand_in(tick.spec) and on_demand_usd_per_h(tick) > 0 and (unknown or not spot.never_serves)


def _on_demand_in_turn(tick: Tick) -> bool:
    spot, on_demand = (
        tick.state.kinds.get(kind_of(Role.ROLLOUT, market), MachineKind())
        for market in (Market.SPOT, Market.ON_DEMAND)
    )
    return is_open(tick) and (spot.failed_at_s >= on_demand.failed_at_s or is_spot_too_dear(tick))


def _wanted(tick: Tick, spot: int) -> int:
    prices, replicas = hourly_prices(tick.state), tick.spec.rollout.replicas
    beside, node = prices.beside_usd_per_h, prices.node_usd_per_h
    shape, price = tick.snapshot.step_shape, on_demand_usd_per_h(tick)
    cheapest = stand_ins(shape, beside, price, spot, min(node, price), replicas.min, replicas.max)
    if shape is None:
        return cheapest
    return max(cheapest, nodes_in_time(tick, shape, spot + len(stand_ins_of(tick.state))) - spot)


def _on_spot(tick: Tick) -> list[Node]:
    return [one for one in tick.state.live(Role.ROLLOUT) if not one.stand_in and one.phase in FILLING_NODE]


def on_demand_usd_per_h(tick: Tick) -> float:
    """USD an hour of a rollout node on demand: of those that were seen, else the most; 0: not known."""
    seen = [one.on_demand_usd_per_h for one in tick.state.live(Role.ROLLOUT) if one.on_demand_usd_per_h > 0]
    most = (tick.snapshot.prices or {}).get(kind_of(Role.ROLLOUT, Market.ON_DEMAND), 0.0)
    return sum(seen) / len(seen) if seen else most
