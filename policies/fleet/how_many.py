"""How many rollout nodes make a step cheapest.

A step takes a + b/n seconds on n nodes: a are the seconds that no further node shortens (training, publishing, the
longest completion), b the node-seconds of generation that n nodes share. With what is paid per hour for everything
else, P (the trainer's machine, the controller's), and for a node, p, it costs (P + n p)(a + b/n). That is least at
n* = sqrt(P b / (p a)), and grows with n/n* + n*/n on both sides of it: flat near n*, steep far from it. So a fleet
that is a little off costs next to nothing, and DAMPING keeps it from following every breath of a measurement.

Where the next step's completions are made while the trainer works (`rollout.max_staleness`), a step takes the
longer of a and c + b/n, with c for what of generation no further node shortens. More nodes than make both alike
shorten nothing; up to there (P + n p)(c + b/n) is least at sqrt(P b / (p c)), as above.

Nodes of unlike speed count as the average node: b in seconds of one, p the average price.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

# No change while n* times or divided by this would still leave the fleet as it is. At such a distance from n*
# (n/n* + n*/n - 2) / 4, less than 1 % of a step's cost, is what is paid too much, and rounding to whole nodes adds
# more than that: 6 % at most, between one node and two.
DAMPING = 1.2
DAMPED_SHARE = 0.05  # of a step's cost, which a change must save where generation and training overlap


@dataclass(frozen=True, slots=True)
class StepShape:
    """What a step consists of: `fixed_s` (a), and `generation_node_s` (b) in node-seconds; 0 or more each.

    With `ahead_s` (c) completions are made while the trainer is at work on earlier steps; None: while it waits.
    """

    fixed_s: float
    generation_node_s: float
    ahead_s: float | None = None

    def seconds(self, nodes: float) -> float:
        """Seconds of a step on so many nodes, one or more."""
        shared_s = self.generation_node_s / nodes
        return self.fixed_s + shared_s if self.ahead_s is None else max(self.fixed_s, self.ahead_s + shared_s)

    def nodes(self, seconds: float) -> float:
        """How many nodes make a step in so many seconds; infinite where none do."""
        shared_s = seconds - (self.fixed_s if self.ahead_s is None else self.ahead_s)
        if shared_s <= 0 or seconds < self.fixed_s:
            return math.inf
        return self.generation_node_s / shared_s


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
    alone_s = shape.fixed_s if shape.ahead_s is None else shape.ahead_s
    dear = prices.beside_usd_per_h * shape.generation_node_s
    cheap = prices.node_usd_per_h * alone_s
    if dear == 0:
        return 0.0
    exact = math.sqrt(dear / cheap) if cheap > 0 else math.inf
    return exact if shape.ahead_s is None else min(exact, shape.nodes(shape.fixed_s))


def best_count(shape: StepShape, prices: HourlyPrices, low: int, high: int) -> int:
    """Return the number of nodes from `low` to `high` that makes a step cheapest; `high` without known prices."""
    if not prices.known:
        return high
    exact = optimum(shape, prices)
    if shape.ahead_s is None or exact >= high:
        return _whole(exact, low, high)
    below = max(low, 1, math.floor(exact))
    return min((below, min(below + 1, high)), key=lambda nodes: usd_a_step(shape, prices, nodes))


def damped_count(shape: StepShape, prices: HourlyPrices, low: int, high: int, now: int) -> int:
    """Return how many nodes to have when there are to be `now`: as many, unless n* is clearly elsewhere.

    Then it goes to the near edge of what n* allows, not to n* itself: the way back is longer from there.
    """
    if not prices.known:
        return high
    if shape.ahead_s is not None:
        best = best_count(shape, prices, low, high)
        usd, least_usd = (usd_a_step(shape, prices, max(1, nodes)) for nodes in (now, best))
        return now if low <= now <= high and usd <= (1 + DAMPED_SHARE) * least_usd else best
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
