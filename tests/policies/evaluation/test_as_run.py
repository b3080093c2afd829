"""What an evaluation does not take over from the run whose policies it judges."""

from __future__ import annotations

from dataclasses import replace

from policies.evaluation.as_run import as_run
from policies.model.spec import Dataset, FleetPolicy, PoliciesSpec
from tests.stand_ins.world import spec


def test_the_training_s_deadline_is_not_the_evaluation_s() -> None:
    fleet = FleetPolicy(dead_man_min=5.0, deadline="2026-11-30T18:00:00Z")
    run = replace(spec(2), policies=PoliciesSpec(fleet=fleet))
    found = as_run(run, "memory://eval", Dataset(path="held-out"))
    assert found.policies.fleet == FleetPolicy(dead_man_min=5.0)
