"""A run under a cap is taken over on a host whose clock is behind: the store's clock tells what was spent.

One that is wrong itself ends no run.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from grpo_orch.orchestrator.simulate.scenarios import HOUR_S
from grpo_orch.orchestrator.simulate.simulation import SimulatedDaemon, Simulation
from grpo_orch.orchestrator.simulate.store import Trouble
from grpo_orch.policies.fleet.budget import spent_usd
from grpo_orch.policies.model.spec import Budget
from tests.stand_ins.world import spec

CAP_USD, OUTAGE_S = 30.0, 2 * HOUR_S
YEAR_S = 365 * 24 * HOUR_S
COARSE_USD = 0.01  # what machines cost in the second or two to which stores date what they hold


pytestmark = pytest.mark.usefixtures("quiet_log")


def run_without_a_daemon(skew_s: float) -> Simulation:
    """Train for an hour; then nobody can take the run over for two, from hosts that are so far ahead."""
    world = Simulation(0, replace(spec(2), budget=Budget(usd=CAP_USD)), max_steps=10**6)
    world.run_for(HOUR_S)
    world.objects.trouble = Trouble.AWAY
    world.daemons[0].dead, world.skew_s = True, skew_s
    world.run_for(OUTAGE_S)
    return world


def successor(world: Simulation) -> SimulatedDaemon:
    world.objects.clear()
    world.resume()
    assert world.newest is not None
    assert world.newest is not world.daemons[0]
    return world.newest


def counted_too_much_usd(world: Simulation, daemon: SimulatedDaemon) -> float:
    return spent_usd(daemon.controller.state, daemon.clock.now_s()) - world.cloud.spent_usd


@pytest.mark.parametrize("skew_s", [-OUTAGE_S, -10 * YEAR_S, 0.0])
def test_a_cap_holds_however_far_behind_the_next_host_is(skew_s: float) -> None:
    """The world fails where a controller that can see and act spends more than the cap."""
    world = run_without_a_daemon(skew_s)
    assert abs(counted_too_much_usd(world, successor(world))) < COARSE_USD
    world.run_to_end(8 * HOUR_S)
    assert world.newest is not None
    assert world.newest.controller.state.money.is_reached


@pytest.mark.parametrize("set_by_s", [-YEAR_S, -HOUR_S, 25 * HOUR_S, YEAR_S])
def test_set_store_clock_counts_no_money_not_spent(set_by_s: float) -> None:
    """Back, or ahead by more than a host can be behind."""
    world = run_without_a_daemon(0.0)
    world.store_ahead_s += set_by_s
    assert abs(counted_too_much_usd(world, successor(world))) < COARSE_USD
