"""A run without rollout nodes, from `up` to its end: the trainer generates, is killed, and goes on."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.tiny import check_healthy, final_weights, finish, kill_trainer, make_tiny, reach, tiny_run

pytestmark = pytest.mark.whole

STEPS = 30


def test_kills_change_no_weight_and_the_reward_rises(tmp_path: Path) -> None:
    tiny = make_tiny(tmp_path / "tiny")
    changes: dict[str, Any] = {"max_steps": STEPS, "save_steps": 4, "eval_steps": STEPS}
    calm = tiny_run(tmp_path / "calm", tiny, replicas=0, **changes)
    run = tiny_run(tmp_path / "run", tiny, replicas=0, **changes)
    try:
        for one in (calm, run):
            one.cli("up", str(one.yaml), "-y", "-d")
        reach(run, 6)
        kill_trainer(run)
        os.kill(run.daemon_pid, signal.SIGKILL)
        run.cli("resume", run.url, "-d")
        finish(run)
        finish(calm)

        assert check_healthy(calm, STEPS)["faults_survived"] == 0
        assert check_healthy(run, STEPS)["restarts"]["trainer-0"] == 1
        assert final_weights(run, STEPS) == final_weights(calm, STEPS)
        assert not any(entry.key.startswith("policies/") for entry in run.store.entries("policies"))
    finally:
        calm.end()
        run.end()
