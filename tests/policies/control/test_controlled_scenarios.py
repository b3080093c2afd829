"""A controller, its successor and their machines through random trouble of every party, each story from a seed."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from grpo_orch.orchestrator.simulate.scenarios import HOUR_S, OUTAGES_S, run_scenario
from grpo_orch.orchestrator.simulate.simulated_cloud import BRISK, SimulatedMachine
from grpo_orch.orchestrator.simulate.simulation import DT_S, Simulation
from grpo_orch.orchestrator.simulate.store import Trouble
from grpo_orch.policies.model.vocabulary import Role
from tests.budget import examples
from tests.stand_ins.world import spec

pytestmark = pytest.mark.usefixtures("quiet_log")
BOOT_S = BRISK.launch_s + BRISK.setup_s + BRISK.first_weights_s


@settings(max_examples=examples(100), deadline=None, derandomize=True)
@given(st.integers(0, 2**32))
@example(1)
@example(379)  # slow launches on both markets, and no spot after that
@example(3210)  # a trainer's machine is cut off for an hour, found again, and cut off in the same moment
def test_no_trouble_of_any_party_makes_a_controller_harm_its_run(seed: int) -> None:
    """A replaced controller does nothing more; no machine that works or has checkpoints in its spool is given up;
    what never works is not bought for ever; and once the faults end the run comes to its end."""
    run_scenario(seed, spec(2))


def test_repeated_scenario_is_identical() -> None:
    assert run_scenario(7, spec(2)) == run_scenario(7, spec(2))
    assert run_scenario(7, spec(2)).digest != run_scenario(8, spec(2)).digest


def training(max_steps: int = 2000) -> Simulation:
    world = Simulation(0, spec(2), max_steps=max_steps)
    world.run_for(2 * BOOT_S + 120.0)
    assert trainer(world).step > 0
    return world


def trainer(world: Simulation) -> SimulatedMachine:
    [box] = world.cloud.of(Role.TRAINER)
    return box


@pytest.mark.parametrize("trouble", [Trouble.NO_WRITES, Trouble.AWAY])
@pytest.mark.parametrize("for_s", OUTAGES_S)
def test_a_store_in_trouble_costs_no_machine_and_no_step(trouble: Trouble, for_s: float) -> None:
    world = training()
    machines, steps = list(world.cloud.bought), trainer(world).step
    world.objects.trouble = trouble
    world.run_for(for_s)
    assert trainer(world).spool or for_s < 60
    world.objects.clear()
    world.run_for(60.0)
    assert world.cloud.bought == machines
    assert trainer(world).attempt == 1
    assert trainer(world).step >= steps + min(for_s, 100) / DT_S
    world.run_to_end(4 * HOUR_S)
    assert world.cloud.bought == machines


@pytest.mark.parametrize("trouble", [Trouble.NO_WRITES, Trouble.AWAY])
@pytest.mark.parametrize("for_s", OUTAGES_S)
def test_a_trainers_machine_that_finds_the_store_again_is_kept(trouble: Trouble, for_s: float) -> None:
    """The gateway on it is heard first, before the trainer that was silent with it."""
    world = training()
    machines, there = list(world.cloud.bought), trainer(world)
    there.store.trouble = trouble
    world.run_for(for_s)
    there.store.trouble = Trouble.NONE
    world.run_for(60.0)
    assert world.cloud.bought == machines
    assert trainer(world).attempt == 1


@pytest.mark.parametrize("ahead_s", [-HOUR_S, HOUR_S])
@pytest.mark.parametrize("whose", ["here", "elsewhere"])
def test_setting_a_clock_hurries_and_delays_nothing(ahead_s: float, whose: str) -> None:
    """In a daemon's life, and from one to the next: while a trainer waits for its restart and a node boots."""
    world = training()
    world.cloud.lose(world.cloud.of(Role.ROLLOUT)[0])
    world.run_for(2 * DT_S)  # its successor boots
    trainer(world).exit_code = 1
    world.run_for(DT_S)  # its end is journalled
    if whose == "here":
        world.daemons[0].ahead_s += ahead_s
    else:
        world.daemons[0].dead, world.skew_s = True, ahead_s
        world.run_for(2 * BOOT_S)
    machines = list(world.cloud.bought)
    world.run_for(BOOT_S + 60.0)
    assert trainer(world).attempt == 2
    assert trainer(world).is_working(world.time_s)
    world.run_to_end(6 * HOUR_S)
    assert world.cloud.bought == machines


@pytest.mark.parametrize("fault", ["stopped", "dies"])
def test_stop_or_kill_between_decision_and_act_is_harmless(fault: str) -> None:
    """At each operation on the store in turn, and before each queued action: a successor steers meanwhile."""
    for operation in range(40):
        world = training(150)
        first = world.daemons[0]
        world.cloud.lose(world.cloud.of(Role.ROLLOUT)[0])
        if fault == "dies":
            first.die_in = operation
        else:
            first.stop_in, first.stop_for_s = operation, HOUR_S
        world.run_for(DT_S)  # the world itself fails when somebody acts who must not
        if (first.die_in is not None and first.die_in >= 0) or first.stop_in is not None:
            assert operation > 10
            break  # a tick has fewer operations
        world.run_for(2 * DT_S)
        assert first.dead
        world.run_to_end(4 * HOUR_S)
        assert len(world.daemons) == 2
