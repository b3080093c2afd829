"""An hour without a machine is told once, and again only after there was one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from policies.model.events import BudgetNeared, CapacityMissing
from policies.model.vocabulary import Role
from tests.stand_ins.world import World, capped, priced, spec


def told(world: World) -> list[tuple[str, float]]:
    found = [(event, at) for _, at, events in world.history for event in events]
    return [(event.role, at - event.since_s) for event, at in found if isinstance(event, CapacityMissing)]


@pytest.mark.parametrize("role", Role)
def test_an_hour_without_a_machine_is_told_once(role: Role) -> None:
    stays = replace(spec(), grpo={"save_strategy": "no"})  # others park, which says it
    world = World(stays, max_steps=10**6, refusing=role is Role.TRAINER, refusing_rollouts=role is Role.ROLLOUT)
    world.wait(3500.0, 60.0)
    assert told(world) == []
    world.wait(4 * 3600.0, 60.0)
    ((who, after_s),) = told(world)
    assert who == role
    assert 3600.0 <= after_s < 3700.0
    world.refusing = world.refusing_rollouts = False
    world.wait(3600.0, 60.0)
    assert world.state.capacity_told == frozenset()
    world.refusing_rollouts = True
    for node in world.up(Role.ROLLOUT):
        world.lose(node)
    world.wait(3 * 3600.0, 60.0)
    assert [who for who, _ in told(world)] == [role, Role.ROLLOUT]


def test_a_run_that_nobody_steered_for_hours_has_not_lacked_anything() -> None:
    world = World(max_steps=10**6, refusing=True)
    world.wait(1800.0, 60.0)
    world.now_s += 10**5
    looked = world.snapshot
    world.take_over()
    steered_from_s = world.now_s
    world.snapshot = lambda: replace(looked(), steady_s=world.now_s - steered_from_s)  # type: ignore[method-assign]
    world.wait(3000.0, 60.0)
    assert told(world) == []
    world.wait(1200.0, 60.0)
    assert len(told(world)) == 1


def test_four_fifths_of_the_budget_are_told_once_a_budget() -> None:
    world = priced(capped(100.0), max_steps=10**6)
    world.run(10**5)
    neared = world.of(BudgetNeared)
    assert [event.usd for event in neared] == [100.0]
    assert 80.0 <= neared[0].spent_usd < 81.0
