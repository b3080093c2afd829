"""CSV: with a header of any trainer's names, with tabs, and as Weights & Biases exports a chart or a history."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path

import pytest

from grpo_orch.orchestrator.traces.read import read_traces

Told = dict[str, dict[int, dict[str, float | None]]]


def told(text: str, folder: Path) -> Told:
    """Of each run, by what comes after the file's name, its points."""
    path = folder / "export.csv"
    path.write_text(text)
    return {one.run: {point.step: dict(point.values) for point in one.points} for one in read_traces(path)}


def exported(axis: str, runs: Sequence[str], metric: str, rows: Sequence[Sequence[float | str]]) -> str:
    """A chart as Weights & Biases exports it: all cells in quotes, three columns of the metric a run."""
    out = io.StringIO()
    writer = csv.writer(out, quoting=csv.QUOTE_ALL)
    ends = ("", "__MIN", "__MAX")
    names = (axis, *(f"{run} - {name}{end}" for run in runs for name in ("_step", metric) for end in ends))
    writer.writerow(names)
    for step, *values in rows:
        cells = [
            cell
            for value in values
            for cell in (7 * float(step),) * 3 + ((value, 0, 99) if value != "" else ("",) * 3)
        ]
        writer.writerow([step, *cells])
    return out.getvalue()


def test_chart_minimum_and_maximum_are_not_its_metric(tmp_path: Path) -> None:
    text = exported("train/global_step", ["lucky-sun-7"], "train/kl", [(10, 0.1), (20, 0.2)])
    assert told(text, tmp_path) == {"": {10: {"kl": 0.1}, 20: {"kl": 0.2}}}


def test_a_chart_of_several_runs_is_several_traces(tmp_path: Path) -> None:
    text = exported("Step", ["a - b", "lr 1e-6"], "train/kl", [(10, 0.1, 0.5), (20, 0.2, ""), (30, 0.3, 0.6)])
    assert told(text, tmp_path) == {
        "a - b": {10: {"kl": 0.1}, 20: {"kl": 0.2}, 30: {"kl": 0.3}},
        "lr 1e-6": {10: {"kl": 0.5}, 30: {"kl": 0.6}},
    }


def test_a_history_has_every_metric_and_its_own_step(tmp_path: Path) -> None:
    text = ",_step,_runtime,train/global_step,train/kl,train/reward,eval/reward\n"
    text += "0,0,3.5,10,0.1,0.5,\n1,1,4.5,,,,0.7\n2,2,6.5,20,0.2,0.6,\n"
    assert told(text, tmp_path)[""][10].items() >= {"kl": 0.1, "reward": 0.5}.items()
    assert told(text, tmp_path)[""][20].items() >= {"kl": 0.2, "reward": 0.6}.items()


@pytest.mark.parametrize("column", ["run", "run_name", "run_id"])
def test_a_column_may_name_the_run(column: str, tmp_path: Path) -> None:
    text = f"timestamp,{column},step,train/kl\n" + "".join(
        f"t,{run},{at},0.{at}\n" for at in (1, 2) for run in "ab"
    )
    assert told(text, tmp_path) == {run: {1: {"kl": 0.1}, 2: {"kl": 0.2}} for run in "ab"}


def test_a_notebooks_table_has_tabs(tmp_path: Path) -> None:
    text = "Step\tTraining Loss\treward\tkl\n10\t0.010000\t0.5\t0.2\n20\t0.020000\t0.6\tnan\n"
    assert told(text, tmp_path) == {
        "": {10: {"loss": 0.01, "reward": 0.5, "kl": 0.2}, 20: {"loss": 0.02, "reward": 0.6, "kl": None}}
    }


def test_a_starts_end_is_an_empty_line(tmp_path: Path) -> None:
    rows = "".join(f"{step},500,0.01,0.5,300\n" for step in range(1, 6))
    again = "".join(f"{step},500,0.02,0.1,90,\n" for step in range(1, 4))
    found = told(f"step,total_steps,loss,reward_avg,avg_response_len\n{rows}\n{again}", tmp_path)
    assert [(name, list(points)) for name, points in found.items()] == [("1", [1, 2, 3, 4, 5]), ("2", [1, 2, 3])]
