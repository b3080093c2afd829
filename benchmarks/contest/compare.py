"""Fleet policies side by side: each controls the same run in the same market, judged by steps per dollar."""

from __future__ import annotations

from benchmarks.contest.contenders import CONTENDERS
from grpo_orch.orchestrator.simulate.cloud import Physics, Prices
from grpo_orch.orchestrator.simulate.market_trace import MarketTrace
from grpo_orch.orchestrator.simulate.simulation import Outcome, simulate_hours
from grpo_orch.policies.model.spec import RunSpec


def contenders(trace: MarketTrace) -> list[str]:
    """Return the names of the policies that differ in this market."""
    pooled = any(zone.region for zone in trace)
    return [name for name, contender in CONTENDERS.items() if pooled or not contender.chooses]


def steer(
    name: str, spec: RunSpec, trace: MarketTrace, physics: Physics, prices: Prices, hours: float, seed: int
) -> Outcome:
    """Return what a contender makes of `hours`."""
    contender = CONTENDERS[name]
    return simulate_hours(contender.spec_of(spec), trace, physics, prices, hours, seed, contender.decide)
