"""The demo, as a user runs it: real TRL and vLLM, five faults, a report and a plot."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.tiny import NODE_PYTHON, RUN_TIMEOUT_S

pytestmark = [pytest.mark.whole, pytest.mark.slow]

STEPS = 60
OTHER_WEIGHTS = 0.01  # in the log-probability of a token; the weights of the step before differ by more


def test_demo_survives_its_five_faults(tmp_path: Path) -> None:
    names = {"GRPO_ORCH_HOME": str(tmp_path / "home"), "GRPO_ORCH_NODE_PYTHON": str(NODE_PYTHON)}

    def grpo_orch(*words: str) -> str:
        command = [sys.executable, "-m", "grpo_orch", *words]
        env = {**os.environ, **names}
        limit_s = 1.5 * RUN_TIMEOUT_S
        return subprocess.run(
            command, env=env, cwd=tmp_path, stdout=subprocess.PIPE, text=True, check=True, timeout=limit_s
        ).stdout

    output = grpo_orch("demo")
    report = json.loads(grpo_orch("report", "grpo-orch-demo/run.yaml", "-o", "json"))
    assert (report["phase"], report["faults_survived"]) == ("finished", 5), report["faults"]
    assert report["steps"] == STEPS
    assert report["sampling_logp_difference_max"] < OTHER_WEIGHTS
    assert (tmp_path / "grpo-orch-demo" / "plot.png").exists()
    assert "grpo-orch report grpo-orch-demo/run.yaml" in output
