"""Dollars over time, by what they were for."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.web.pages import MONEY_POINTS
from policies.model.events import BudgetSet, RunMoved
from policies.model.vocabulary import NodePhase, RunPhase
from tests.generators.views_world import T0, World
from tests.orchestrator.web.test_site import Client, browse, run_of


def told_by(world: World) -> dict[str, Any]:
    found: list[dict[str, Any]] = []

    async def story(client: Client) -> None:
        found.append(await (await client.get("/money", params={"format": "json"})).json())

    browse(world, story)
    return found[0]


def end(world: World, at_s: float) -> None:
    """Every machine goes back, and nothing costs any more."""
    world.happens(at_s, RunMoved(RunPhase.FINISHED, "the trainer reached its last step"))
    for node in ("trainer-0-i1", "rollout-0-i1", "rollout-1-i1"):
        world.moves(at_s, node, NodePhase.TERMINATING)
        world.moves(at_s, node, NodePhase.GONE)


def test_it_adds_up_to_what_was_spent() -> None:
    world = run_of()
    world.happens(20, BudgetSet(40.0))
    end(world, 3601)
    told = told_by(world)
    dollars, money = told["over_time"], told["money"]
    assert (dollars["x"][0] - T0, dollars["x"][-1] - T0) == (1, 3601)
    assert dollars["usd"]["trainer"][-1] == pytest.approx(7.2)
    assert dollars["usd"]["spot"][-1] == pytest.approx(1.8)
    assert sum(column[-1] for column in dollars["usd"].values()) == pytest.approx(money["spent_usd"])
    assert [[at_s - T0, usd] for at_s, usd in dollars["budget"]] == [[20, 40.0]]
    assert dollars["forecast"] is None


def test_however_many_machines_there_were_it_is_a_few_hundred_points() -> None:
    world = run_of()
    for number in range(2, 500):
        world.moves(20 + 10 * number, f"rollout-0-i{number - 1}", NodePhase.GONE)
        world.asks_for(21 + 10 * number, f"rollout-0-i{number}")
    dollars = told_by(world)["over_time"]
    assert {len(dollars["x"]), *map(len, dollars["usd"].values())} == {MONEY_POINTS}
    for column in dollars["usd"].values():
        assert column == sorted(column)


def test_before_anything_is_asked_for_there_is_nothing() -> None:
    world = World()
    world.take_over(0)
    dollars = told_by(world)["over_time"]
    assert (dollars["x"], dollars["usd"], dollars["forecast"]) == ([], {}, None)
