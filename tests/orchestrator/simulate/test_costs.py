"""The simulator charges for more than machines, and the cap holds for all of it."""

from __future__ import annotations

import pytest

from orchestrator.simulate.physics import Physics, Prices
from orchestrator.simulate.stories import tell
from orchestrator.simulate.world import COARSE, World
from tests.stand_ins.world import spec, with_disks

DISK_USD_PER_H = 1332.0 / 730  # SkyPilot's `best` on AWS, of 256 GB


def test_disks_cost_what_they_cost() -> None:
    instant = Physics(launch_s=0.0, setup_s=0.0, first_weights_s=0.0, weights_s=0.0)
    world = World(0, with_disks(spec(2)), physics=instant, prices=Prices(), max_steps=10**9, rhythm=COARSE)
    world.run_for(3600.0)
    before = world.cloud.spent_usd
    world.run_for(4 * 3600.0)
    machines_usd_per_h = 3.96 + 2 * 1.19 + 3 * DISK_USD_PER_H
    assert world.cloud.spent_usd - before == pytest.approx(4 * machines_usd_per_h, rel=5e-3)


@pytest.mark.parametrize("seed", range(0, 16, 4))  # every fourth story has a budget
def test_the_cap_is_never_passed(seed: int) -> None:
    tell(seed, with_disks(spec(2)))
