"""A run over time or steps: its curves, its step times, and its machines, at every zoom from the same data.

If a window has more rows than points, neighbours share a point: their mean, minimum and maximum, so that spikes
stay visible.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from grpo_orch.checkpoint.records.metrics import (
    PARTS,
    PUBLISHED,
    MetricsRow,
    StepSplit,
    StepTiming,
    split,
    step_timings,
)
from grpo_orch.orchestrator.views.report import HELD_OUT, REWARD, run_faults
from grpo_orch.orchestrator.web.page import Page, PageRequest, Window, extent, window_of
from grpo_orch.orchestrator.web.pages import states_of
from grpo_orch.orchestrator.web.run_watch import Observation
from grpo_orch.policies.ledger.accounting import fault_costs
from grpo_orch.policies.ledger.rentals import Life, lives
from grpo_orch.policies.model.events import FleetMoved
from grpo_orch.policies.model.vocabulary import Role

POINTS, POINTS_MAX = 600, 4000
METRICS = {"reward": REWARD, "held_out": HELD_OUT, "kl": "kl", "loss": "loss"}
TIMED = ("generate_s", "train_s", "sync_s", "trainer_idle_s", "fleet_idle_s", "staleness")  # of StepTiming

Values = list[float | None]
At = Callable[[MetricsRow], float]  # the position of a row on the axis


def _series(observation: Observation, request: PageRequest) -> dict[str, Any]:
    window = window_of(observation, request)
    axis, low, high = window.axis, window.low, window.high
    points = request.whole("points", POINTS, 10, POINTS_MAX)
    present = [row for row in observation.reader.path if window.holds(row)]
    lost = [row for row in observation.reader.abandoned if window.holds(row)]
    timings = observation.cached(
        "timings", lambda: timings_of([*observation.reader.path, *observation.reader.abandoned])
    )
    faults = observation.cached("faults", lambda: _faults(observation))
    return {
        "axis": axis,
        "from_s": window.from_s,
        "until_s": window.until_s,
        "present": table(present, window.at, points, timings),
        "abandoned": table(lost, window.at, points, timings),
        "kl_limit": observation.cached("kl limit", lambda: observation.view.kl_limit),
        "faults": [fault for fault in faults if low <= fault[axis] <= high],
        "timelines": observation.cached("timelines", lambda: _timelines(observation)),
    }


Timings = Mapping[tuple[int, int], StepTiming]  # by timeline and step


def timings_of(rows: Sequence[MetricsRow]) -> Timings:
    """Return the timing of each step that has one."""
    found = step_timings(sorted(rows, key=lambda row: row.time_s))
    return {(row.timeline, row.step): timing for row, timing in found}


NO_TIMINGS: Timings = {}


def table(rows: Sequence[MetricsRow], at: At, points: int, timings: Timings = NO_TIMINGS) -> dict[str, Values]:
    """Return columns of at most `points` values: `x` and, for each metric, its mean, `NAME_low` and `NAME_high`.

    Values are None where nothing was logged.
    """
    rows = sorted(rows, key=at)
    if not rows:
        return {"x": [], **{name + end: [] for name in (*METRICS, *TIMED) for end in ("", "_low", "_high")}}
    xs = np.array([at(row) for row in rows])
    starts = bins(xs, points)
    sizes = np.diff(np.r_[starts, len(rows)])
    found: dict[str, Values] = {"x": (np.add.reduceat(xs, starts) / sizes).tolist()}
    columns = {name: [row.values.get(metric) for row in rows] for name, metric in METRICS.items()}
    timed = [timings.get((row.timeline, row.step)) for row in rows]
    columns |= {name: [None if timing is None else getattr(timing, name) for timing in timed] for name in TIMED}
    for name, column in columns.items():
        values = np.array([math.nan if value is None else value for value in column])
        known = ~np.isnan(values)
        counts = np.add.reduceat(known.astype(float), starts)
        sums = np.add.reduceat(np.where(known, values, 0.0), starts)
        lows = np.minimum.reduceat(np.where(known, values, np.inf), starts)
        highs = np.maximum.reduceat(np.where(known, values, -np.inf), starts)
        for end, reduced in (("", sums / np.maximum(counts, 1.0)), ("_low", lows), ("_high", highs)):
            found[name + end] = [float(v) if n else None for v, n in zip(reduced, counts, strict=True)]
    return found


def bins(xs: NDArray[np.float64], points: int) -> NDArray[np.intp]:
    """Split the sorted `xs` into at most `points` bins of equal width; return the index at which each starts."""
    count, span = min(points, len(xs)), float(xs[-1] - xs[0])
    bin_of = np.arange(len(xs))
    if len(xs) > points and span > 0:
        bin_of = np.minimum((xs - xs[0]) / span * count, count - 1).astype(int)
    return np.flatnonzero(np.r_[True, bin_of[1:] != bin_of[:-1]])


def _faults(observation: Observation) -> list[dict[str, Any]]:
    faults = run_faults(observation.reader)
    costs = fault_costs(observation.reader.rows, faults)
    return [
        {
            "step": cost.at_step,
            "time": fault.struck_s,
            "name": cost.name,
            "seconds_lost": round(cost.seconds_lost, 1),
        }
        for fault, cost in zip(faults, costs, strict=True)
    ]


def _timelines(observation: Observation) -> list[dict[str, Any]]:
    """Return, for each timeline after the first, its start step and the last step of the one before."""
    return [
        {
            "timeline": rollback.fork.timeline,
            "start_step": 0 if rollback.fork.start_at is None else rollback.fork.start_at.step,
            "from_step": rollback.from_step,
        }
        for rollback in observation.reader.state.rollbacks
    ]


SERIES = Page("/series", _series)


# The seconds of each part of a step, in a window of time or steps.


def _split(observation: Observation, request: PageRequest) -> dict[str, Any]:
    window = window_of(observation, request)
    points = request.whole("points", POINTS, 10, POINTS_MAX)
    splits = observation.cached("split", lambda: split(observation.reader.path))
    inside = [part for part in splits if window.holds(part.row)]
    return {
        "axis": window.axis,
        "from_s": window.from_s,
        "until_s": window.until_s,
        **split_table(inside, window.at, points),
    }


def split_table(found: Sequence[StepSplit], at: At, points: int) -> dict[str, Any]:
    """Return columns `x` and, by part, seconds a step; and `total_s`, the sum of each part."""
    rows = [[step_split.seconds[part] for part in PARTS] for step_split in found]
    parts = np.array(rows).reshape(len(found), len(PARTS))
    total_s = {part: round(float(sum_s), 1) for part, sum_s in zip(PARTS, parts.sum(axis=0), strict=True)}
    if not found:
        return {"x": [], "seconds": {part: [] for part in PARTS}, "total_s": total_s, "steps": 0}
    xs = np.array([at(step_split.row) for step_split in found])
    steps = np.array([float(step_split.steps) for step_split in found])
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


# Lanes: one per node with its successive machines, and the policy changes. They come from the journal; only the
# current state of each machine comes from the gateway.

LANES_SHOWN, LANES_MAX = 24, 200
FAR = 10**6
POLICIES_MAX = 12
MOVES_MAX = 40


def _lanes(observation: Observation, request: PageRequest) -> dict[str, Any]:
    window = window_of(observation, request)
    ended = request.choice("ended", ("no", "yes")) == "yes"
    first, count = request.whole("first", 0, 0, FAR), request.whole("count", LANES_SHOWN, 1, LANES_MAX)
    reader, (_, end_s) = observation.reader, extent(observation)
    present, past = observation.cached("lanes", lambda: _slots(lives(reader.history, end_s)))
    shown = [
        *_last_changed_first(present, window),
        *(_last_changed_first(past, window) if ended or not present else ()),
    ]
    states = observation.cached("states", lambda: states_of(observation))
    return {
        "from_s": window.from_s,
        "until_s": window.until_s,
        "end_s": end_s,
        "lanes": [_lane(own, window, states) for own in shown[first : first + count]],
        "first": first,
        "count": count,
        "total": len(shown),
        "ended": len(past) if present else 0,  # of the whole run; shown on request
        "policies": policies(observation, window),
    }


def _slots(found: Sequence[Life]) -> tuple[list[list[Life]], list[list[Life]]]:
    """Return the machines of each slot that has a machine now, and those of each slot that has none."""
    slots = defaultdict[str, list[Life]](list)
    for life in found:
        slots[life.slot].append(life)
    present = [own for own in slots.values() if any(life.end is None for life in own)]
    past = [own for own in slots.values() if all(life.end is not None for life in own)]
    return present, past


def _last_changed_first(slots: Sequence[list[Life]], window: Window) -> list[list[Life]]:
    """Return the slots with a machine in the window: the trainer's first, then by latest change in the window."""

    def last_change_s(own: list[Life]) -> float:
        begun = (span.from_s for life in own for span in life.spans)
        ended = (life.until_s for life in own if life.end is not None)
        return max((at for at in (*begun, *ended) if window.from_s <= at <= window.until_s), default=0.0)

    visible = [own for own in slots if own[-1].until_s >= window.from_s and own[0].from_s <= window.until_s]
    return sorted(visible, key=lambda own: (own[-1].role is not Role.TRAINER, -last_change_s(own)))


