"""The main job, short: TRL, two vLLM servers on CPU or none, the gateway, kills and a resume, on files.

`test_training.py` kills everything there is, with windows ahead and on an S3 store.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import kill
from tests.e2e.tiny import check_healthy, final_weights, finish, kill_trainer, reach, tiny_run

pytestmark = pytest.mark.whole

STEPS = 20


@pytest.mark.parametrize("replicas", [2, 0], ids=["nodes generate", "the trainer generates"])
def test_kills_and_a_resume_lose_no_step_and_change_no_weight(tiny: Path, tmp_path: Path, replicas: int) -> None:
    changes: dict[str, Any] = {"max_steps": STEPS, "save_steps": 4, "eval_steps": STEPS}
    calm = tiny_run(tmp_path / "calm", tiny, replicas=min(replicas, 1), **changes)
    run = tiny_run(tmp_path / "run", tiny, replicas=replicas, **changes)
    with calm.up(), run.up():  # in parallel: they wait for processes that start
        reach(run, 2)
        if replicas:
            kill(run.pids("rollout-0-i1"))  # a whole machine, without a word
            reach(run, 4)
            os.kill(run.pid("trainer-0-i1", "grpo_orch.orchestrator.gateway"), signal.SIGKILL)
        reach(run, 6)
        kill_trainer(run)
        os.kill(run.daemon_pid, signal.SIGKILL)
        run.cli("resume", run.url, "-d")
        finish(run)
        finish(calm)

        assert check_healthy(calm, STEPS, gain=0.0)["faults_survived"] == 0
        report = check_healthy(run, STEPS, gain=0.0)
        assert report["faults_survived"] >= (2 if replicas else 1)
        assert report["restarts"]["trainer-0"] == 1
        assert final_weights(run, STEPS) == final_weights(calm, STEPS)
        assert replicas or not run.store.entries("policies")
