"""Windows ahead, with real parts: whatever is killed, the weights are those of the run that nobody disturbed."""

from __future__ import annotations

import math
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from grpo_orch.checkpoint.records.metrics import AHEAD_S, read_metrics
from tests.e2e.harness import kill
from tests.e2e.tiny import (
    IN_PARTS,
    RUN_TIMEOUT_S,
    check_healthy,
    final_weights,
    finish,
    kill_trainer,
    make_tiny,
    reach,
    step,
    tiny_run,
)

pytestmark = [pytest.mark.whole, pytest.mark.slow]

# Two windows a step, of the policy before.
OVERLAPPED: dict[str, Any] = {"max_staleness": 1, **IN_PARTS}


def test_every_fault_is_survived_and_changes_no_weight(tmp_path: Path) -> None:
    tiny = make_tiny(tmp_path / "tiny")
    undisturbed = tiny_run(tmp_path / "one", tiny, replicas=1, **OVERLAPPED)
    try:
        undisturbed.cli("up", str(undisturbed.yaml), "-y", "-d")
        finish(undisturbed)
        assert check_healthy(undisturbed, drift=math.inf)["tokens_regenerated"] == 0
        assert sum(row.values.get(AHEAD_S, 0.0) for row in read_metrics(undisturbed.store)) > 0
    finally:
        undisturbed.end()

    run = tiny_run(tmp_path / "two", tiny, replicas=2, **OVERLAPPED)
    try:
        run.cli("up", str(run.yaml), "-y", "-d")
        reach(run, 3)
        kill(run.pids("rollout-0-i1"))
        reach(run, step(run) + 2)
        os.kill(run.pid("trainer-0-i1", "grpo_orch.orchestrator.gateway"), signal.SIGKILL)
        reach(run, step(run) + 2)
        kill_trainer(run)
        run.until("the requests under way", lambda: "batch_resumed" in run.last_words(1000), RUN_TIMEOUT_S)
        reach(run, step(run) + 2)
        for node in list(run.state.nodes):
            if node.startswith("rollout"):
                kill(run.pids(node))
        reach(run, step(run) + 2)
        os.kill(run.daemon_pid, signal.SIGKILL)  # the run may end before the command below has begun
        run.cli("resume", run.url, "-d")
        finish(run)
        assert check_healthy(run, drift=math.inf)["faults_survived"] >= 4
        assert final_weights(run) == final_weights(undisturbed)
    finally:
        run.end()
