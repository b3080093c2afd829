"""Fleet policies side by side: each controls the same run in the same market, judged by steps per dollar.

Each is a function like `policies.control.decide.decide`, made from it by what it sees or asks,
so that in all else they differ in nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from benchmarks.contest.spot_hedge import spot_hedge
from grpo_orch.orchestrator.control.controller import Decide
from grpo_orch.orchestrator.simulate.market_trace import MarketTrace
from grpo_orch.orchestrator.simulate.simulated_cloud import Physics, Prices
from grpo_orch.orchestrator.simulate.simulation import ON_DEMAND, Outcome, on_demand, simulate_hours
from grpo_orch.policies.control.decide import decide
from grpo_orch.policies.model.events import Event, NodeRequested
from grpo_orch.policies.model.spec import RunSpec
from grpo_orch.policies.model.state import RunState
from grpo_orch.policies.model.vocabulary import Market, Role
from grpo_orch.policies.tick.snapshot import Decision, Launch, Snapshot


@dataclass(frozen=True, slots=True)
class Contender:
    """A fleet policy: what its controllers decide with, and how the run's spec reads for it."""

    decide: Decide
    spec_of: Callable[[RunSpec], RunSpec] = field(default=lambda spec: spec)
    chooses: bool = False  # it differs from ours only where there are pools to choose from


def greedy(state: RunState, snapshot: Snapshot, spec: RunSpec) -> Decision:
    """As many nodes as run.yaml allows, whatever they cost: prices are not seen."""
    if snapshot.machines is None:
        return decide(state, snapshot, spec)
    blind = {
        name: replace(one, price_usd_per_h=0.0, on_demand_usd_per_h=0.0) for name, one in snapshot.machines.items()
    }
    return decide(state, replace(snapshot, machines=blind), spec)


def cheapest(state: RunState, snapshot: Snapshot, spec: RunSpec) -> Decision:
    """Ours without a memory of pools: each launch goes from zone to zone by their prices, as SkyPilot does."""
    return decide(state, replace(snapshot, pools=()), spec)


def on_market(market: Market) -> Decide:
    """Return the greedy policy with every rollout node on this market, wherever that is cheapest."""

    def decided(state: RunState, snapshot: Snapshot, spec: RunSpec) -> Decision:
        found = greedy(state, replace(snapshot, pools=()), spec)
        events: list[Event] = []
        requested: set[str] = set()
        for event in found.events:
            if isinstance(event, NodeRequested) and event.role is Role.ROLLOUT:
                requested.add(event.node)
                events.append(replace(event, market=market))
            else:
                events.append(event)
        actions = tuple(
            replace(action, market=market) if isinstance(action, Launch) and action.node in requested else action
            for action in found.actions
        )
        return replace(found, events=tuple(events), actions=actions)

    return decided


def _rollouts_on_spot(spec: RunSpec) -> RunSpec:
    return replace(spec, rollout=replace(spec.rollout, resources={**spec.rollout.resources, "use_spot": True}))


CONTENDERS: Mapping[str, Contender] = {
    "ours": Contender(decide),
    "cheapest": Contender(cheapest, chooses=True),
    "spot-hedge": Contender(spot_hedge),
    "greedy": Contender(greedy),
    "spot-only": Contender(on_market(Market.SPOT), _rollouts_on_spot),
    ON_DEMAND: Contender(on_market(Market.ON_DEMAND), on_demand),
}


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
