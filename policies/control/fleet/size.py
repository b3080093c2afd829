"""How many rollout nodes there are to be now, by `policies.fleet.how_many`, and the return of those too many.

Until steps were measured and prices are known there are as many as `replicas.max` says. A node goes back while
nothing is generated, so that nothing is on it; one that has not come up yet goes at once.
"""

from __future__ import annotations

from policies.control.fleet.deadline import course_now, deadline_words, nodes_in_time
from policies.control.snapshot import OWN_GENERATION
from policies.control.tick import Tick
from policies.fleet.how_many import HourlyPrices, StepShape, damped_count, optimum
from policies.model.events import FleetSized
from policies.model.phases import FILLING_NODE
from policies.model.spec import RunSpec
from policies.model.state import Node, RunState
from policies.model.vocabulary import NodePhase, Role

SETTLES_S = 600.0  # after a change: a node needs that long to come, and the next steps have to show what it did
RETURN_WITHIN_S = 900.0  # a trainer that is always seen to generate keeps a node no longer: requests are handed on
GENERATING = "generating"  # an activity of a trainer: nodes make what it asks for
GENERATES = frozenset({GENERATING, "waiting", OWN_GENERATION})


def rollouts_wanted(state: RunState, spec: RunSpec) -> int:
    """Return how many rollout nodes there are to be."""
    replicas = spec.rollout.replicas
    return replicas.max if state.fleet_size is None else min(max(state.fleet_size, replicas.min), replicas.max)


def hourly_prices(state: RunState) -> HourlyPrices:
    """Return what the machines that are there cost; 0 where it is not known. Nodes: their average."""
    beside = max((node.price_usd_per_h for node in state.trainer_machines), default=0.0)
    nodes = [
        node.price_usd_per_h for node in state.live(Role.ROLLOUT) if node.price_usd_per_h > 0 and not node.stand_in
    ]
    return HourlyPrices(beside, sum(nodes) / len(nodes) if nodes else 0.0)


def size_fleet(tick: Tick) -> None:
    """Journal another size of the fleet where a step is clearly cheaper with it, or the deadline takes more."""
    shape, replicas = tick.snapshot.step_shape, tick.spec.rollout.replicas
    prices = hourly_prices(tick.state)
    if shape is None or not prices.known or replicas.min >= replicas.max:
        return
    if tick.state.fleet_size is not None and tick.waited_s(tick.state.fleet_sized_at_s) < SETTLES_S:
        return
    if tick.spec.policies.fleet.deadline is not None and course_now(tick) is None:
        return  # how far the run is, is not known at this moment
    now = rollouts_wanted(tick.state, tick.spec)
    in_time = nodes_in_time(tick, shape, now)
    size = damped_count(shape, prices, max(1, replicas.min, in_time), replicas.max, now)
    if size != now:
        reason = size_words(shape, prices) + deadline_words(tick, in_time)
        tick.emit(FleetSized(size, now, reason), f"{size} rollout nodes in place of {now}: {reason}")


def size_words(shape: StepShape, prices: HourlyPrices) -> str:
    """Say why, with the numbers."""
    beside = "and" if shape.ahead_s is None else "beside"
    step = f"a step is {shape.fixed_s:.1f} s {beside} {shape.generation_node_s:.1f} node-seconds of generation"
    usd = f"the trainer costs {prices.beside_usd_per_h:.2f} USD/h and a node {prices.node_usd_per_h:.2f}"
    return f"{step}, {usd}: {optimum(shape, prices):.1f} make it cheapest"


def return_surplus(tick: Tick) -> None:
    """Return the surplus nodes: first those that do not serve, then those with a rebalance recommendation, then
    the most expensive."""
    nodes = [node for node in tick.state.live(Role.ROLLOUT) if node.phase in FILLING_NODE and not node.stand_in]
    wanted = rollouts_wanted(tick.state, tick.spec)
    if len(nodes) <= wanted:
        return
    pays = "are enough in time" if tick.spec.policies.fleet.deadline else "make a step cheapest"
    for node in sorted(nodes, key=_worth)[: len(nodes) - wanted]:
        if node.phase is not NodePhase.SERVING or may_go(tick):
            price = f" at {node.price_usd_per_h:.2f} USD/h" if node.price_usd_per_h else ""
            why = f"returned{price}, one of {len(nodes)} where {wanted} {pays}"
            tick.move(node, NodePhase.TERMINATING, why)


def _worth(node: Node) -> tuple[int, bool, float, float]:
    serves = [NodePhase.REQUESTED, NodePhase.BOOTING, NodePhase.SERVING].index(node.phase)
    return serves, not node.rebalance_recommended, -node.price_usd_per_h, -node.requested_at_s


def may_go(tick: Tick) -> bool:
    beat = tick.snapshot.trainer
    calm = beat is not None and beat.activity not in GENERATES
    return calm or tick.waited_s(tick.state.fleet_sized_at_s) > RETURN_WITHIN_S
