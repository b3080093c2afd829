"""A rollback with one process killed at one of its stages, each in turn; and a run whose budget is spent."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpo_orch.policies.model import exit_codes
from grpo_orch.policies.model.events import Event
from tests.e2e.test_rollback import (
    PROCESSES,
    STAGES,
    Outcome,
    check,
    kill,
    outcome,
    reach,
    runaway,
    undisturbed,  # noqa: F401  # pytest finds it here
)
from tests.e2e.tiny import RUN_TIMEOUT_S, finish

pytestmark = pytest.mark.soak


@pytest.mark.parametrize("process", PROCESSES)
@pytest.mark.parametrize("stage", STAGES)
def test_one_process_killed_at_one_stage_ends_the_same(
    undisturbed: Outcome,  # noqa: F811
    tiny: Path,
    tmp_path: Path,
    stage: type[Event],
    process: str,
) -> None:
    run = runaway(tmp_path / "run", tiny)
    with run.up():
        reach(run, stage)
        kill(run, process)
        finish(run)
        check(run)
        assert outcome(run) == undisturbed


def test_run_without_budget_gives_up_and_names_its_weights(tiny: Path, tmp_path: Path) -> None:
    run = runaway(tmp_path / "run", tiny, budget={"total": 0})
    try:
        told = run.cli("up", str(run.yaml), "-y", code=exit_codes.GAVE_UP, timeout_s=RUN_TIMEOUT_S)
        assert "last healthy: checkpoint " in told.stdout + told.stderr
        assert run.state.nodes == {}
        assert "grpo-orch rollback" in run.cli("resume", run.url, code=exit_codes.USAGE).stderr
    finally:
        run.end()
