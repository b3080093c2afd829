"""Shell completion: what is suggested to bash, zsh and fish."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from grpo_orch.orchestrator.cli import app
from tests.budget import HANG_S


@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("ro", ["rollback"]),
        ("init --recipe ti", ["tiny"]),
        ("checkpoints ex", ["export"]),
        ("up --de", ["--detach"]),
        ("status -o j", ["json"]),
        ("rollback --set bet", ["beta="]),
        ("simulate --climate st", ["storms"]),
        ("validate run", []),  # then the shell completes files
    ],
)
def test_shell_completes(typed: str, completed: list[str]) -> None:
    words = f"grpo-orch {typed}"
    env = {"COMP_WORDS": words, "COMP_CWORD": str(words.count(" ")), "_GRPO_ORCH_COMPLETE": "complete_bash"}
    assert CliRunner().invoke(app, [], env=env, prog_name="grpo-orch").stdout.split() == completed


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_get_the_same(shell: str) -> None:
    env = {"_TYPER_COMPLETE_ARGS": "grpo-orch init --recipe ti", "_GRPO_ORCH_COMPLETE": f"complete_{shell}"}
    env["_TYPER_COMPLETE_FISH_ACTION"] = "get-args"
    assert "tiny" in CliRunner().invoke(app, [], env=env, prog_name="grpo-orch").stdout


def test_bash_completes_files_of_a_run(tmp_path: Path) -> None:
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "HOME": str(tmp_path)}
    argv = ["bash", "-c", "source <(grpo-orch --show-completion bash); complete -p grpo-orch"]
    env["SHELL"] = "/bin/bash"
    told = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert "-o default" in told.stdout, told.stderr
