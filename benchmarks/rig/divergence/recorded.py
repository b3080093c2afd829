"""Recorded runs as traces, so that they are judged as the synthetic ones are."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import Any

from benchmarks.rig.divergence.traces import Trace
from grpo_orch.policies.detect.divergence import Point
from tests.generators.recorded import Label, recorded


def recorded_traces(split: str) -> list[Trace]:
    """The runs of a split, `seen` or `unseen`, by name; none where there is no such split."""
    return [as_trace(*run) for run in recorded(split)]


def as_trace(name: str, label: Label, rows: list[dict[str, Any]]) -> Trace:
    told = tuple(Point(row["step"], _values(row)) for row in rows)
    return Trace(name, told, label.onset_step, label.logging_steps, None)


def _values(row: Mapping[str, float | None]) -> dict[str, float | None]:
    """Everything but the step; what is no finite number is None, as the trainer stores it."""
    return {
        name: value if value is not None and isfinite(value) else None
        for name, value in row.items()
        if name != "step"
    }
