"""A recipe's tiny twin, from `up` to its end: two processes train an adapter, and a node of vLLM is lost.

Its policies are adapters, with which the nodes compute what the trainer trains; it learns what the recipe rewards.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from grpo_orch.checkpoint.store import layout
from grpo_orch.checkpoint.stream import manifest
from tests.e2e.harness import ROOT, Run, kill
from tests.e2e.tiny import NODE_PYTHON, check_healthy, finish, reach

pytestmark = [pytest.mark.whole, pytest.mark.slow]

STEPS = 24
MAKE = ROOT / "examples" / "twins" / "make.py"
NEVER_S = 10.0**6


def test_adapter_of_two_processes_learns_and_outlives_its_node(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    subprocess.run([NODE_PYTHON, MAKE, "gsm8k-zero2", "--out", folder], check=True)
    over: dict[str, Any] = {"extends": "tiny.yaml", "grpo": {"max_steps": STEPS}}
    over["rollout"] = {"own_generation_after_s": NEVER_S}  # on a busy machine nodes may take long
    run = Run(folder, over, NODE_PYTHON, file="over.yaml")
    with run.up():
        reach(run, 3)
        kill(run.pids("rollout-0-i1"))
        finish(run)
        report = check_healthy(run, STEPS, gain=0.3)  # of 1.15
        assert report["rollbacks"] == []
        assert report["faults_survived"] >= 1
        keys = [entry.key for entry in run.store.entries(layout.POLICIES)]
        found = [manifest.load(run.store, key.rpartition("/")[0]) for key in keys if key.endswith(layout.MANIFEST)]
        assert {policy.meta["kind"] for policy in found} == {"adapter"}
        whole_bytes = (folder / "model" / "model.safetensors").stat().st_size
        assert all(policy.size_bytes < whole_bytes / 2 for policy in found)
