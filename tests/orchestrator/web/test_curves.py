"""Curves over steps or time, in as many points as a screen has: metrics, the split of a step, dollars."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from grpo_orch.checkpoint.records.metrics import GENERATE_S, PARTS, TRAINING, MetricsRow, split
from grpo_orch.orchestrator import web
from grpo_orch.orchestrator.web.curves import split_table, table
from grpo_orch.orchestrator.web.pages import MONEY_POINTS
from grpo_orch.policies.model.events import BudgetSet, RunMoved
from grpo_orch.policies.model.vocabulary import NodePhase, RunPhase
from tests.generators.views_world import T0, World
from tests.orchestrator.web.test_site import ask, run_of


def at(row: MetricsRow) -> float:
    return float(row.step)


def test_a_spike_of_one_step_shows_among_ten_thousand() -> None:
    rows = [MetricsRow(0, step, float(step), 1, {"kl": 9.0 if step == 4321 else 0.1}) for step in range(10_000)]
    found = table(rows, at, 500)
    assert len(found["x"]) == len(found["kl"]) == 500
    highs = [(high or 0.0, x or 0.0) for high, x in zip(found["kl_high"], found["x"], strict=True)]
    assert max(highs)[0] == 9.0
    assert abs(max(highs)[1] - 4321) < 20
    assert set(found["reward"]) == {None}


def test_every_part_of_a_step_has_a_colour() -> None:
    script = (Path(web.__file__).parent / "static" / "split.js").read_text()
    colours = script.partition("COLOURS = {")[2].partition("}")[0]
    assert set(re.findall(r'([a-z][a-z ]*)"?: "--', colours)) == set(PARTS)


def test_few_steps_are_all_shown_as_logged() -> None:
    rows = [MetricsRow(0, step, 100.0 * step, 1, {"reward": step / 4}) for step in (1, 2, 4)]
    found = table(rows, lambda row: row.time_s, 500)
    assert found["x"] == [100.0, 200.0, 400.0]
    assert found["reward"] == found["reward_low"] == found["reward_high"] == [0.25, 0.5, 1.0]
    assert table([], at, 500)["kl_high"] == []


def test_ten_thousand_steps_in_five_hundred_points_add_up() -> None:
    rows = [
        MetricsRow(0, step, 8.0 * step, 1, {GENERATE_S: 6.0 if step > 5000 else 2.0}) for step in range(10_000)
    ]
    found = split_table(split(rows), at, 500)
    seconds = found["seconds"]
    assert len(found["x"]) == 500 == len(seconds[TRAINING])
    assert (seconds["generating"][0], seconds["generating"][-1]) == (2.0, 6.0)
    assert (seconds[TRAINING][0], seconds[TRAINING][-1]) == (6.0, 2.0)
    assert sum(found["total_s"].values()) == pytest.approx(8.0 * 9999)


def test_rows_of_several_steps_are_shown_per_step() -> None:
    rows = [MetricsRow(0, step, 8.0 * step, 1, {GENERATE_S: 20.0}) for step in (0, 5, 10)]
    found = split_table(split(rows), at, 500)
    assert (found["seconds"]["generating"], found["seconds"][TRAINING]) == ([4.0, 4.0], [4.0, 4.0])
    assert found["steps"] == 10


def test_the_same_window_as_the_curves() -> None:
    told, nothing = ask(run_of(), "/split?from=4&to=6", "/split?from=4000")
    assert told["x"] == [4.0, 5.0, 6.0]
    assert told["seconds"][TRAINING] == [2.0, 2.0, 2.0]
    assert nothing["x"] == []
    assert list(nothing["seconds"]) == list(PARTS)


def end(world: World, at_s: float) -> None:
    """Every machine goes back, and nothing costs any more."""
    world.happens(at_s, RunMoved(RunPhase.FINISHED, "the trainer reached its last step"))
    for node in ("trainer-0-i1", "rollout-0-i1", "rollout-1-i1"):
        world.moves(at_s, node, NodePhase.TERMINATING)
        world.moves(at_s, node, NodePhase.GONE)


def test_costs_add_up_to_the_total() -> None:
    world = run_of()
    world.happens(20, BudgetSet(40.0))
    end(world, 3601)
    told = ask(world, "/money?format=json")[0]
    dollars, money = told["over_time"], told["money"]
    assert (dollars["x"][0] - T0, dollars["x"][-1] - T0) == (1, 3601)
    assert dollars["usd"]["trainer"][-1] == pytest.approx(7.2)
    assert dollars["usd"]["spot"][-1] == pytest.approx(1.8)
    assert sum(column[-1] for column in dollars["usd"].values()) == pytest.approx(money["spent_usd"])
    assert [[at_s - T0, usd] for at_s, usd in dollars["budget"]] == [[20, 40.0]]
    assert dollars["forecast"] is None


def test_curve_has_few_hundred_points_for_any_machine_count() -> None:
    world = run_of()
    for number in range(2, 500):
        world.moves(20 + 10 * number, f"rollout-0-i{number - 1}", NodePhase.GONE)
        world.asks_for(21 + 10 * number, f"rollout-0-i{number}")
    dollars = ask(world, "/money?format=json")[0]["over_time"]
    assert {len(dollars["x"]), *map(len, dollars["usd"].values())} == {MONEY_POINTS}
    for column in dollars["usd"].values():
        assert column == sorted(column)


def test_page_is_empty_before_any_request() -> None:
    world = World()
    world.take_over(0)
    dollars = ask(world, "/money?format=json")[0]["over_time"]
    assert (dollars["x"], dollars["usd"], dollars["forecast"]) == ([], {}, None)
