"""Where a step's time goes, in as many points as a screen has."""

from __future__ import annotations

import pytest

from checkpoint.records.metrics import GENERATE_S, PARTS, TRAINING, Row, split
from orchestrator.web.course import split_table
from tests.orchestrator.web.test_site import Client, browse, run_of


def at(row: Row) -> float:
    return float(row.step)


def test_ten_thousand_steps_in_five_hundred_points_add_up() -> None:
    rows = [Row(0, step, 8.0 * step, 1, {GENERATE_S: 6.0 if step > 5000 else 2.0}) for step in range(10_000)]
    found = split_table(split(rows), at, 500)
    seconds = found["seconds"]
    assert len(found["x"]) == 500 == len(seconds[TRAINING])
    assert (seconds["generating"][0], seconds["generating"][-1]) == (2.0, 6.0)
    assert (seconds[TRAINING][0], seconds[TRAINING][-1]) == (6.0, 2.0)
    assert sum(found["total_s"].values()) == pytest.approx(8.0 * 9999)


def test_rows_of_several_steps_are_told_a_step() -> None:
    rows = [Row(0, step, 8.0 * step, 1, {GENERATE_S: 20.0}) for step in (0, 5, 10)]
    found = split_table(split(rows), at, 500)
    assert (found["seconds"]["generating"], found["seconds"][TRAINING]) == ([4.0, 4.0], [4.0, 4.0])
    assert found["steps"] == 10


def test_the_same_window_as_the_curves() -> None:
    async def story(client: Client) -> None:
        told = await (await client.get("/split", params={"from": "4", "to": "6"})).json()
        assert told["x"] == [4.0, 5.0, 6.0]
        assert told["seconds"][TRAINING] == [2.0, 2.0, 2.0]
        nothing = await (await client.get("/split", params={"from": "4000"})).json()
        assert nothing["x"] == []
        assert list(nothing["seconds"]) == list(PARTS)

    browse(run_of(), story)
