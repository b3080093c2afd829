"""The shape of a step, how it is measured, and the number of nodes that makes a step cheapest.

A step takes a + b/n seconds on n nodes: a are the seconds that no further node shortens (training, publishing, the
longest completion), b the node-seconds of generation that n nodes share. With hourly prices P for everything else
(the trainer's machine, the controller's) and p for a node, it costs (P + n p)(a + b/n). The minimum is at
n* = sqrt(P b / (p a)). The cost grows with n/n* + n*/n on both sides of it: flat near n*, steep far from it.

Where the next step's completions are made while the trainer works (`rollout.max_staleness`), a step takes the
longer of a and c + b/n, where c is the part of generation that no further node shortens. Nodes beyond the point
where both are equal do not help; up to there (P + n p)(c + b/n) has its minimum at sqrt(P b / (p c)), as above.

Nodes of different speeds count as the average node: b in seconds of one, p the average price.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median


@dataclass(frozen=True, slots=True)
class StepShape:
    """The shape of a step: `fixed_s` (a), and `generation_node_s` (b) in node-seconds; both at least 0.

    With `ahead_s` (c), completions are made while the trainer works on earlier steps; None: while it waits.
    """

    fixed_s: float
    generation_node_s: float
    ahead_s: float | None = None

    def seconds(self, nodes: float) -> float:
        """Return the seconds of a step on `nodes` nodes (at least 1)."""
        shared_s = self.generation_node_s / nodes
        return self.fixed_s + shared_s if self.ahead_s is None else max(self.fixed_s, self.ahead_s + shared_s)

    def nodes(self, seconds: float) -> float:
        """Return the number of nodes for a step in `seconds`; infinite if it is impossible."""
        shared_s = seconds - (self.fixed_s if self.ahead_s is None else self.ahead_s)
        if shared_s <= 0 or seconds < self.fixed_s:
            return math.inf
        return self.generation_node_s / shared_s


@dataclass(frozen=True, slots=True)
class HourlyPrices:
    """USD an hour of one rollout node, and of everything else (`other_usd_per_h`) while the run lasts."""

    other_usd_per_h: float
    node_usd_per_h: float

    @property
    def known(self) -> bool:
        """Whether both are known; an unknown price is 0."""
        return self.other_usd_per_h > 0 and self.node_usd_per_h > 0


def step_usd(shape: StepShape, prices: HourlyPrices, nodes: float) -> float:
    """Return the cost of a step on `nodes` nodes (at least 1)."""
    return (prices.other_usd_per_h + nodes * prices.node_usd_per_h) * shape.seconds(nodes) / 3600


def optimum(shape: StepShape, prices: HourlyPrices) -> float:
    """Return n*, not rounded: 0 without generation, infinite if a step is only generation.

    Raises ValueError when the prices are not known.
    """
    if not prices.known:
        raise ValueError("the optimum needs both prices")
    alone_s = shape.fixed_s if shape.ahead_s is None else shape.ahead_s
    gain = prices.other_usd_per_h * shape.generation_node_s
    cost = prices.node_usd_per_h * alone_s
    if gain == 0:
        return 0.0
    exact = math.sqrt(gain / cost) if cost > 0 else math.inf
    return exact if shape.ahead_s is None else min(exact, shape.nodes(shape.fixed_s))


def best_count(shape: StepShape, prices: HourlyPrices, low: int, high: int) -> int:
    """Return the number of nodes from `low` to `high` that makes a step cheapest; `high` without known prices."""
    if not prices.known:
        return high
    if (exact := optimum(shape, prices)) >= high:
        return high
    below = max(low, 1, math.floor(exact))
    return min((below, min(below + 1, high)), key=lambda nodes: step_usd(shape, prices, nodes))


# Measuring. A part of generation does not shrink with more nodes: the longest completion is made token by token,
# and all nodes load a policy at the same time. It is separated once fleets of clearly different sizes have
# generated, which happens soon on spot: seconds a token are fitted as c + b/n by least squares. Until then
# everything counts as shared, so the first estimate of n* is rather too high, and is corrected as the fleet
# shrinks. Seconds are per token, because completions grow as a policy learns.

RECENT = 20  # steps used, in total and of each fleet size
ENOUGH = 3  # steps needed for an estimate
DIFFERENT_SHARE = 1.5  # ratio of node counts needed for a fit that is better than its noise


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """One step's measurements.

    Attributes:
        took_s: in total.
        generated_s: time in which completions were made.
        nodes: that made them.
        tokens: of the completions.
        ahead_s: of `generated_s`, time in which the trainer worked on earlier steps.
    """

    took_s: float
    generated_s: float
    nodes: float
    tokens: float
    ahead_s: float = 0.0


def shape_of(steps: Sequence[MeasuredStep]) -> StepShape | None:
    """Return the shape of the newest steps with nodes; None before there are enough.

    `steps` are in order of time.
    """
    if len(steps) < ENOUGH:
        return None
    recent = steps[-RECENT:]
    tokens = median(max(1.0, step.tokens) for step in recent)
    other_s = median(max(0.0, step.took_s - step.generated_s + step.ahead_s) for step in recent)
    tail_s, shared_node_s = _split(_seconds_a_token(steps))
    if any(step.ahead_s for step in recent):
        return StepShape(other_s, shared_node_s * tokens, ahead_s=tail_s * tokens)
    return StepShape(other_s + tail_s * tokens, shared_node_s * tokens)


def _seconds_a_token(steps: Sequence[MeasuredStep]) -> dict[int, float]:
    """Return the median of the newest steps, by the number of nodes."""
    found = defaultdict[int, list[float]](list)
    for step in steps:
        found[max(1, round(step.nodes))].append(step.generated_s / max(1.0, step.tokens))
    newest = max(1, round(steps[-1].nodes))
    return {n: median(seconds[-RECENT:]) for n, seconds in found.items() if len(seconds) >= ENOUGH or n == newest}


def _split(seconds: Mapping[int, float]) -> tuple[float, float]:
    """Return c and b of c + b/n, neither negative."""
    if max(seconds) < DIFFERENT_SHARE * min(seconds):
        return 0.0, fmean(n * each_s for n, each_s in seconds.items())
    x_mean = fmean(1 / n for n in seconds)
    y_mean = fmean(seconds.values())
    spread = sum((1 / n - x_mean) ** 2 for n in seconds)
    shared = sum((1 / n - x_mean) * (each_s - y_mean) for n, each_s in seconds.items()) / spread
    if shared <= 0:
        return y_mean, 0.0
    if (tail := y_mean - shared * x_mean) < 0:
        return 0.0, sum(each_s / n for n, each_s in seconds.items()) / sum(1 / n**2 for n in seconds)
    return tail, shared
