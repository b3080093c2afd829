"""The example's agent with real parts: it learns, and whatever is killed in the middle of sessions, the weights
are those of the run that nobody disturbed."""

from __future__ import annotations

import math
import os
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_orch.checkpoint.records.metrics import read_metrics
from grpo_orch.checkpoint.store import layout
from tests.e2e.harness import ROOT, Run, kill
from tests.e2e.tiny import NODE_PYTHON, check_healthy, final_weights, finish, kill_trainer, reach, step

pytestmark = [pytest.mark.whole, pytest.mark.slow]

EXAMPLE = ROOT / "examples" / "agent"
OPENENV_PYTHON = ROOT / ".venv-openenv" / "bin" / "python"
STEPS, HARNESS_STEPS = 10, 4
GAIN = -math.inf  # whether it learns: `make bench-agents`
SESSIONS = 32  # a step; each is a process with a client of its own
# A tool takes a while: so whatever is killed, sessions are in the middle.
PAUSED = ("        for call in message.tool_calls:\n", "        await asyncio.sleep(0.3)\n")


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example's model and prompts."""
    folder = tmp_path_factory.mktemp("build")
    command: list[str | Path] = [NODE_PYTHON, EXAMPLE / "make_model.py", "--out", folder]
    subprocess.run(command, check=True, capture_output=True)
    return folder


def agent_run(
    folder: Path,
    build: Path,
    replicas: int,
    agent: dict[str, Any] | None = None,
    steps: int = STEPS,
    **rollout: Any,
) -> Run:
    """The example as a run whose agent's tools take a while."""
    spec = yaml.safe_load((EXAMPLE / "run.yaml").read_text())
    folder.mkdir()
    spec["trainer"].pop("setup")
    spec["trainer"]["agent"] |= agent or {}
    spec["trainer"]["model"] = str(build / "model")
    spec["trainer"]["dataset"] = str(build / "prompts.jsonl")
    spec["grpo"] |= {"max_steps": steps, "save_steps": 4, "per_device_train_batch_size": SESSIONS}
    spec["rollout"] |= {"replicas": replicas, **rollout}
    source = (EXAMPLE / "agent.py").read_text()
    at, pause = PAUSED
    assert source.count(at) == 1
    (folder / "agent.py").write_text(
        source.replace(at, pause + at).replace("import json", "import asyncio\nimport json")
    )
    shutil.copy(EXAMPLE / "openenv_harness.py", folder)
    return Run(folder, spec, NODE_PYTHON)


def test_harness_of_openenv_is_trained(build: Path, tmp_path: Path) -> None:
    harness = {"run": "openenv_harness.solve", "python": str(OPENENV_PYTHON)}
    run = agent_run(tmp_path / "openenv", build, 1, harness, HARNESS_STEPS)
    with run.up():
        finish(run)
        assert check_healthy(run, HARNESS_STEPS, GAIN, math.inf)["tokens_regenerated"] == 0
        rows = read_metrics(run.store)
        assert {row.values["agent/failed"] for row in rows if "agent/failed" in row.values} == {0.0}
        assert max(row.values.get("agent/turns", 0.0) for row in rows) > 1, "the harness has called no tool"


def test_sessions_survive_every_fault_and_train_the_same_weights(build: Path, tmp_path: Path) -> None:
    undisturbed = agent_run(tmp_path / "one", build, 1, max_staleness=1)
    with undisturbed.up():
        finish(undisturbed)
        assert check_healthy(undisturbed, STEPS, GAIN, math.inf)["tokens_regenerated"] == 0

    run = agent_run(tmp_path / "two", build, 2, max_staleness=1)
    with run.up():
        reach(run, 2)
        kill(run.pids("rollout-0-i1"))
        reach(run, step(run) + 2)
        os.kill(run.pid("trainer-0-i1", "grpo_orch.orchestrator.gateway"), signal.SIGKILL)
        reach(run, step(run) + 2)
        kill_trainer(run)
        reach(run, step(run) + 2)
        os.kill(run.daemon_pid, signal.SIGKILL)
        run.cli("resume", run.url, "-d")
        finish(run)
        assert check_healthy(run, STEPS, GAIN, math.inf)["faults_survived"] >= 3
        assert final_weights(run, STEPS) == final_weights(undisturbed, STEPS)
        assert run.store.entries(layout.SESSIONS) == [], "sessions of finished steps are still recorded"
