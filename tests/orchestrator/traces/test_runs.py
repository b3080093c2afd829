"""One run or several: what falls back to the start is another, what falls back less went on from a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from grpo_orch.orchestrator.traces.formats import Log
from grpo_orch.orchestrator.traces.names import Row
from grpo_orch.orchestrator.traces.read import runs


def rows(steps: Iterable[int], kl: float = 0.1) -> list[Row]:
    return [{"step": step, "kl": kl} for step in steps]


def told(*parts: list[Row]) -> dict[str, list[tuple[int, float | None]]]:
    """Of each run, its steps with their KL."""
    found = runs(Log([row for part in parts for row in part]))
    return {name: [(point.step, point.values["kl"]) for point in points] for name, points in found}


@pytest.mark.parametrize("every", [1, 10])
def test_a_start_from_the_first_step_is_another_run(every: int) -> None:
    steps = range(every, 20 * every, every)
    assert told(rows(steps, 0.1), rows(steps, 0.2), rows(steps, 0.3)) == {
        str(number): [(step, number / 10) for step in steps] for number in (1, 2, 3)
    }


def test_a_start_from_before_a_resumed_run_is_another_run() -> None:
    assert told(rows(range(100, 110), 0.1), rows(range(1, 5), 0.2)) == {
        "1": [(step, 0.1) for step in range(100, 110)],
        "2": [(step, 0.2) for step in range(1, 5)],
    }


@pytest.mark.parametrize("back", [2, 50, 99])
def test_steps_made_again_from_a_checkpoint_replace_all_from_there(back: int) -> None:
    assert told(rows(range(1, 101), 0.1), rows(range(back, 105), 0.2)) == {
        "": [(step, 0.1 if step < back else 0.2) for step in range(1, 105)]
    }


def test_what_a_restart_that_got_less_far_abandoned_is_gone() -> None:
    assert told(rows(range(1, 101), 9.0), rows(range(50, 61), 0.2))[""][-1] == (60, 0.2)


def test_a_start_that_failed_at_once_is_no_run() -> None:
    assert told(rows([1, 2], 0.1), rows(range(1, 9), 0.2)) == {"": [(step, 0.2) for step in range(1, 9)]}


def test_what_comes_late_is_added_to_its_step() -> None:
    late: list[Row] = [*rows(range(1, 6)), {"step": 1, "reward": 0.5}, {"step": 2, "eval_reward": 0.5}]
    ((name, points),) = runs(Log(late))
    assert (name, len(points)) == ("", 5)
    assert points[0].values == {"kl": 0.1, "reward": 0.5}
    assert points[1].values == {"kl": 0.1, "eval_reward": 0.5}


def test_metrics_that_were_written_one_after_the_other_are_of_one_run() -> None:
    one_by_one: list[Row] = [*rows(range(1, 6)), *({"step": step, "loss": 0.5} for step in range(1, 6))]
    ((_, points),) = runs(Log(one_by_one))
    assert [dict(point.values) for point in points] == [{"kl": 0.1, "loss": 0.5}] * 5


def test_runs_are_told_apart_by_name_wherever_their_rows_are() -> None:
    mixed: list[Row] = [{**row, "run": name} for row in rows(range(1, 5)) for name in ("b", "a")]
    again: list[Row] = [{**row, "run": "a"} for row in rows(range(1, 5))]
    assert list(told(mixed)) == ["b", "a"]
    assert list(told(mixed, again)) == ["b", "a#1", "a#2"]
    assert list(told([row for row in mixed if row["run"] == "a"])) == [""]
    configuration: list[Row] = [{"run": "c", "learning_rate": 1e-6}]
    assert list(told(mixed, configuration)) == ["b", "a"]
