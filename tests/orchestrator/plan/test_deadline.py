"""A plan against a deadline: the nodes that keep it, and the end to be expected."""

from __future__ import annotations

from dataclasses import replace

import pytest

from grpo_orch.orchestrator.plan.gather import plan_deadline
from grpo_orch.orchestrator.plan.model import DeadlinePlan
from grpo_orch.orchestrator.views.plan import deadline_words
from grpo_orch.policies.costs.steps import StepShape
from grpo_orch.policies.fleet.deadline import BOOT_S
from grpo_orch.policies.model.spec import FleetPolicy, RunSpec
from tests.stand_ins.world import spec as run_spec

NOW_S = 1764500000.0  # 2025-11-30 10:53 UTC
DEADLINE_S = 1764525600.0  # 18:00, 25,600 s later
SHAPE = StepShape(60.0, 120.0)


def spec(steps: int, deadline: str | None = "2025-11-30T18:00:00Z") -> RunSpec:
    return replace(run_spec(8, fleet=FleetPolicy(deadline=deadline)), grpo={"max_steps": steps})


@pytest.mark.parametrize(
    ("steps", "nodes", "end_s", "kept", "words"),
    [
        (100, 2, 12000.0, True, "met: expected end 2025-11-30 14:18 UTC with 2 nodes"),
        (280, 5, 23520.0, True, "met: expected end 2025-11-30 17:30 UTC with 5 nodes"),
        (400, 2, 30000.0, False, "NOT met: expected end 2025-11-30 19:18 UTC with all nodes"),
    ],
)
def test_the_end_against_the_deadline(steps: int, nodes: int, end_s: float, kept: bool, words: str) -> None:
    found = plan_deadline(spec(steps), SHAPE, 2, NOW_S)
    assert found == DeadlinePlan(deadline_s=DEADLINE_S, nodes=nodes, end_s=NOW_S + BOOT_S + end_s, is_met=kept)
    assert deadline_words(found).plain == f"2025-11-30 18:00 UTC, {words}"


def test_nothing_is_promised_without_deadline_or_steps() -> None:
    assert plan_deadline(spec(100, None), SHAPE, 2, NOW_S) is None
    for run, shape in ((spec(-1), SHAPE), (spec(100), None)):
        found = plan_deadline(run, shape, 2, NOW_S)
        assert found == DeadlinePlan(deadline_s=DEADLINE_S, nodes=2, end_s=None, is_met=None)
        assert "unknown whether it can be met" in deadline_words(found).plain
