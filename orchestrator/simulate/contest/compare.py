"""Fleet policies side by side: each steers the same run through the same weather, and what counts is how many
steps a dollar buys."""

from __future__ import annotations

from collections.abc import Iterator

from orchestrator.simulate.contest.contenders import CONTENDERS, Contender
from orchestrator.simulate.contest.oracle import ORACLE, oracle
from orchestrator.simulate.contest.outcome import Outcome
from orchestrator.simulate.physics import Physics, Prices
from orchestrator.simulate.weather import Weather
from orchestrator.simulate.world import COARSE, World
from policies.model.spec import RunSpec
from policies.model.vocabulary import Role

HOURS = 48.0


def compete(
    spec: RunSpec, weather: Weather, physics: Physics, prices: Prices, hours: float = HOURS, seed: int = 0
) -> Iterator[tuple[str, Outcome]]:
    """Yield what each contender makes of `hours`, as it is known; the oracle's last.

    All are charged from the first machine on, and what a machine did in vain is paid for.
    """
    for name in contenders(weather):
        yield name, steer(CONTENDERS[name], spec, weather, physics, prices, hours, seed)
    yield ORACLE, oracle(spec, weather, physics, prices, hours)


def contenders(weather: Weather) -> list[str]:
    """Return the names of those that differ in this weather."""
    pooled = any(zone.region for zone in weather)
    return [name for name, one in CONTENDERS.items() if pooled or not one.chooses]


def steer(
    one: Contender, spec: RunSpec, weather: Weather, physics: Physics, prices: Prices, hours: float, seed: int
) -> Outcome:
    """Return what a contender makes of `hours`."""
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
    made = [box.step for box in world.cloud.of(Role.TRAINER) if not box.gone]
    steps = max([float(world.work.stored_step), *made])
    return Outcome(steps, world.cloud.spent_usd, len(world.cloud.bought))
