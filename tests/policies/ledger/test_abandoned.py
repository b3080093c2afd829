"""Which steps are the run's own, and which a rollback threw away, in exact numbers."""

from __future__ import annotations

import pytest

from grpo_orch.checkpoint.records.metrics import TOKENS, MetricsRow
from grpo_orch.policies.ledger.accounting import Abandoned, abandoned, split_by_line
from grpo_orch.policies.model.state import Rollback
from grpo_orch.policies.model.timelines import Fork
from grpo_orch.policies.model.vocabulary import Cause, RollbackStage


def steps(timeline: int, first: int, last: int) -> list[MetricsRow]:
    """Each of ten tokens more than the one before it."""
    return [
        MetricsRow(timeline, step, 100.0 * timeline + step, 1, {TOKENS: 10.0 * step})
        for step in range(first, last + 1)
    ]


def rollback(fork: Fork, from_step: int, stage: RollbackStage = RollbackStage.PROBATION) -> Rollback:
    return Rollback(fork, Cause.DIVERGED, from_step, stage, since_s=0.0)


FIRST = Fork(1, "0-5")
LATER = Fork(2, "1-7")  # still on the new line
EARLIER = Fork(2, "0-3")  # before where the first one had gone back to
ANEW = Fork(2, None)
LOG = [*steps(0, 1, 10), *steps(1, 6, 9), *steps(2, 4, 5)]


@pytest.mark.parametrize(
    ("forks", "line"),
    [
        ([], [(0, step) for step in range(1, 11)]),
        ([FIRST], [*((0, step) for step in range(1, 6)), *((1, step) for step in range(6, 10))]),
        ([FIRST, EARLIER], [(0, 1), (0, 2), (0, 3), (2, 4), (2, 5)]),
        ([FIRST, LATER], [*((0, step) for step in range(1, 6)), (1, 6), (1, 7), (2, 4), (2, 5)]),
        ([FIRST, ANEW], [(2, 4), (2, 5)]),
    ],
)
def test_line_is_the_newest_timeline_and_its_ancestors(forks: list[Fork], line: list[tuple[int, int]]) -> None:
    ours, left = split_by_line(LOG, forks)
    assert [(step.timeline, step.step) for step in ours] == line
    assert sorted([*ours, *left], key=LOG.index) == LOG


@pytest.mark.parametrize(
    ("rollbacks", "lost"),
    [
        ([], []),
        ([rollback(FIRST, 10)], [Abandoned(10, 5, 60 + 70 + 80 + 90 + 100)]),
        # Decided, and not yet in the store: what will be thrown away.
        ([rollback(FIRST, 10, RollbackStage.BEGUN)], [Abandoned(10, 5, 400)]),
        # The old trainer went on for two steps; and it may have logged none of the last.
        ([rollback(FIRST, 8)], [Abandoned(10, 5, 400)]),
        ([rollback(FIRST, 12)], [Abandoned(12, 7, 400)]),
        # What the first one left is not counted again, and what it had kept is.
        ([rollback(FIRST, 10), rollback(EARLIER, 9)], [Abandoned(10, 5, 400), Abandoned(9, 6, 40 + 50 + 300)]),
        ([rollback(FIRST, 10), rollback(LATER, 9)], [Abandoned(10, 5, 400), Abandoned(9, 2, 80 + 90)]),
        ([rollback(FIRST, 10), rollback(ANEW, 9)], [Abandoned(10, 5, 400), Abandoned(9, 9, 150 + 300)]),
        # Back to where it stood.
        ([rollback(Fork(1, "0-10"), 10)], [Abandoned(10, 0, 0)]),
    ],
)
def test_each_rollbacks_abandoned_steps_are_counted(rollbacks: list[Rollback], lost: list[Abandoned]) -> None:
    assert abandoned(LOG[:14], rollbacks) == lost
