"""What a fleet policy achieves in a number of simulated hours."""

from __future__ import annotations

from dataclasses import dataclass, replace

from orchestrator.control.controller import Decide
from orchestrator.simulate.cloud import Physics, Prices
from orchestrator.simulate.weather import Weather
from orchestrator.simulate.world import COARSE, World
from policies.control.decide import decide as production
from policies.model.spec import RunSpec
from policies.model.vocabulary import Role

HOURS = 48.0
THIS_RUN = "this run"
ON_DEMAND = "on-demand"


@dataclass(frozen=True, slots=True)
class Outcome:
    """Steps that were not lost, USD spent, and the number of machines bought."""

    steps: float
    usd: float
    bought: int = 0

    @property
    def steps_per_usd(self) -> float:
        return self.steps / self.usd if self.usd else 0.0


def simulate_hours(
    spec: RunSpec,
    weather: Weather,
    physics: Physics,
    prices: Prices,
    hours: float,
    seed: int,
    decide: Decide = production,
) -> Outcome:
    """Simulate a run for some hours, without faults.

    The first machine already costs money, and so do machines that never serve.

    Args:
        decide: the fleet policy; the default is the production controller's.
    """
    world = World(
        seed,
        spec,
        weather=weather,
        physics=physics,
        prices=prices,
        max_steps=10**9,
        decide=decide,
        rhythm=COARSE,
        logs=True,
    )
    world.run_for(hours * 3600 - world.time_s)
    trained = [machine.step for machine in world.cloud.of(Role.TRAINER) if not machine.gone]
    steps = max([float(world.work.stored_step), *trained])
    return Outcome(steps, world.cloud.spent_usd, len(world.cloud.bought))


def on_demand(spec: RunSpec) -> RunSpec:
    """Return the same run with every machine on demand."""
    rollout = replace(spec.rollout, resources={**spec.rollout.resources, "use_spot": False})
    trainer = replace(spec.trainer, resources={**spec.trainer.resources, "use_spot": False})
    return replace(spec, rollout=rollout, trainer=trainer)
