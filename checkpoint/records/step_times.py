"""How long the logged steps took, and how much of that completions were made in."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from checkpoint.records.metrics import (
    AHEAD_S,
    GENERATE_NODE_S,
    GENERATE_S,
    OWN_GENERATE_S,
    REPLAYED,
    WAIT_S,
    Row,
)
from policies.fleet.measuring import MeasuredStep


def step_times(rows: Sequence[Row]) -> list[MeasuredStep]:
    """Return the steps among `rows`, in the order of time, that one life of a trainer has made.

    A generation may serve several steps: those until the next one make one entry, and share it evenly. The newest
    are left out until the next generation is logged.
    """
    found: list[MeasuredStep] = []
    took_s = steps = 0.0
    begun: Row | None = None  # the row whose generation the present steps share
    for before, row in pairwise(rows):
        same_life = (row.timeline, row.attempt) == (before.timeline, before.attempt)
        goes_on = same_life and row.step > before.step and not row.values.get(REPLAYED)
        if begun is not None and steps and (not goes_on or _generates(row)):
            found.append(_step(begun, took_s, steps))
        if not goes_on:
            begun, steps = None, 0.0
            continue
        if _generates(row):
            begun, took_s, steps = row, 0.0, 0.0
        took_s += max(0.0, row.time_s - before.time_s)
        steps += row.step - before.step
    return found


def _generates(row: Row) -> bool:
    made_by = row.values.get(GENERATE_NODE_S, 0.0) + row.values.get(OWN_GENERATE_S, 0.0)
    return row.values.get(GENERATE_S, 0.0) > 0 and made_by > 0


def _step(begun: Row, took_s: float, steps: float) -> MeasuredStep:
    generated_s = begun.values[GENERATE_S]
    nodes = begun.values.get(GENERATE_NODE_S, 0.0) / generated_s
    own_s = begun.values.get(OWN_GENERATE_S, 0.0)
    if own_s:  # a drought's first step waits for nodes before it begins, and no other does
        took_s = max(generated_s, took_s - begun.values.get(WAIT_S, 0.0))
    ahead_s = min(generated_s, begun.values.get(AHEAD_S, 0.0))
    return MeasuredStep(
        took_s / steps, generated_s / steps, nodes, begun.tokens / steps, own_s / steps, ahead_s / steps
    )