def _lane(own: Sequence[Life], window: Window, states: dict[str, str]) -> dict[str, Any]:
    inside = [life for life in own if life.until_s >= window.from_s and life.from_s <= window.until_s]
    newest = own[-1]
    return {
        "slot": newest.slot,
        "role": newest.role,
        "now": states.get(newest.node, "") if newest.end is None else "",
        "machines": [_machine(life) for life in inside],
    }


def _machine(life: Life) -> dict[str, Any]:
    return {
        "node": life.node,
        "market": life.market.replace("_", " "),
        "pool": life.pool,
        "price_usd_per_h": life.price_usd_per_h,
        "end": life.end,
        "reason": life.reason,
        "spans": [[str(span.phase), round(span.from_s, 1), round(span.until_s, 1)] for span in life.spans],
    }


def policies(observation: Observation, window: Window) -> list[dict[str, Any]]:
    """Return the policy changes: all if few, else those at round steps; and always the moves to a new timeline."""
    inside = [row for row in observation.reader.path if window.from_s <= row.time_s <= window.until_s]
    if any(PUBLISHED in row.values for row in inside):
        inside = [row for row in inside if PUBLISHED in row.values]
    every = _round_up(len(inside) / POLICIES_MAX)
    chosen = [row for row in inside if row.step % every == 0]
    changes = [{"time": row.time_s, "policy": f"{row.timeline}-{row.step}", "forks": False} for row in chosen]
    forks = [
        {"time": time_s, "policy": event.policy, "forks": True}
        for time_s, event in observation.cached("fleet moved", lambda: _moves(observation))
        if window.from_s <= time_s <= window.until_s
    ]
    return sorted([*changes, *forks[-MOVES_MAX:]], key=lambda change: change["time"])


def _moves(observation: Observation) -> list[tuple[float, FleetMoved]]:
    return [
        (at_s, event)
        for _, at_s, events in observation.reader.history
        for event in events
        if isinstance(event, FleetMoved)
    ]


def _round_up(number: float) -> int:
    """Return the smallest of 1, 2, 5, 10, 20, 50, ... that is not less than `number`."""
    if number <= 1:
        return 1
    ten = 10 ** math.floor(math.log10(number))
    return int(next(times * ten for times in (1, 2, 5, 10) if times * ten >= number - 1e-9))


LANES = Page("/lanes", _lanes)
