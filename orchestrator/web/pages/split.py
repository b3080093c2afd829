"""Where a step's time goes: seconds of its parts, in a window of time or steps, as many points as a screen has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from checkpoint.records.step_split import PARTS, StepSplit, split
from orchestrator.web.page import Asked, Page
from orchestrator.web.pages.series import POINTS, POINTS_MOST, bins
from orchestrator.web.pages.window import window_of
from orchestrator.web.watch import Look


def _data(look: Look, asked: Asked) -> dict[str, Any]:
    window = window_of(look, asked)
    points = asked.whole("points", POINTS, 10, POINTS_MOST)
    every = look.once("split", lambda: split(look.path))
    inside = [one for one in every if window.holds(one.row)]
    return {
        "axis": window.axis,
        "from_s": window.from_s,
        "until_s": window.until_s,
        **table(inside, window.at, points),
    }


def table(found: Sequence[StepSplit], at: Any, points: int) -> dict[str, Any]:
    """`x` and, by part, seconds a step, columns of equal length; of all of them together `total_s` by part."""
    parts = np.array([[one.seconds[part] for part in PARTS] for one in found]).reshape(len(found), len(PARTS))
    total_s = {part: round(float(sum_s), 1) for part, sum_s in zip(PARTS, parts.sum(axis=0), strict=True)}
    if not found:
        return {"x": [], "seconds": {part: [] for part in PARTS}, "total_s": total_s, "steps": 0}
    xs = np.array([at(one.row) for one in found])
    steps = np.array([float(one.steps) for one in found])
    starts = bins(xs, points)
    made = np.add.reduceat(steps, starts)
    seconds = np.add.reduceat(parts, starts, axis=0) / made[:, None]
    return {
        "x": (np.add.reduceat(xs, starts) / np.diff(np.r_[starts, len(xs)])).tolist(),
        "seconds": {part: seconds[:, n].round(3).tolist() for n, part in enumerate(PARTS)},
        "total_s": total_s,
        "steps": int(steps.sum()),
    }


PAGE = Page("/split", _data)
