"""The recorded runs: their labels agree with their rows, and the detector does on them what the docs report."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from benchmarks.rig.divergence.recorded import as_trace, recorded_traces
from benchmarks.rig.divergence.score import Outcome, judge, score
from benchmarks.rig.divergence.traces import Trace
from grpo_orch.policies.detect.divergence import Point
from tests.generators.recorded import FOLDER, Label, recorded

SPLITS = ("seen", "unseen")
# docs/benchmarks.md: per split the runs that are missed, the false trips and the number of runs that are caught.
MISSED = {"seen": {"letters-hack"}, "unseen": {"21-wrong-answers"}}
FALSE = {"seen": {"curriculum-harder"}, "unseen": {"05-reward-breaks"}}
CAUGHT = {"seen": 35, "unseen": 12}


def names(outcomes: list[Outcome]) -> set[str]:
    return {one.trace.family for one in outcomes}


@pytest.mark.parametrize("split", SPLITS)
def test_labels_fit_their_runs(split: str) -> None:
    runs = recorded(split)
    assert {name for name, _, _ in runs} == {path.stem for path in (FOLDER / split).glob("*.jsonl")}
    assert {label.diverged for _, label, _ in runs} == {True, False}
    for name, label, rows in runs:
        steps = [row["step"] for row in rows]
        assert len(steps) > 10, name
        assert {after - before for before, after in itertools.pairwise(steps)} == {label.logging_steps}, name
        assert label.diverged == (label.onset_step is not None), name
        assert label.onset_step is None or 0 < label.onset_step <= steps[-1], name
        assert label.why.endswith("."), name


@pytest.mark.parametrize("split", SPLITS)
def test_detector_is_right_about_recorded_runs(split: str) -> None:
    outcomes = [judge(one) for one in recorded_traces(split)]
    caught = [one for one in outcomes if one.caught]
    assert names([one for one in outcomes if one.missed]) <= MISSED[split]
    assert names([one for one in outcomes if one.false_trip]) <= FALSE[split]
    assert len(caught) >= CAUGHT[split]
    assert sum(not one.target_is_good for one in caught) <= 1
    told = score(outcomes)
    assert told.delay_points_median is not None
    assert told.delay_points_median <= {"seen": 12, "unseen": 23.5}[split]


def test_recorded_run_is_a_trace() -> None:
    label = Label(True, 15, 10, cause="", why="It broke.", settings={})
    told = (Point(10, {"kl": 0.5, "loss": None}), Point(20, {"kl": None}))
    rows: list[dict[str, Any]] = [{"step": 10, "kl": 0.5, "loss": None}, {"step": 20, "kl": np.nan}]
    assert as_trace("one", label, rows) == Trace("one", told, 15, 10, None)
