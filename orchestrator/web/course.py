"""A run over time or steps: its curves, where a step's time goes, and its machines, at every zoom from the same
data.

Where a window has more rows than points, neighbours share one: their mean, and the lowest and highest of them,
so that no spike is lost.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from checkpoint.records.metrics import PARTS, PUBLISHED, Row, StepSplit, StepTiming, split, step_timings
from orchestrator.views.report import HELD_OUT, REWARD
from orchestrator.web.page import Asked, Page, Window, extent, window_of
from orchestrator.web.pages import states_of
from orchestrator.web.watch import Look
from policies.ledger.accounting import Fault, fault_costs, journalled_faults, merge_faults
from policies.ledger.rentals import End, Life, lives
from policies.model.events import FleetMoved
from policies.model.vocabulary import Role

POINTS, POINTS_MOST = 600, 4000
MARKS_MOST = 300
METRICS = {"reward": REWARD, "held_out": HELD_OUT, "kl": "kl", "loss": "loss"}
TIMED = ("generate_s", "train_s", "sync_s", "trainer_idle_s", "fleet_idle_s", "staleness")  # of StepTiming

Values = list[float | None]


def _series(look: Look, asked: Asked) -> dict[str, Any]:
    window = window_of(look, asked)
    axis, low, high = window.axis, window.low, window.high
    points = asked.whole("points", POINTS, 10, POINTS_MOST)
    present = [row for row in look.path if window.holds(row)]
    lost = [row for row in look.abandoned if window.holds(row)]
    timings = look.once("timings", lambda: timings_of([*look.path, *look.abandoned]))
    faults = look.once("faults", lambda: _faults(look))
    return {
        "axis": axis,
        "from_s": window.from_s,
        "until_s": window.until_s,
        "present": table(present, axis, points, timings),
        "abandoned": table(lost, axis, points, timings),
        "kl_limit": look.once("kl limit", lambda: look.view.kl_limit),
        "faults": marks([one for one in faults if low <= one[axis] <= high], axis),
        "timelines": look.once("timelines", lambda: _timelines(look)),
    }


Timings = Mapping[tuple[int, int], StepTiming]  # by timeline and step


def timings_of(rows: Sequence[Row]) -> Timings:
    """The timing of each step that has one."""
    found = step_timings(sorted(rows, key=lambda row: row.time_s))
    return {(row.timeline, row.step): timing for row, timing in found}


NO_TIMINGS: Timings = {}


def table(rows: Sequence[Row], axis: str, points: int, timings: Timings = NO_TIMINGS) -> dict[str, Values]:
    """Columns of equal length: `x`, and of each metric its mean, `NAME_low` and `NAME_high`; None where nothing
    was logged. At most `points` of them."""
    rows = sorted(rows, key=lambda row: _at(row, axis))
    if not rows:
        return {"x": [], **{name + end: [] for name in (*METRICS, *TIMED) for end in ("", "_low", "_high")}}
    xs = np.array([_at(row, axis) for row in rows])
    starts = bins(xs, points)
    sizes = np.diff(np.r_[starts, len(rows)])
    found: dict[str, Values] = {"x": (np.add.reduceat(xs, starts) / sizes).tolist()}
    columns = {name: [row.values.get(metric) for row in rows] for name, metric in METRICS.items()}
    timed = [timings.get((row.timeline, row.step)) for row in rows]
    columns |= {name: [None if one is None else getattr(one, name) for one in timed] for name in TIMED}
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


# Lanes: one for each place in the fleet, its machines one after another, and when policies changed. All of it is
# drawn from the journal; only what each machine does now comes from the gateway.

LANES_SHOWN, LANES_MOST = 24, 200
FAR = 10**6
SPANS_MOST = 240  # of a lane; with more, spans shorter than a cell are merged with their neighbours
CELLS = 400
POLICIES_MOST = 12
MOVES_MOST = 40


def _lanes(look: Look, asked: Asked) -> dict[str, Any]:
    window = window_of(look, asked)
    ended = asked.choice("ended", ("no", "yes")) == "yes"
    first, count = asked.whole("first", 0, 0, FAR), asked.whole("count", LANES_SHOWN, 1, LANES_MOST)
    present, past = look.once("lanes", lambda: _places(lives(look.history, extent(look)[1])))
    shown = [
        *_last_changed_first(present, window),
        *(_last_changed_first(past, window) if ended or not present else ()),
    ]
    states = look.once("states", lambda: states_of(look))
    return {
        "from_s": window.from_s,
        "until_s": window.until_s,
        "end_s": extent(look)[1],
        "lanes": [_lane(own, window, states) for own in shown[first : first + count]],
        "first": first,
        "count": count,
        "total": len(shown),
        "ended": len(past) if present else 0,  # of the whole run; those that are left out unless asked for
        "policies": policies(look, window),
    }


def _places(found: Sequence[Life]) -> tuple[list[list[Life]], list[list[Life]]]:
    """The machines of each place that has one now, and of those that have none."""
    slots = defaultdict[str, list[Life]](list)
    for life in found:
        slots[life.slot].append(life)
    present = [own for own in slots.values() if any(life.end is None for life in own)]
    past = [own for own in slots.values() if all(life.end is not None for life in own)]
    return present, past


def _last_changed_first(places: Sequence[list[Life]], window: Window) -> list[list[Life]]:
    """Those that had a machine in the window: the trainer's, then by what changed last in view."""

    def last_change_s(own: list[Life]) -> float:
        begun = (span.from_s for life in own for span in life.spans)
        ended = (life.until_s for life in own if life.end is not None)
        return max((at for at in (*begun, *ended) if window.from_s <= at <= window.until_s), default=0.0)

    there = [own for own in places if own[-1].until_s >= window.from_s and own[0].from_s <= window.until_s]
    return sorted(there, key=lambda own: (own[-1].role is not Role.TRAINER, -last_change_s(own)))


