"""Fleet policies: each is a function like `policies.control.decide.decide`, made from it by what it sees or asks,
so that in all else they differ in nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from benchmarks.contest.spot_hedge import spot_hedge
from grpo_orch.orchestrator.control.controller import Decide
from grpo_orch.orchestrator.simulate.simulation import ON_DEMAND, on_demand
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


def on_markets(market_of: Callable[[str], Market]) -> Decide:
    """The greedy policy with the market of each rollout node fixed by its slot, wherever that is cheapest."""

    def decided(state: RunState, snapshot: Snapshot, spec: RunSpec) -> Decision:
        found = greedy(state, replace(snapshot, pools=()), spec)
        events: list[Event] = []
        markets: dict[str, Market] = {}
        for event in found.events:
            if isinstance(event, NodeRequested) and event.role is Role.ROLLOUT:
                markets[event.node] = market_of(event.slot)
                events.append(replace(event, market=market_of(event.slot)))
            else:
                events.append(event)
        actions = tuple(
            replace(one, market=markets[one.node]) if isinstance(one, Launch) and one.node in markets else one
            for one in found.actions
        )
        return replace(found, events=tuple(events), actions=actions)

    return decided


def _rollouts_on_spot(spec: RunSpec) -> RunSpec:
    return replace(spec, rollout=replace(spec.rollout, resources={**spec.rollout.resources, "use_spot": True}))


def _half(slot: str) -> Market:
    return Market.SPOT if int(slot.rpartition("-")[2]) % 2 else Market.ON_DEMAND


CONTENDERS: Mapping[str, Contender] = {
    "ours": Contender(decide),
    "cheapest": Contender(cheapest, chooses=True),
    "spot-hedge": Contender(spot_hedge),
    "greedy": Contender(greedy),
    "spot-only": Contender(on_markets(lambda _: Market.SPOT), _rollouts_on_spot),
    "half-and-half": Contender(on_markets(_half)),
    ON_DEMAND: Contender(on_markets(lambda _: Market.ON_DEMAND), on_demand),
}
