"""What somebody could make of the same hours who knows the trace: arithmetic, and no controller."""

from __future__ import annotations

import math
from collections.abc import Iterator

from grpo_orch.orchestrator.simulate.market_trace import MarketTrace, Zone
from grpo_orch.orchestrator.simulate.simulated_cloud import Physics, Prices
from grpo_orch.orchestrator.simulate.simulation import Outcome
from grpo_orch.policies.fleet.market import market_of
from grpo_orch.policies.model.spec import RunSpec
from grpo_orch.policies.model.vocabulary import Market, Role

ORACLE = "oracle"
SHORTEST_S = 1.0  # from one look of the oracle's to the next
GIVES = 0.5  # of a zone that refuses more nobody can have machines when he wants them


def oracle(spec: RunSpec, trace: MarketTrace, physics: Physics, prices: Prices, hours: float) -> Outcome:
    """In the best region, at each moment the fleet whose steps are cheapest; machines need no start, and what is
    lost is replaced at once. It never parks, as the contenders' trainers do not, unless a trainer that is to be on
    spot has no machine."""
    regions = {zone.region for zone in trace}
    here = [tuple(zone for zone in trace if zone.region == region) for region in regions]
    return max((_in(zones, spec, physics, prices, hours) for zones in here), key=lambda one: one.steps_per_usd)


def _in(zones: MarketTrace, spec: RunSpec, physics: Physics, prices: Prices, hours: float) -> Outcome:
    gap_s, steps, usd = max(SHORTEST_S, min(zone.gap_s for zone in zones)), 0.0, 0.0
    for gap in range(math.ceil(hours * 3600 / gap_s)):
        lasts_s = min(gap_s, hours * 3600 - gap * gap_s)
        step_usd, step_s = min(_fleets(spec, zones, physics, prices, gap * gap_s), default=(0.0, math.inf))
        steps += lasts_s / step_s
        usd += lasts_s / step_s * step_usd
    return Outcome(steps, usd)


def _fleets(
    spec: RunSpec, zones: MarketTrace, physics: Physics, prices: Prices, time_s: float
) -> Iterator[tuple[float, float]]:
    """Dollars and seconds of a step, with each number of the cheapest nodes that are to be had."""
    spot = sorted(_machines(zones, Market.SPOT, prices.spot_usd_per_h, time_s))
    on_demand = tuple(zone for zone in zones if zone.market is Market.ON_DEMAND)
    listed = min((zone.price_at(time_s) for zone in on_demand if zone.count_at(time_s)), default=1.0)
    trainer_usd_per_h = prices.trainer_usd_per_h * listed
    if market_of(Role.TRAINER, spec) is Market.SPOT:
        if not spot:
            return
        _, trainer_usd_per_h, _ = spot.pop(0)
    most = spec.rollout.replicas.max
    others = list(_machines(on_demand, Market.ON_DEMAND, prices.node_usd_per_h, time_s))
    if not on_demand:  # as many as are asked for
        others = [(prices.node_usd_per_h, prices.node_usd_per_h, 1.0)] * most
    nodes = sorted([*spot, *others])[:most]
    for count in range(1, len(nodes) + 1):
        step_s = physics.step_s(sum(speed for _, _, speed in nodes[:count]))
        yield (trainer_usd_per_h + sum(usd for _, usd, _ in nodes[:count])) * step_s / 3600, step_s


def _machines(
    zones: MarketTrace, market: Market, usual_usd_per_h: float, time_s: float
) -> Iterator[tuple[float, float, float]]:
    """Of each that is to be had: USD an hour of what one of speed 1 does, USD an hour, speed."""
    for zone in zones:
        if zone.market is market and zone.refuses <= GIVES:
            usd_per_h = usual_usd_per_h * zone.price_at(time_s)
            for _ in range(_count(zone, time_s)):
                yield usd_per_h / zone.speed, usd_per_h, zone.speed


def _count(zone: Zone, time_s: float) -> int:
    return zone.count_at(time_s) if zone.quota is None else min(zone.quota, zone.count_at(time_s))