def _lane(own: Sequence[Life], window: Window, states: dict[str, str]) -> dict[str, Any]:
    inside = [life for life in own if life.until_s >= window.from_s and life.from_s <= window.until_s]
    told = sum(len(life.spans) for life in inside)
    newest = own[-1]
    return {
        "slot": newest.slot,
        "role": newest.role,
        "now": states.get(newest.node, "") if newest.end is None else "",
        "machines": [_machine(life) for life in inside] if told <= SPANS_MOST else _crowd(inside, window),
    }


def _machine(life: Life) -> dict[str, Any]:
    return {
        "node": life.node,
        "market": life.market.replace("_", " "),
        "pool": life.pool,
        "price_usd_per_h": life.price_usd_per_h,
        "end": life.end,
        "reason": life.reason,
        "spans": [[str(one.phase), round(one.from_s, 1), round(one.until_s, 1)] for one in life.spans],
    }


def _crowd(inside: Sequence[Life], window: Window) -> list[dict[str, Any]]:
    """Machines too many to be seen apart: the time in cells, each in the phase that most of it was spent in, and
    lost if one was lost in it."""
    cell_s = max(1e-3, (window.until_s - window.from_s) / CELLS)
    spent: list[dict[str, float]] = [defaultdict(float) for _ in range(CELLS)]
    machines: list[set[str]] = [set() for _ in range(CELLS)]
    lost = [False] * CELLS
    for life in inside:
        for span in life.spans:
            from_s, until_s = max(span.from_s, window.from_s), min(span.until_s, window.until_s)
            first, last = int((from_s - window.from_s) / cell_s), int((until_s - window.from_s) / cell_s)
            for cell in range(max(0, first), min(last, CELLS - 1) + 1):
                begin_s = window.from_s + cell * cell_s
                spent[cell][str(span.phase)] += max(0.0, min(until_s, begin_s + cell_s) - max(from_s, begin_s))
                machines[cell].add(life.node)
        if life.end is End.LOST and window.from_s <= life.until_s <= window.until_s:
            lost[min(CELLS - 1, int((life.until_s - window.from_s) / cell_s))] = True
    phases = [max(one, key=lambda name: one[name]) if one else "" for one in spent]
    found = []
    for (phase, is_lost), cells in groupby(range(CELLS), key=lambda cell: (phases[cell], lost[cell])):
        places = list(cells)
        if not phase:
            continue
        from_s, until_s = window.from_s + places[0] * cell_s, window.from_s + (places[-1] + 1) * cell_s
        names = set[str]().union(*(machines[cell] for cell in places))
        found.append(
            {
                "node": min(names) if len(names) == 1 else f"{len(names)} machines",
                "market": "",
                "pool": "",
                "price_usd_per_h": 0.0,
                "end": End.LOST if is_lost else None,
                "reason": "",
                "spans": [[phase, round(from_s, 1), round(until_s, 1)]],
            }
        )
    return found


def policies(look: Look, window: Window) -> list[dict[str, Any]]:
    """When policies changed: each where few did, else at round steps; and always where the fleet went to another
    timeline."""
    inside = [row for row in look.path if window.from_s <= row.time_s <= window.until_s]
    if any(PUBLISHED in row.values for row in inside):
        inside = [row for row in inside if PUBLISHED in row.values]
    every = _round_up(len(inside) / POLICIES_MOST)
    chosen = [row for row in inside if row.step % every == 0]
    told = [{"time": row.time_s, "policy": f"{row.timeline}-{row.step}", "forks": False} for row in chosen]
    forks = [
        {"time": time_s, "policy": event.policy, "forks": True}
        for time_s, event in look.once("fleet moved", lambda: _moves(look))
        if window.from_s <= time_s <= window.until_s
    ]
    return sorted([*told, *forks[-MOVES_MOST:]], key=lambda one: one["time"])


def _moves(look: Look) -> list[tuple[float, FleetMoved]]:
    return [(at_s, event) for _, at_s, events in look.history for event in events if isinstance(event, FleetMoved)]


def _round_up(number: float) -> int:
    """1, 2, 5, 10, 20, 50, ..., not less than `number`."""
    if number <= 1:
        return 1
    ten = 10 ** math.floor(math.log10(number))
    return int(next(times * ten for times in (1, 2, 5, 10) if times * ten >= number - 1e-9))


LANES = Page("/lanes", _lanes)
