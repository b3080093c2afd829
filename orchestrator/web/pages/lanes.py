"""The machines over time: a lane for each place in the fleet, its machines one after another, and when policies
changed.

All of it is drawn from the journal; only what each machine does now comes from the gateway.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from checkpoint.records.metrics import PUBLISHED
from orchestrator.web.page import Asked, Page, Window, extent, window_of
from orchestrator.web.pages import states_of
from orchestrator.web.watch import Look
from policies.ledger.lives import End, Life, lives
from policies.model.events import FleetMoved
from policies.model.vocabulary import Role

LANES, LANES_MOST = 24, 200
FAR = 10**6
SPANS_MOST = 240  # of a lane; with more, spans shorter than a cell are merged with their neighbours
CELLS = 400
POLICIES_MOST = 12
MARKS_MOST = 40


def _data(look: Look, asked: Asked) -> dict[str, Any]:
    window = window_of(look, asked)
    ended = asked.choice("ended", ("no", "yes")) == "yes"
    first, count = asked.whole("first", 0, 0, FAR), asked.whole("count", LANES, 1, LANES_MOST)
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
    return sorted([*told, *forks[-MARKS_MOST:]], key=lambda one: one["time"])


def _moves(look: Look) -> list[tuple[float, FleetMoved]]:
    return [(at_s, event) for _, at_s, events in look.history for event in events if isinstance(event, FleetMoved)]


def _round_up(number: float) -> int:
    """1, 2, 5, 10, 20, 50, ..., not less than `number`."""
    if number <= 1:
        return 1
    ten = 10 ** math.floor(math.log10(number))
    return int(next(times * ten for times in (1, 2, 5, 10) if times * ten >= number - 1e-9))


PAGE = Page("/lanes", _data)
