"""What the controller promises of money, in the simulated world from end to end, which charges for disks, too.

`test_pool_choice` has the requests that refused credentials cost.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from grpo_orch.checkpoint import journal
from grpo_orch.orchestrator.simulate.market_trace import Zone, plentiful
from grpo_orch.orchestrator.simulate.scenarios import run_scenario
from grpo_orch.orchestrator.simulate.simulated_cloud import Physics, Prices
from grpo_orch.orchestrator.simulate.simulation import COARSE, Simulation
from grpo_orch.orchestrator.simulate.store import SimulatedStore
from grpo_orch.policies.model.breaker import PROBE_MAX_S
from grpo_orch.policies.model.events import BuyingStopped, NodeRequested
from grpo_orch.policies.model.vocabulary import Market, NodePhase, Role, RunPhase, role_of
from tests.stand_ins.world import spec, with_disks

pytestmark = pytest.mark.usefixtures("quiet_log")
HOUR_S = 3600.0
RHYTHM = (4.0, 26.0)  # two looks in half a minute
GAP_S = 300.0
SPOT = Zone("a", GAP_S, (4,), region="r")


def on_demand(*counts: int) -> Zone:
    return Zone("a", GAP_S, counts, region="r", market=Market.ON_DEMAND)


def world(*trace: Zone, nodes: int = 2) -> Simulation:
    return Simulation(0, spec(nodes), trace=trace, physics=Physics(), max_steps=10**9, rhythm=RHYTHM)


def rollouts_bought(of: Simulation) -> int:
    return sum(role_of(node) is Role.ROLLOUT for node in of.cloud.bought)


@pytest.mark.parametrize(("nodes", "minutes"), [(1, 52.0), (2, 45.0), (4, 45.0)])
def test_image_that_never_serves_stops_after_three_machines(nodes: int, minutes: float) -> None:
    """Within three quarters of an hour; one at a time has three launches on top of three times 15 minutes."""
    found = world(SPOT, on_demand(9), nodes=nodes)
    found.cloud.never_work = True
    while not rollouts_bought(found):
        found.run_for(5.0)
    found.run_for((minutes + 2.0) * 60)
    requests: list[float] = []
    for entry in journal.read(SimulatedStore(found.objects)):
        for event in entry.decoded():
            if isinstance(event, NodeRequested) and event.role is Role.ROLLOUT:
                requests.append(entry.time_s)
            elif isinstance(event, BuyingStopped):
                assert entry.time_s - requests[0] <= minutes * 60
                assert len(requests) == 3
                assert rollouts_bought(found) <= 4, "one more to see whether it works by now"
                return
    raise AssertionError(f"not stopped: {requests}")


@pytest.mark.parametrize("use_spot", [{"use_spot": True}, {}], ids=["spot alone", "on demand, too"])
@pytest.mark.parametrize("pools", [True, False])
def test_spot_taken_before_it_serves_is_tried_ever_more_rarely(pools: bool, use_spot: dict[str, bool]) -> None:
    """Half a day of it: 500 machines were once bought one after the other. Then spot is good again."""
    run = spec(4)
    run = replace(run, rollout=replace(run.rollout, resources=use_spot))
    trace = (SPOT, replace(SPOT, name="b"), on_demand(9)) if pools else plentiful(4)
    found = Simulation(0, run, trace=trace, physics=Physics(), max_steps=10**9, rhythm=COARSE, logs=True)
    found.cloud.takes_early = True
    found.run_for(12 * HOUR_S)
    assert found.newest is not None
    state = found.newest.controller.state
    assert "rollout on spot" in {name for name, kind in state.kinds.items() if kind.stopped}
    assert rollouts_bought(found) <= 20
    spent_usd = found.cloud.spent_usd
    if use_spot:
        assert state.phase is RunPhase.PARKED
        assert spent_usd < 12.0
    else:
        assert found.work.made_steps > 12 * HOUR_S / 220
    found.cloud.takes_early = False
    found.run_for(PROBE_MAX_S + HOUR_S)
    live = found.newest.controller.state.live(Role.ROLLOUT)
    assert {(node.market, node.phase) for node in live} == {(Market.SPOT, NodePhase.SERVING)}


DISK_USD_PER_H = 1332.0 / 730  # SkyPilot's `best` on AWS, of 256 GB


def test_disks_cost_their_price() -> None:
    instant = Physics(launch_s=0.0, setup_s=0.0, first_weights_s=0.0, weights_s=0.0)
    world = Simulation(0, with_disks(spec(2)), physics=instant, prices=Prices(), max_steps=10**9, rhythm=COARSE)
    world.run_for(3600.0)
    before = world.cloud.spent_usd
    world.run_for(4 * 3600.0)
    machines_usd_per_h = 3.96 + 2 * 1.19 + 3 * DISK_USD_PER_H
    assert world.cloud.spent_usd - before == pytest.approx(4 * machines_usd_per_h, rel=5e-3)


@pytest.mark.parametrize("seed", range(0, 16, 4))  # every fourth story has a budget
def test_the_cap_is_never_passed(seed: int) -> None:
    run_scenario(seed, with_disks(spec(2)))
