"""What is seen of a run's money and of its deadline."""

from __future__ import annotations

import json

import pytest

from orchestrator.views import screen as notes
from orchestrator.views.model import DeadlineView, to_json
from policies.model.events import RunMoved, SpecProved
from policies.model.vocabulary import RunPhase
from tests.generators.views_world import T0, World, look, run_view


def test_the_way_to_a_deadline_is_seen() -> None:
    assert look(World(), 1).deadline is None
    world = World(deadline="2023-11-14T22:16:40Z")  # T0 + 200 s
    world.starts()
    before = look(world, 11).deadline
    assert before == DeadlineView(T0 + 200, None, None, None, None)
    world.happens(10, SpecProved())
    for step in range(1, 11):
        world.logs(20 + 2 * step, step, orch__generate_s=1.0, orch__generate_node_s=1.0, orch__tokens=100.0)
    world.beats(41, 10)
    view = look(world, 42)
    assert view.deadline is not None
    assert (view.deadline.behind, view.deadline.nodes, view.deadline.end_s) == (False, 1, T0 + 102)
    assert view.deadline.expected_step == pytest.approx(
        40 * 32 / (200 - 10 - 18)
    )  # two starts of 9 s are kept in reserve
    assert to_json(view)["deadline"]["deadline_s"] == T0 + 200
    (line,) = notes.deadline(view, 110)
    told = "ends 2023-11-14 22:15 UTC · step 10, 7 expected · 1 node keeps it"
    assert line.plain.split(None, 1) == ["deadline", f"2023-11-14 22:16 UTC · {told}"]
    late = look(world, 150).deadline
    assert late is not None
    assert (late.behind, late.nodes) == (True, 0)


def test_whether_a_deadline_was_kept_is_seen_once_the_run_is_done() -> None:
    for last_s, told in ((140, "kept, 1:00 min before"), (230, "missed by 30 s")):
        world = World(deadline="2023-11-14T22:16:40Z")  # T0 + 200 s
        world.starts()
        world.happens(10, SpecProved())
        world.logs(last_s, 40)
        world.beats(last_s, 40)
        world.happens(last_s + 5, RunMoved(RunPhase.FINISHED, "the trainer reached its last step"))
        (line,) = notes.deadline(look(world, 900), 110)
        assert line.plain.split(None, 1) == ["deadline", f"2023-11-14 22:16 UTC · {told}"]


def test_the_money_and_the_split_of_a_step_are_told() -> None:
    """Two nodes at 0.90 USD an hour and a trainer at 7.20 since 1 s; steps of 10 s, 4 s of them on two nodes."""
    world = World()
    world.starts()
    for step in range(1, 11):
        world.logs(20 + 10 * step, step, orch__generate_s=4.0, orch__generate_node_s=8.0, orch__tokens=1000.0)
    world.beats(121, 10)
    view = run_view(world.store, T0 + 121, None)
    spent = 120 * (7.2 + 1.8) / 3600
    assert view.money.spent_usd == pytest.approx(spent)
    assert view.money.all_on_demand_usd == pytest.approx(120 * (7.2 + 7.2) / 3600)
    assert view.money.usd_per_step == pytest.approx(spent / 10)
    assert view.money.usd_per_million_tokens == pytest.approx(spent * 100)
    assert view.money.forecast_usd == pytest.approx(spent + 9.0 * 300 / 3600)
    assert view.fleet is not None
    assert view.fleet.fixed_s == pytest.approx(6)
    assert view.fleet.generation_node_s == pytest.approx(8)
    assert view.fleet.cheapest == pytest.approx((7.2 * 8 / (0.9 * 6)) ** 0.5)
    assert json.dumps(to_json(view))
