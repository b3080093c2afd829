"""The simulator charges for more than machines, and the cap holds for all of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from orchestrator.simulate.physics import Physics, Prices
from orchestrator.simulate.stories import tell
from orchestrator.simulate.world import COARSE, RESUME_S, World
from policies.control.fleet.store_bill import pending_usd
from policies.control.tick import Tick
from policies.fleet.budget import spent_usd
from policies.model.spec import Budget, RunSpec
from tests.stand_ins.world import spec

DISK_USD_PER_H = 1332.0 / 730  # SkyPilot's `best` on AWS, of 256 GB
# A second: 3.5 writes and listings, 6 reads, each machine's report, and once a minute its own look at the lease.
STORE_USD_PER_H = 3600 * (3.5 * 5e-6 + (6 + 3 + 3 / 60) * 4e-7)


def with_disks(max_replicas: int) -> RunSpec:
    run, disk = spec(max_replicas), {"infra": "aws", "disk_tier": "best"}
    sections = replace(run.trainer, resources=disk), replace(run.rollout, resources=disk)
    return replace(run, cloud="sky", trainer=sections[0], rollout=sections[1])


def test_disks_cost_what_they_cost() -> None:
    instant = Physics(launch_s=0.0, setup_s=0.0, first_weights_s=0.0, weights_s=0.0)
    world = World(0, with_disks(2), physics=instant, prices=Prices(), max_steps=10**9, rhythm=COARSE)
    world.run_for(3600.0)
    before, store_before = world.cloud.spent_usd, world.store_usd
    world.run_for(4 * 3600.0)
    machines_usd_per_h = 3.96 + 2 * 1.19 + 3 * DISK_USD_PER_H
    assert world.cloud.spent_usd - before == pytest.approx(4 * machines_usd_per_h, rel=5e-3)
    assert world.store_usd - store_before == pytest.approx(4 * STORE_USD_PER_H, rel=5e-3)


def test_the_store_costs_what_the_controller_counts() -> None:
    """Through controllers that die between two entries of the journal."""
    world = World(0, replace(spec(2), budget=Budget(usd=10**6)), max_steps=10**9, rhythm=COARSE)
    for _ in range(8):
        world.run_for(1200.0)
        newest = world.newest
        assert newest is not None
        newest.dead = True
    world.run_for(2 * RESUME_S + 30.0)
    newest = world.newest
    assert newest is not None
    assert newest.controller.seen is not None
    tick = Tick(newest.controller.state, newest.controller.seen, world.spec)
    counted = spent_usd(tick.state, tick.snapshot.now_s) + pending_usd(tick)
    assert world.spent_usd <= counted <= world.spent_usd * 1.02
    assert tick.state.store_usd > 0.5 * 8 * 1200.0 / 3600 * STORE_USD_PER_H


@pytest.mark.parametrize("seed", range(0, 16, 4))  # every fourth story has a budget
def test_the_cap_is_never_passed(seed: int) -> None:
    tell(seed, with_disks(2))
