"""A deadline that all on demand meets with some slack, in simulated markets: met, for less where there is spot."""

from __future__ import annotations

from datetime import UTC, datetime
from functools import cache

import pytest

from benchmarks.contest.contenders import CONTENDERS
from benchmarks.contest.markets import market
from grpo_orch.orchestrator.simulate.market_trace import MarketTrace
from grpo_orch.orchestrator.simulate.simulated_cloud import EPOCH_S, Physics
from grpo_orch.orchestrator.simulate.simulation import COARSE, ON_DEMAND, Simulation
from grpo_orch.policies.model.reports import DEADLINE
from grpo_orch.policies.model.spec import FleetPolicy, RunSpec
from grpo_orch.policies.model.vocabulary import RunPhase
from tests.stand_ins.world import spec as run_spec

NODES, STEPS = 6, 50
SLACK = 1.2  # times what all on demand takes
BEGINS_S = 1000.0  # the world's
PHYSICS = Physics(save_steps=10)
CLIMATES = ("calm", "scarce", "storms", "never")
SEEDS = 10


def spec(deadline_s: float | None = None) -> RunSpec:
    at = None if deadline_s is None else f"{datetime.fromtimestamp(EPOCH_S + deadline_s, UTC):%Y-%m-%dT%H:%M:%SZ}"
    return run_spec(NODES, fleet=FleetPolicy(deadline=at))


def lived(policy: str, run: RunSpec, trace: MarketTrace, seed: int = 0) -> Simulation:
    """The world after the run has ended, or after six hours."""
    one = CONTENDERS[policy]
    world = Simulation(
        seed,
        one.spec_of(run),
        trace=trace,
        physics=PHYSICS,
        max_steps=STEPS,
        decide=one.decide,
        rhythm=COARSE,
        logs=True,
    )
    while not world.is_over and world.time_s < 6 * 3600:
        world.run_for(60.0)
    return world


@cache
def on_demand() -> tuple[float, float]:
    """Seconds and USD of the run with all on demand."""
    world = lived(ON_DEMAND, spec(), market("unclouded", 0, NODES))
    return world.time_s - BEGINS_S, world.cloud.spent_usd


def check(name: str, seed: int) -> None:
    took_s, usd = on_demand()
    deadline_s = BEGINS_S + SLACK * took_s
    world = lived("ours", spec(deadline_s), market(name, seed, NODES), seed)
    assert world.newest is not None
    state = world.newest.controller.state
    assert state.phase is RunPhase.FINISHED, f"seed {seed}"
    assert world.time_s <= deadline_s, f"seed {seed}"
    assert DEADLINE not in state.reports, f"seed {seed}"
    if name != "never":
        assert world.cloud.spent_usd < usd, f"seed {seed}"
    else:
        assert world.cloud.spent_usd < 1.02 * usd, f"seed {seed}"


@pytest.mark.parametrize("name", CLIMATES)
def test_deadline_is_met_below_the_on_demand_cost(name: str) -> None:
    check(name, 0)


def test_run_without_deadline_is_cheaper_and_late() -> None:
    """So that the others show something. By a tenth: three nodes are tried before the others, on demand, too."""
    world = lived("ours", spec(), market("calm", 0, NODES))
    assert world.time_s > BEGINS_S + 1.1 * on_demand()[0]


@pytest.mark.soak
@pytest.mark.parametrize("name", CLIMATES)
def test_deadline_is_met_in_other_markets(name: str) -> None:
    for seed in range(1, SEEDS):
        check(name, seed)


def test_unreachable_deadline_costs_no_more_than_none() -> None:
    free = lived("ours", spec(), market("calm", 0, NODES))
    late = lived("ours", spec(BEGINS_S + 1800.0), market("calm", 0, NODES))
    assert late.newest is not None
    assert DEADLINE in late.newest.controller.state.reports
    assert late.cloud.spent_usd < 1.1 * free.cloud.spent_usd
