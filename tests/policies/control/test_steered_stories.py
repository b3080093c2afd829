"""A controller, its successor and their machines through random trouble of every party, each story from a seed."""

from __future__ import annotations

import logging

import pytest
import structlog
from hypothesis import example, given, settings
from hypothesis import strategies as st

from policies.model.vocabulary import Role
from tests.budget import examples
from tests.generators.steered_stories import OUTAGES_S, tell
from tests.stand_ins.steered_world import BOOT_S, DT_S, Box, SteeredWorld
from tests.stand_ins.weather_store import Weather


@pytest.fixture(autouse=True)
def _quiet(own_log: None) -> None:  # noqa: ARG001  # which ends it
    """The log of thousands of ticks is of no use here."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))


@settings(max_examples=examples(100), deadline=None, derandomize=True)
@given(st.integers(0, 2**32))
@example(139)  # the cloud away while the trainer boots
@example(134)  # the same, with rollout nodes that look idle
@example(548)  # without writes, and nothing to be written
@example(7327)  # a trainer that is heard while nothing can be journalled, and then cut off
@example(163)  # stopped in its last tick
def test_no_trouble_of_any_party_makes_a_controller_harm_its_run(seed: int) -> None:
    """A replaced controller does nothing more; no machine that works or has checkpoints in its spool is given up;
    what never works is not bought for ever; and once the faults end the run comes to its end."""
    world = tell(seed)
    world.check(len(world.bought) <= 25, f"bought {world.bought}")


def training() -> SteeredWorld:
    world = SteeredWorld(0, max_steps=2000)
    world.run_for(2 * BOOT_S + 120.0)
    assert trainer(world).step > 0
    return world


def trainer(world: SteeredWorld) -> Box:
    [box] = [one for one in world.boxes.values() if one.role is Role.TRAINER]
    return box


@pytest.mark.parametrize("weather", [Weather.NO_WRITES, Weather.AWAY])
@pytest.mark.parametrize("for_s", OUTAGES_S)
def test_a_store_in_trouble_costs_no_machine_and_no_step(weather: Weather, for_s: float) -> None:
    world = training()
    machines, steps = list(world.bought), trainer(world).step
    world.sky.weather = weather
    world.run_for(for_s)
    assert trainer(world).sealed > world.stored_step or for_s < 60  # checkpoints wait in the spool
    world.sky.clear()
    world.run_for(60.0)
    assert world.bought == machines
    assert trainer(world).attempt == 1
    assert trainer(world).step >= steps + min(for_s, 100) / DT_S
    world.run_to_end(4 * 3600.0)
    assert world.bought == machines


@pytest.mark.parametrize("ahead_s", [-3600.0, 3600.0])
@pytest.mark.parametrize("whose", ["here", "elsewhere"])
def test_a_clock_that_is_set_hurries_and_delays_nothing(ahead_s: float, whose: str) -> None:
    """In a daemon's life, and from one to the next: while a trainer waits for its restart and a node boots."""
    world = training()
    box = next(one for one in world.boxes.values() if one.role is Role.ROLLOUT)
    world.lose(box)
    world.run_for(2 * DT_S)  # its successor boots
    trainer(world).exit_code = 1
    world.run_for(DT_S)  # its end is journalled
    if whose == "here":
        world.daemons[0].ahead_s += ahead_s
    else:
        world.daemons[0].dead, world.skew_s = True, ahead_s
        world.run_for(2 * BOOT_S)
    machines = list(world.bought)
    world.run_for(BOOT_S + 60.0)
    assert trainer(world).attempt == 2
    assert world.at_work(trainer(world))
    world.run_to_end(6 * 3600.0)
    assert world.bought == machines


def test_who_was_stopped_for_an_hour_between_decision_and_act_does_nothing() -> None:
    """At each operation on the store in turn, and before each queued action: a successor steers meanwhile."""
    for operation in range(30):
        world = training()
        first = world.daemons[0]
        world.lose(next(one for one in world.boxes.values() if one.role is Role.ROLLOUT))
        first.stop_in, first.stop_for_s = operation, 3600.0
        world.run_for(DT_S)  # the world itself fails when somebody acts who must not
        if first.stop_in is not None:
            assert operation > 10
            break  # a tick has fewer operations
        assert len(world.daemons) == 2
        world.run_for(2 * DT_S)
        assert first.dead
        world.run_to_end(4 * 3600.0)
