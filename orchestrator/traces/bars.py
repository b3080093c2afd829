"""Steps of rows that have none, from the progress bar beside them.

A Trainer prints a dictionary every `logging_steps` steps and redraws its bar below it. Where both go to one log,
the bar's `50/1875` is the row's step. Which bar, before or after, depends: the one before may lag by a tenth of a
second, the one after may be of the next step. And other bars, of an evaluation or a reward function, stand
between. So each choice is tried, and the one taken by which most rows have a step of their own, at the most even
distance.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from orchestrator.traces.model import Row
from orchestrator.traces.names import TRAINING
from orchestrator.traces.values import metrics, step

_BARS_TRIED = 3  # the most frequent, told apart by their totals


@dataclass(frozen=True, slots=True)
class Bar:
    """A progress bar as it was drawn: `done` of `total`."""

    done: int
    total: int


def number_rows(parts: Sequence[Row | Bar]) -> list[Row]:
    """The rows; those of training with a step from the bars, where no row has one and the bars tell it."""
    rows = [part for part in parts if not isinstance(part, Bar)]
    trained = [bool(TRAINING & (metrics(row) or {}).keys()) for row in rows]
    totals = Counter(part.total for part in parts if isinstance(part, Bar))
    if not totals or not any(trained) or any(step(row) is not None for row in rows):
        return rows
    best: list[int] = []
    for total in (None, *(total for total, _ in totals.most_common(_BARS_TRIED))):
        before, after = _beside(parts, trained, total)
        best = max(best, before, after, key=_fits)
    if _fits(best)[0] * 2 <= len(best):  # a log that was written in blocks, far from its bars
        best = _evenly(parts, len(best))
    if not best:
        return rows
    found = iter(best)
    return [{**row, "step": next(found)} if one else row for row, one in zip(rows, trained, strict=True)]


def _beside(parts: Sequence[Row | Bar], trained: Sequence[bool], total: int | None) -> tuple[list[int], list[int]]:
    """What the bar of this total, None for any, shows before each row of training, and after it."""
    before: list[int] = []
    after: list[int] = []
    shown, kinds = 0, iter(trained)
    for part in parts:
        if isinstance(part, Bar):
            if total in (None, part.total):
                shown = part.done
                after += [shown] * (len(before) - len(after))
        elif next(kinds):
            before.append(shown)
    return before, after + before[len(after) :]


def _evenly(parts: Sequence[Row | Bar], rows: int) -> list[int]:
    """The steps of so many rows up to where a bar came, if that is a whole number of steps for each; else none."""
    done = max(part.done for part in parts if isinstance(part, Bar))
    every = done // rows
    return [every * (at + 1) for at in range(rows)] if every and done - every * rows < every else []


def _fits(steps: Sequence[int]) -> tuple[int, int]:
    """How many rows have a step above the row's before, and the distance that all of those have in common."""
    rises = [later - earlier for earlier, later in pairwise((0, *steps)) if later > earlier]
    return len(rises), math.gcd(*rises)
