"""Fleet policies side by side: each steers the same run through the same weather, and what counts is how many
steps a dollar buys.

A fleet policy is a function like `policies.control.decide.decide`. The others here are made from it by what they
see or ask for, so that in all else they differ in nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from orchestrator.control.controller import Decide
from orchestrator.simulate.physics import Physics, Prices
from orchestrator.simulate.weather import Weather
from orchestrator.simulate.world import COARSE, World
from policies.control.decide import decide
from policies.control.fleet.markets import market_of
from policies.control.snapshot import Decision, Launch, Snapshot
from policies.model.events import Event, NodeRequested
from policies.model.spec import RunSpec
from policies.model.state import RunState
from policies.model.vocabulary import Market, Role

HOURS = 48.0
ON_DEMAND = "on-demand"
ORACLE = "oracle"
SHORTEST_S = 1.0  # from one look of the oracle's to the next


@dataclass(frozen=True, slots=True)
class Contender:
    """A fleet policy: what its controllers decide with, and how the run's spec reads for it."""

    decide: Decide
    spec_of: Callable[[RunSpec], RunSpec] = field(default=lambda spec: spec)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one policy made of the hours: steps that are stored, and dollars."""

    steps: float
    usd: float
    bought: int = 0

    @property
    def steps_per_usd(self) -> float:
        return self.steps / self.usd if self.usd else 0.0


def greedy(state: RunState, snapshot: Snapshot, spec: RunSpec) -> Decision:
    """As many nodes as run.yaml allows, whatever they cost: prices are not seen."""
    if snapshot.machines is None:
        return decide(state, snapshot, spec)
    blind = {
        name: replace(one, price_usd_per_h=0.0, on_demand_usd_per_h=0.0) for name, one in snapshot.machines.items()
    }
    return decide(state, replace(snapshot, machines=blind), spec)


def on_markets(market_of: Callable[[str], Market]) -> Decide:
    """The greedy policy with the market of each rollout node fixed by its slot."""

    def decided(state: RunState, snapshot: Snapshot, spec: RunSpec) -> Decision:
        found = greedy(state, snapshot, spec)
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


def _all_on_demand(spec: RunSpec) -> RunSpec:
    rollout = replace(spec.rollout, resources={**spec.rollout.resources, "use_spot": False})
    trainer = replace(spec.trainer, resources={**spec.trainer.resources, "use_spot": False})
    return replace(spec, rollout=rollout, trainer=trainer)


def _half(slot: str) -> Market:
    return Market.SPOT if int(slot.rpartition("-")[2]) % 2 else Market.ON_DEMAND


CONTENDERS: Mapping[str, Contender] = {
    "ours": Contender(decide),
    "greedy": Contender(greedy),
    "spot-only": Contender(on_markets(lambda _: Market.SPOT), _rollouts_on_spot),
    "half-and-half": Contender(on_markets(_half)),
    ON_DEMAND: Contender(on_markets(lambda _: Market.ON_DEMAND), _all_on_demand),
}


def compete(
    spec: RunSpec, weather: Weather, physics: Physics, prices: Prices, hours: float = HOURS, seed: int = 0
) -> Iterator[tuple[str, Outcome]]:
    """Yield what each contender makes of `hours`, as it is known; the oracle's last.

    All are charged from the first machine on, and what a machine did in vain is paid for.
    """
    for name, one in CONTENDERS.items():
        world = World(
            seed,
            one.spec_of(spec),
            weather=weather,
            physics=physics,
            prices=prices,
            max_steps=10**9,
            decide=one.decide,
            rhythm=COARSE,
            logs=True,
        )
        world.run_for(hours * 3600 - world.time_s)
        yield name, Outcome(float(world.work.stored_step), world.cloud.spent_usd, len(world.cloud.bought))
    yield ORACLE, oracle(spec, weather, physics, prices, hours)


def oracle(spec: RunSpec, weather: Weather, physics: Physics, prices: Prices, hours: float = HOURS) -> Outcome:
    """What somebody could make of the same hours who knows the weather and whose machines need no start: at each
    moment the fleet whose steps are cheapest. It never parks, as the contenders' trainers do not, unless a trainer
    that is to be on spot has no machine."""
    gap_s, steps, usd = max(SHORTEST_S, min(zone.gap_s for zone in weather)), 0.0, 0.0
    for gap in range(math.ceil(hours * 3600 / gap_s)):
        lasts_s = min(gap_s, hours * 3600 - gap * gap_s)
        step_usd, step_s = min(_fleets(spec, weather, physics, prices, gap * gap_s), default=(0.0, math.inf))
        steps += lasts_s / step_s
        usd += lasts_s / step_s * step_usd
    return Outcome(steps, usd)


def _fleets(
    spec: RunSpec, weather: Weather, physics: Physics, prices: Prices, time_s: float
) -> Iterator[tuple[float, float]]:
    """Dollars and seconds of a step, with each number of the cheapest nodes that are to be had."""
    spot = sorted(
        prices.spot_usd_per_h * zone.price_at(time_s) for zone in weather for _ in range(zone.count_at(time_s))
    )
    trainer_usd_per_h = prices.trainer_usd_per_h
    if market_of(Role.TRAINER, spec) is Market.SPOT:
        if not spot:
            return
        trainer_usd_per_h = spot.pop(0)
    most = spec.rollout.replicas.max
    nodes = sorted([*spot, *([prices.node_usd_per_h] * most)])[:most]
    for count in range(1, most + 1):
        step_s = physics.step_s(count)
        yield (trainer_usd_per_h + sum(nodes[:count])) * step_s / 3600, step_s
