"""Whether a machine is bought in place of one that its cloud says is at risk, before that one is taken.

Of machines at risk in a pool h an hour are taken, told from the pool's own as its losses are. Another in its place
serves after T. A loss after d < T finds it on its way, a later one finds it at work: the fleet is short of a node
for min(d, T) less than if another were asked for at the loss. Of losses at the rate h within W that is

    E = (1 - exp(-h T)) / h - T exp(-h W)

of which the other's own E is taken off, for it may be taken as well. So much time short is saved. What it costs is
the other's way to work, where the first lives on; where that is taken, another would have been bought anyway.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from policies.fleet.how_many import HourlyPrices, StepShape
from policies.fleet.pools import weight
from policies.model.pool_record import PoolRecord, Stayed

# Before anything was seen: three times what is lost without a word. One account's night had 30 such words and 9
# losses after them, the first of these after 17 minutes (aws-node-termination-handler, issue 141).
LOSSES_AN_HOUR = 0.2
PRIOR_NODE_HOURS = 0.5  # one machine that lives on weighs as much


@dataclass(frozen=True, slots=True)
class Risk:
    """What is expected of machines at risk in a pool, and of how many that is told."""

    losses_an_hour: float
    told: int = 0
    taken: int = 0

    def share(self, within_s: float) -> float:
        """Of such machines, those that are taken within so long."""
        return 1 - math.exp(-self.losses_an_hour * within_s / 3600)


def risk_of(record: PoolRecord | None, there: Iterable[Stayed], now_s: float, half_life_h: float) -> Risk:
    """Return what is expected of a pool's machines at risk. `there`: what those that live have shown so far."""
    losses, hours = LOSSES_AN_HOUR * PRIOR_NODE_HOURS, PRIOR_NODE_HOURS
    seen = [*(record.at_risk if record else ()), *there]
    for one in seen:
        counts = weight(now_s - one.until_s, half_life_h)
        losses, hours = losses + counts * one.taken, hours + counts * one.hours
    return Risk(losses / hours, len(seen), sum(one.taken for one in seen))


def saved_s(losses_an_hour: float, start_s: float, within_s: float) -> float:
    """Return E: by how much less, in the mean, a fleet is short of a machine that is taken at that rate, if at all
    `within_s`, where one that takes `start_s` is asked for now and not at the loss."""
    rate, start_s = losses_an_hour / 3600, min(start_s, within_s)
    if rate <= 0:
        return 0.0
    return (1 - math.exp(-rate * start_s)) / rate - start_s * math.exp(-rate * within_s)


def short_usd_per_h(shape: StepShape | None, prices: HourlyPrices, nodes: int, short: int) -> float:
    """Return what it costs an hour that `short` of so many nodes are not there: what is paid for the others and
    beside them, less what the steps that they make cost with all. Below 0 where fewer make a step cheaper.

    Without a measured step, only what is known: a trainer without nodes makes none.
    """
    left = nodes - short
    if left <= 0:
        return prices.beside_usd_per_h
    if shape is None:
        return 0.0
    paid = prices.beside_usd_per_h + left * prices.node_usd_per_h
    whole = prices.beside_usd_per_h + nodes * prices.node_usd_per_h
    return paid - whole * shape.seconds(nodes) / shape.seconds(left)
