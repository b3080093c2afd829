"""Worlds whose runs diverge, and what they journalled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from policies.control.decide import decide
from policies.model.events import Event, RollbackBegun
from policies.model.spec import KlPolicy, RunSpec
from tests.stand_ins.world import World, spec

GRPO = {"beta": 0.04, "learning_rate": 1e-3, "save_steps": 2}


def with_kl(**kl: object) -> RunSpec:
    base = spec()
    policy = KlPolicy(**kl)  # type: ignore[arg-type]  # keys are KlPolicy's own
    return replace(base, grpo=dict(GRPO), policies=replace(base.policies, kl=policy))


def world_of(trips: dict[int, tuple[int, int]], **kl: object) -> World:
    return World(spec=with_kl(**kl), max_steps=40, trips=trips)


def until(world: World, seen: Callable[[World], bool], limit: int = 1000) -> World:
    for _ in range(limit):
        if seen(world):
            return world
        world.tick()
        world.advance()
    raise AssertionError(f"never seen: {world.state}")


def begun(world: World) -> list[RollbackBegun]:
    return world.of(RollbackBegun)


def decides(world: World, stage: type[Event]) -> bool:
    refused = list(world.refused)
    decision = decide(world.state, world.snapshot(), world.spec)
    world.refused = refused
    return any(isinstance(event, stage) for event in decision.events)
