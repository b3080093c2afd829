"""How many rollout nodes make a step cheapest.

A step takes a + b/n seconds on n nodes: a are the seconds that no further node shortens (training, publishing, the
longest completion), b the node-seconds of generation that n nodes share. With what is paid per hour for everything
else, P (the trainer's machine, the controller's), and for a node, p, it costs (P + n p)(a + b/n). That is least at
n* = sqrt(P b / (p a)), and grows with n/n* + n*/n on both sides of it: flat near n*, steep far from it. So a fleet
that is a little off costs next to nothing, and DAMPING keeps it from following every breath of a measurement.

Nodes of unlike speed count as the average node: b in seconds of one, p the average price.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

# No change while n* times or divided by this would still leave the fleet as it is. At such a distance from n*
# (n/n* + n*/n - 2) / 4, less than 1 % of a step's cost, is what is paid too much, and rounding to whole nodes adds
# more than that: 6 % at most, between one node and two.
DAMPING = 1.2


@dataclass(frozen=True, slots=True)
class StepShape:
    """What a step consists of: `fixed_s` (a), and `generation_node_s` (b) in node-seconds; 0 or more each."""

    fixed_s: float
    generation_node_s: float

    def seconds(self, nodes: float) -> float:
        """Seconds of a step on so many nodes, one or more."""
        return self.fixed_s + self.generation_node_s / nodes


@dataclass(frozen=True, slots=True)
class HourlyPrices:
    """USD an hour of one rollout node, and of all that is paid for beside them while the run lasts."""

    beside_usd_per_h: float
    node_usd_per_h: float

    @property
    def known(self) -> bool:
        """Whether both are known: a cloud that tells no price tells 0."""
        return self.beside_usd_per_h > 0 and self.node_usd_per_h > 0


def usd_a_step(shape: StepShape, prices: HourlyPrices, nodes: float) -> float:
    """Return what a step costs on so many nodes, one or more."""
    return (prices.beside_usd_per_h + nodes * prices.node_usd_per_h) * shape.seconds(nodes) / 3600


def optimum(shape: StepShape, prices: HourlyPrices) -> float:
    """Return n*, not rounded: 0 where nothing is generated, infinite where a step is generation alone.

    Raises ValueError when the prices are not known.
    """
    if not prices.known:
        raise ValueError("the optimum needs both prices")
    dear = prices.beside_usd_per_h * shape.generation_node_s
    cheap = prices.node_usd_per_h * shape.fixed_s
    if dear == 0:
        return 0.0
    return math.sqrt(dear / cheap) if cheap > 0 else math.inf


def best_count(shape: StepShape, prices: HourlyPrices, low: int, high: int) -> int:
    """Return the number of nodes from `low` to `high` that makes a step cheapest; `high` without known prices."""
    return _whole(optimum(shape, prices), low, high) if prices.known else high


def damped_count(shape: StepShape, prices: HourlyPrices, low: int, high: int, now: int) -> int:
    """Return how many nodes to have when there are to be `now`: as many, unless n* is clearly elsewhere.

    Then it goes to the near edge of what n* allows, not to n* itself: the way back is longer from there.
    """
    if not prices.known:
        return high
    exact = optimum(shape, prices)
    return min(max(now, _whole(exact / DAMPING, low, high)), _whole(exact * DAMPING, low, high))


def _whole(exact: float, low: int, high: int) -> int:
    """Return the cheapest whole number from `low` (at least 1) to `high`: k and k + 1 cost the same at
    n* = sqrt(k (k + 1))."""
    if exact >= high:
        return high
    below = math.floor(exact)
    nearest = below + 1 if exact * exact > below * (below + 1) else below
    return min(max(nearest, low, 1), high)
