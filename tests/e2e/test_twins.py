"""A recipe's tiny twin, from `up` to its end, with its node of vLLM: it learns what the recipe rewards."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.e2e.harness import ROOT, Run
from tests.e2e.tiny import NODE_PYTHON, check_healthy, finish

pytestmark = [pytest.mark.whole, pytest.mark.slow]

STEPS = 24
MAKE = ROOT / "examples" / "twins" / "make.py"


def test_an_adapter_of_two_processes_learns_form_and_answer(tmp_path: Path) -> None:
    subprocess.run([NODE_PYTHON, MAKE, "gsm8k-zero2", "--out", tmp_path / "run"], check=True)
    over = {"extends": "tiny.yaml", "grpo": {"max_steps": STEPS}}
    run = Run(tmp_path / "run", over, NODE_PYTHON, file="over.yaml")
    try:
        run.cli("up", str(run.yaml), "-y", "-d")
        finish(run)
        report = check_healthy(run, STEPS, gain=0.3)  # of 1.15
        assert report["rollbacks"] == []
    finally:
        run.end()
