"""The phase tables, and the fold that holds to them."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from grpo_orch.policies.model.events import (
    Event,
    FleetMoved,
    ProbationPassed,
    RollbackStarted,
    TimelineForked,
    TimelineResumed,
    TrainerFenced,
)
from grpo_orch.policies.model.fold import IllegalMove, check_move, fold
from grpo_orch.policies.model.phases import NODE_EDGES, ROLLBACK_EDGES, RUN_EDGES
from grpo_orch.policies.model.timelines import Fork
from grpo_orch.policies.model.vocabulary import Cause, NodePhase, RollbackStage, RunPhase

BEGUN = RollbackStarted(Fork(1, "0-4"), Cause.DIVERGED, 8, "")
# In order. Before each stage's event the rollback is at the stage of the one before it, or there is none.
STAGES: dict[RollbackStage | None, Event] = {
    RollbackStage.BEGUN: BEGUN,
    RollbackStage.FORKED: TimelineForked(1),
    RollbackStage.FENCED: TrainerFenced(1),
    RollbackStage.RESUMED: TimelineResumed(1, 4),
    RollbackStage.PROBATION: FleetMoved(1, "1-4"),
    None: ProbationPassed(1, 13),
}


@pytest.mark.parametrize(
    ("edges", "phases"),
    [
        (NODE_EDGES, list(NodePhase)),
        (RUN_EDGES, list(RunPhase)),
        (ROLLBACK_EDGES, [None, *RollbackStage]),
    ],
    ids=["node", "run", "rollback"],
)
def test_every_edge_has_a_reason_and_others_are_refused(
    edges: dict[tuple[Any, Any], str], phases: list[Any]
) -> None:
    for edge in product(phases, repeat=2):
        if edge in edges:
            assert edges[edge]
            check_move(edges, *edge)
        else:
            with pytest.raises(IllegalMove):
                check_move(edges, *edge)


@pytest.mark.parametrize("passed", [False, True])
@pytest.mark.parametrize(("old", "new"), list(product([None, *RollbackStage], repeat=2)))
def test_a_rollback_moves_along_its_table_and_no_other_way(
    old: RollbackStage | None, new: RollbackStage | None, passed: bool
) -> None:
    """With an earlier rollback that has passed, and with none."""
    before = list(STAGES.values()) if passed else []
    before += list(STAGES.values())[: 0 if old is None else list(RollbackStage).index(old) + 1]
    history = [(1, 0.0, (*before, STAGES[new]))]
    if (old, new) in ROLLBACK_EDGES:
        rollback = fold(history).rollback
        assert (None if rollback is None else rollback.stage) == new
    else:
        with pytest.raises(IllegalMove):
            fold(history)
