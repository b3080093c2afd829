"""Compare candidate allocations by one objective: the money that each would lose.

A candidate costs c USD an hour, makes a step in t seconds, and switching to it costs `change_usd`. Over a horizon
T its loss is

    (c - v * 3600 / t) * T + change_usd

where v, the worth of a step, is the lowest cost of a step with the machines that can be bought, on demand where
spot is unavailable. So the cheapest allocation loses only its change, a waiting trainer loses its price, and a
parked run loses nothing more. The candidate with the smallest loss is chosen.

The horizon is how long the present situation has lasted, up to a machine's lifetime: nothing predicts when spot
returns, and a shortage that has lasted for T is expected to last as long again. Waiting then costs at most twice
the best choice (ski rental).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from grpo_orch.policies.costs.steps import HourlyPrices, StepShape, best_count, optimum
from grpo_orch.policies.model.phases import LIVE_NODE
from grpo_orch.policies.model.spec import RunSpec
from grpo_orch.policies.model.state import RunState
from grpo_orch.policies.model.vocabulary import Market, NodePhase, Role

NOISE_SHARE = 0.03  # of a step's cost: smaller differences are within the measurement error
COMPARE_ALL_MAX = 8  # with fewer possible counts than this, all are compared


@dataclass(frozen=True, slots=True)
class Candidate:
    """A possible allocation: its price and its time per step."""

    name: str
    usd_per_h: float
    step_s: float | None = None  # None: it makes no step
    change_usd: float = 0.0
    spot: int = 0
    on_demand: int = 0

    @property
    def step_usd(self) -> float:
        """USD a step; infinite where none is made."""
        return math.inf if self.step_s is None else self.usd_per_h * self.step_s / 3600

    def loss_usd(self, worth_usd: float, horizon_s: float) -> float:
        """USD spent over the horizon less the worth of its steps, at `worth_usd` each."""
        earned = 0.0 if self.step_s is None else worth_usd * 3600 / self.step_s
        return (self.usd_per_h - earned) * horizon_s / 3600 + self.change_usd

    @property
    def sentence(self) -> str:
        if self.step_s is None:
            return f"{self.name}: {self.usd_per_h:.2f} USD/h and no steps"
        return f"{self.name}: {self.step_usd:.{2 if self.step_usd >= 1 else 3}f} USD a step"


@dataclass(frozen=True, slots=True)
class Comparison:
    """Candidates for one question, best first."""

    question: str
    worth_usd: float  # of a step
    horizon_s: float
    candidates: tuple[Candidate, ...]
    unknown: str = ""  # the unknown that was replaced by a guess; the resulting numbers are not shown

    @property
    def best(self) -> Candidate:
        return self.candidates[0]

    @property
    def runner_up(self) -> Candidate | None:
        return self.candidates[1] if len(self.candidates) > 1 else None

    @property
    def difference_usd(self) -> float:
        """How much more the runner-up loses over the horizon."""
        shown = self.best, self.runner_up or self.best
        best, other = (candidate.loss_usd(self.worth_usd, self.horizon_s) for candidate in shown)
        return other - best

    @property
    def sentence(self) -> str:
        """`3 on spot at 2.10 USD/h: 0.83 USD a step; 2 on spot: 0.91 USD a step`."""
        if self.unknown:
            names = " rather than ".join(candidate.name for candidate in self.candidates[:2])
            return f"{names}: {self.unknown}"
        return "; ".join(candidate.sentence for candidate in self.candidates[:2])


def compare(
    question: str,
    candidates: Sequence[Candidate],
    horizon_s: float,
    unknown: str = "",
) -> Comparison:
    """Rank the candidates by their loss. The first of equals wins, so put the present allocation first.

    A step is worth what the cheapest candidate's costs. `unknown`: see Comparison.
    """
    costs = [candidate.step_usd for candidate in candidates if candidate.step_s is not None]
    worth = min(costs, default=0.0)
    ranked = sorted(candidates, key=lambda candidate: candidate.loss_usd(worth, horizon_s))
    return Comparison(question, worth, horizon_s, tuple(ranked), unknown)


# Sizes of the fleet.


def rollouts_wanted(state: RunState, spec: RunSpec) -> int:
    """Return how many rollout nodes the run should have on their own market."""
    replicas = spec.rollout.replicas
    return replicas.max if state.size.nodes is None else min(max(state.size.nodes, replicas.min), replicas.max)


def hourly_prices(state: RunState) -> HourlyPrices:
    """Return the price of the trainer and the average price of a rollout node, of present machines; 0: unknown."""
    trainer_usd, rollouts = 0.0, list[float]()
    for node in state.nodes.values():
        if node.phase not in LIVE_NODE or node.price_usd_per_h <= 0:
            continue
        if node.role is Role.ROLLOUT and not node.is_fallback:
            rollouts.append(node.price_usd_per_h)
        elif node.role is Role.TRAINER and node.phase is not NodePhase.REQUESTED:
            trainer_usd = max(trainer_usd, node.price_usd_per_h)
    return HourlyPrices(trainer_usd, sum(rollouts) / len(rollouts) if rollouts else 0.0)


def compare_sizes(
    shape: StepShape,
    prices: HourlyPrices,
    market: Market,
    now: int,
    bounds: tuple[int, int],
    start_s: float,
    horizon_s: float = 0.0,
    nodes_usd_per_h: Sequence[float] = (),
    next_usd_per_h: float = 0.0,
) -> Comparison:
    """Compare sizes of the fleet within `bounds`; each node that is started or returned costs a start.

    `horizon_s`: 0 if no change is allowed. `nodes_usd_per_h`: of each present node; the most expensive are
    returned first. `next_usd_per_h`: of a further node; 0: the average.
    """
    low, high = bounds
    node_usd = prices.node_usd_per_h
    noise_usd = NOISE_SHARE * (prices.other_usd_per_h + now * node_usd) * horizon_s / 3600
    where = "on spot" if market is Market.SPOT else "on demand"
    cheapest, next_usd = sorted(nodes_usd_per_h), next_usd_per_h or node_usd

    def candidate(count: int) -> Candidate:
        nodes_usd = sum(cheapest[:count]) + max(0, count - len(cheapest)) * next_usd
        return Candidate(
            name=f"{count} {where} at {node_usd:.2f} USD/h" if count == now else f"{count} {where}",
            usd_per_h=prices.other_usd_per_h + nodes_usd,
            step_s=shape.seconds(max(1, count)),
            change_usd=abs(count - now) * node_usd * start_s / 3600 + (count != now) * noise_usd,
            spot=count,
        )

    counts = dict.fromkeys([now, *candidate_counts(shape, prices, low, high)])
    return compare("size", [candidate(count) for count in counts], horizon_s)


def candidate_counts(shape: StepShape, prices: HourlyPrices, low: int, high: int) -> list[int]:
    """Return the counts to compare: all, or the bounds and those around the best."""
    if high - low < COMPARE_ALL_MAX:
        return list(range(low, high + 1))
    best = best_count(shape, prices, low, high)
    return sorted({low, *(count for count in (best - 1, best, best + 1) if low <= count <= high), high})


def size_summary(shape: StepShape, prices: HourlyPrices) -> str:
    """Return `a step is 60.0 s plus 240.0 node-seconds of generation, ...: 2.6 nodes make it cheapest`."""
    relation = "plus" if shape.ahead_s is None else "in parallel with"
    step = f"a step is {shape.fixed_s:.1f} s {relation} {shape.generation_node_s:.1f} node-seconds of generation"
    usd = f"the trainer costs {prices.other_usd_per_h:.2f} USD/h and a node {prices.node_usd_per_h:.2f}"
    return f"{step}, {usd}: {optimum(shape, prices):.1f} nodes make it cheapest"
