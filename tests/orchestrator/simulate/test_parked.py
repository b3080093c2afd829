"""A drought under production controllers: the trainer goes, no step is lost, and the run goes on by itself."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from grpo_orch.orchestrator.simulate.scenarios import (
    HOUR_S,
    Fault,
    answers_lost,
    clocks_set,
    cloud_away,
    cut_off,
    daemon_dies,
    no_rollout_capacity,
    notice,
    second_daemon,
    stale_listing,
    store_away,
    suspended,
    work_ends,
)
from grpo_orch.orchestrator.simulate.simulation import Simulation
from grpo_orch.policies.model.phases import LIVE_RUN
from grpo_orch.policies.model.state import RunState
from grpo_orch.policies.model.vocabulary import Role, RunPhase
from tests.budget import examples
from tests.stand_ins.world import spec

pytestmark = pytest.mark.usefixtures("quiet_log")
BACK_S = 900.0  # two minutes between two tries, two machines' boots, and a trainer's failure or two
TROUBLES: tuple[Fault, ...] = (
    answers_lost,
    clocks_set,
    cloud_away,
    cut_off,
    daemon_dies,
    daemon_dies,
    notice,
    second_daemon,
    stale_listing,
    store_away,
    suspended,
    work_ends,
)


def training(seed: int) -> Simulation:
    world = Simulation(seed, spec(2), max_steps=10**6)
    world.run_for(900.0)
    assert at(world).phase is RunPhase.TRAINING
    return world


def at(world: Simulation) -> RunState:
    assert world.newest is not None
    return world.newest.controller.state


def steps(world: Simulation) -> float:
    return max((box.step for box in world.cloud.of(Role.TRAINER)), default=-1.0)


@settings(max_examples=examples(8), deadline=None, derandomize=True)
@given(st.integers(0, 2**32))
@example(1)
def test_trouble_in_a_shortage_loses_no_step_and_run_resumes(seed: int) -> None:
    """The safety of every moment holds: one trainer, nothing stored or sealed is lost, no unknown machine."""
    world, random = training(seed), Random(seed)
    made = world.work.stored_step
    end_drought = no_rollout_capacity(world, random)
    for _ in range(4):
        world.run_for(random.choice((60.0, 200.0, 310.0, 330.0, 400.0)))
        undo = random.choice(TROUBLES)(world, random)
        world.run_for(random.choice((10.0, 130.0, 700.0)))
        if undo is not None:
            undo()
    world.run_for(2 * HOUR_S)  # suspended controllers wake
    world.safety.check(at(world).phase is RunPhase.PARKED, f"it does not park: {at(world)}")
    world.safety.check(not world.cloud.of(Role.TRAINER), "the trainer's machine is kept")
    world.safety.check(world.work.stored_step >= made, "it went back")
    end_drought()
    world.run_for(BACK_S)
    world.safety.check(at(world).phase in LIVE_RUN - {RunPhase.PARKED}, f"it does not go on: {at(world)}")
    world.safety.check(steps(world) > made, f"it makes no step: {steps(world)}, {made}")
