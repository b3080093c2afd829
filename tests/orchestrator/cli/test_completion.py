"""Shell completion: what is suggested, and that bash, zsh and fish take it."""

from __future__ import annotations

import os
import pty
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from grpo_orch.orchestrator.cli import app
from tests.budget import HANG_S

PATH = f"{Path(sys.executable).parent}:{os.environ['PATH']}"


def needs(shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed: run `make test-packages`")


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


def test_bash_completes_files_of_a_run(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").touch()
    told = in_shell("bash", "source <(grpo-orch --show-completion bash); complete -p grpo-orch", tmp_path)
    assert "-o default" in told.stdout, told.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("typed", "completed"),
    [("ro", ["rollback"]), ("init --recipe ti", ["tiny"]), ("validate run", ["run.yaml"])],
)
def test_fish_completes(typed: str, completed: list[str], tmp_path: Path) -> None:
    needs("fish")
    (tmp_path / "run.yaml").touch()
    code = f"grpo-orch --show-completion fish | source; complete --do-complete 'grpo-orch {typed}'"
    told = in_shell("fish", code, tmp_path)
    assert [line.partition("\t")[0] for line in told.stdout.splitlines()] == completed, told


@pytest.mark.slow
@pytest.mark.parametrize(
    ("typed", "completed"),
    [("rollb", "rollback"), ("init --recipe ti", "tiny"), ("validate run.", "run.yaml")],
)
def test_zsh_completes(typed: str, completed: str, tmp_path: Path) -> None:
    needs("zsh")
    (tmp_path / "run.yaml").touch()
    process, terminal = pty.fork()
    if process == 0:
        os.chdir(tmp_path)
        env = {**os.environ, "PATH": PATH, "HOME": str(tmp_path), "TERM": "dumb", "PS1": "> "}
        os.execvpe("zsh", ["zsh", "-f", "-i"], env)
    try:
        setup = "autoload -Uz compinit; compinit -u; source <(grpo-orch --show-completion zsh); echo re''ady\n"
        os.write(terminal, setup.encode())
        read_until(terminal, "ready")
        os.write(terminal, f"grpo-orch {typed}\t".encode())
        read_until(terminal, completed)
    finally:
        os.close(terminal)  # which ends the shell
        os.waitpid(process, 0)


def read_until(terminal: int, wanted: str) -> None:
    """Read what the terminal shows until it shows `wanted`."""
    shown, deadline_s = "", time.monotonic() + HANG_S
    while wanted not in shown:
        assert time.monotonic() < deadline_s, shown
        if select.select([terminal], [], [], 1.0)[0]:
            shown += os.read(terminal, 4096).decode(errors="replace")


def in_shell(shell: str, code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PATH": PATH, "SHELL": f"/bin/{shell}", "HOME": str(folder)}
    argv = [shell, "-c", code]
    return subprocess.run(argv, cwd=folder, env=env, capture_output=True, text=True, timeout=HANG_S, check=False)
