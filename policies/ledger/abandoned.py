"""What of a run's log belongs to its present timeline, and what rollbacks threw away."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from policies.ledger.accounting import LoggedRow
from policies.model.state import Rollback
from policies.model.timelines import Fork, lineage, on_lineage
from policies.model.vocabulary import PolicyVersion

RowT = TypeVar("RowT", bound=LoggedRow)


@dataclass(frozen=True, slots=True)
class Abandoned:
    """What a rollback threw away: the line that it left, from after its start to `last_step`."""

    last_step: int
    steps: int
    tokens: int


def split_by_line(rows: Iterable[RowT], forks: Sequence[Fork]) -> tuple[list[RowT], list[RowT]]:
    """Return the rows that the run's present timeline consists of, and those that rollbacks abandoned.

    `forks` are all that are in the store, in order; the order of the rows stays.
    """
    stretches = lineage(forks, forks[-1].timeline if forks else 0)
    line: list[RowT] = []
    abandoned: list[RowT] = []
    for row in rows:
        (line if on_lineage(PolicyVersion(row.timeline, row.step), stretches) else abandoned).append(row)
    return line, abandoned


def abandoned(rows: Sequence[LoggedRow], rollbacks: Sequence[Rollback]) -> list[Abandoned]:
    """Return what each rollback threw away, in their order. A step that two of them left counts once, with the
    first."""
    found = []
    for place, rollback in enumerate(rollbacks):
        line, _ = split_by_line(rows, [one.fork for one in rollbacks[:place]])
        start = rollback.fork.start_at
        start_step = 0 if start is None else start.step
        left = [one for one in line if one.step > start_step]
        # The old trainer may have gone on a little before it ended.
        last_step = max([rollback.from_step, *(one.step for one in left)])
        found.append(Abandoned(last_step, max(0, last_step - start_step), sum(one.tokens for one in left)))
    return found
