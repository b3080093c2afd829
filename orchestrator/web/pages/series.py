"""A run's curves in a window of time or steps, as many points as a screen has: the same data at every zoom.

Where a window has more rows than points, neighbours share one: their mean, and the lowest and highest of them, so
that no spike is lost.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from checkpoint.records.metrics import Row
from checkpoint.records.step_split import PARTS, StepSplit, split
from orchestrator.views.report import HELD_OUT, REWARD
from orchestrator.web.page import Asked, Page, window_of
from orchestrator.web.watch import Look
from policies.ledger.accounting import Fault, fault_costs, journalled_faults, merge_faults

POINTS, POINTS_MOST = 600, 4000
MARKS_MOST = 300
METRICS = {"reward": REWARD, "held_out": HELD_OUT, "kl": "kl", "loss": "loss"}

Values = list[float | None]


def _series(look: Look, asked: Asked) -> dict[str, Any]:
    window = window_of(look, asked)
    axis, low, high = window.axis, window.low, window.high
    points = asked.whole("points", POINTS, 10, POINTS_MOST)
    present = [row for row in look.path if window.holds(row)]
    lost = [row for row in look.abandoned if window.holds(row)]
    faults = look.once("faults", lambda: _faults(look))
    return {
        "axis": axis,
        "from_s": window.from_s,
        "until_s": window.until_s,
        "present": table(present, axis, points),
        "abandoned": table(lost, axis, points),
        "kl_limit": look.once("kl limit", lambda: look.view.kl_limit),
        "faults": marks([one for one in faults if low <= one[axis] <= high], axis),
        "timelines": look.once("timelines", lambda: _timelines(look)),
    }


def table(rows: Sequence[Row], axis: str, points: int) -> dict[str, Values]:
    """Columns of equal length: `x`, and of each metric its mean, `NAME_low` and `NAME_high`; None where nothing
    was logged. At most `points` of them."""
    rows = sorted(rows, key=lambda row: _at(row, axis))
    if not rows:
        return {"x": [], **{name + end: [] for name in METRICS for end in ("", "_low", "_high")}}
    xs = np.array([_at(row, axis) for row in rows])
    starts = bins(xs, points)
    sizes = np.diff(np.r_[starts, len(rows)])
    found: dict[str, Values] = {"x": (np.add.reduceat(xs, starts) / sizes).tolist()}
    for name, metric in METRICS.items():
        values = np.array([row.values.get(metric, math.nan) for row in rows])
        known = ~np.isnan(values)
        counts = np.add.reduceat(known.astype(float), starts)
        sums = np.add.reduceat(np.where(known, values, 0.0), starts)
        lows = np.minimum.reduceat(np.where(known, values, np.inf), starts)
        highs = np.maximum.reduceat(np.where(known, values, -np.inf), starts)
        for end, column in (("", sums / np.maximum(counts, 1.0)), ("_low", lows), ("_high", highs)):
            found[name + end] = [float(v) if n else None for v, n in zip(column, counts, strict=True)]
    return found


def bins(xs: NDArray[np.float64], points: int) -> NDArray[np.intp]:
    """Where each of at most `points` stretches of equal width begins, as places in `xs`, which is in order."""
    count, span = min(points, len(xs)), float(xs[-1] - xs[0])
    place = np.arange(len(xs))
    if len(xs) > points and span > 0:
        place = np.minimum((xs - xs[0]) / span * count, count - 1).astype(int)
    return np.flatnonzero(np.r_[True, place[1:] != place[:-1]])


def marks(faults: Sequence[dict[str, Any]], axis: str) -> list[dict[str, Any]]:
    """At most MARKS_MOST of them, wherever they are: neighbours become one, with `count` and all they cost."""
    if len(faults) <= MARKS_MOST:
        return [{**one, "count": 1} for one in faults]
    first, last = min(one[axis] for one in faults), max(one[axis] for one in faults)
    piles = defaultdict[int, list[dict[str, Any]]](list)
    for one in faults:
        piles[int((one[axis] - first) / max(last - first, 1e-9) * (MARKS_MOST - 1))].append(one)
    return [_pile(piles[place]) for place in sorted(piles)]


def _pile(faults: Sequence[dict[str, Any]]) -> dict[str, Any]:
    name = faults[0]["name"] if len(faults) == 1 else f"{len(faults)} faults"
    cost_s = round(sum(one["seconds_lost"] for one in faults), 1)
    return {**faults[0], "name": name, "seconds_lost": cost_s, "count": len(faults)}


def _at(row: Row, axis: str) -> float:
    return float(row.step) if axis == "step" else row.time_s


def _faults(look: Look) -> list[dict[str, Any]]:
    done = [
        Fault(f"{one.fault.replace('_', ' ')} {one.target}", one.target, one.time_s, one.time_s, one.at_step)
        for one in look.faults
    ]
    faults = merge_faults(done, journalled_faults(look.history))
    costs = fault_costs(look.rows, faults)
    return [
        {
            "step": cost.at_step,
            "time": fault.struck_s,
            "name": cost.name,
            "seconds_lost": round(cost.seconds_lost, 1),
        }
        for fault, cost in zip(faults, costs, strict=True)
    ]


def _timelines(look: Look) -> list[dict[str, Any]]:
    """Each timeline after the first: where it began, and how far the one before had come."""
    return [
        {
            "timeline": one.fork.timeline,
            "start_step": 0 if one.fork.start_at is None else one.fork.start_at.step,
            "from_step": one.from_step,
        }
        for one in look.state.rollbacks
    ]


SERIES = Page("/series", _series)


# Where a step's time goes: seconds of its parts, in a window of time or steps, as many points as a screen has.


def _split(look: Look, asked: Asked) -> dict[str, Any]:
    window = window_of(look, asked)
    points = asked.whole("points", POINTS, 10, POINTS_MOST)
    every = look.once("split", lambda: split(look.path))
    inside = [one for one in every if window.holds(one.row)]
    return {
        "axis": window.axis,
        "from_s": window.from_s,
        "until_s": window.until_s,
        **split_table(inside, window.at, points),
    }


def split_table(found: Sequence[StepSplit], at: Any, points: int) -> dict[str, Any]:
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


SPLIT = Page("/split", _split)
