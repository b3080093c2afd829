"""What the command itself answers to, before any of its commands."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from grpo_orch.orchestrator.cli import COMMANDS, app
from grpo_orch.policies.model import exit_codes
from tests.generators.views_world import World
from tests.rigs.command_line import Cli


def test_it_says_its_version_and_needs_no_command_for_that(grpo_orch: Cli) -> None:
    assert grpo_orch("--version") == (0, f"grpo-orch {version('grpo-orch')}\n", "")


def test_a_shell_can_complete_its_commands() -> None:
    asked = {"_GRPO_ORCH_COMPLETE": "complete_bash", "COMP_WORDS": "grpo-orch ro", "COMP_CWORD": "1"}
    told = CliRunner().invoke(app, [], env=asked, prog_name="grpo-orch")
    assert told.stdout.split() == ["rollback"]


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_is_where_it_is_looked_for(name: str, grpo_orch: Cli) -> None:
    told = grpo_orch(name, "--help")
    assert told.code == 0
    assert f" {name} " in told.out.splitlines()[1]


def test_a_name_that_is_nearly_a_commands_is_told_which(grpo_orch: Cli) -> None:
    told = grpo_orch("rolback")
    assert told.code == exit_codes.USAGE
    assert "'rollback'" in told.err


def test_what_a_command_does_not_need_is_not_imported_for_it() -> None:
    """Rooms that take longer to import than a version takes to be told."""
    code = "import sys, grpo_orch.orchestrator.cli as cli; sys.argv[1:] = ['--version']; cli.main()"
    said = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", code], check=True, capture_output=True, text=True
    ).stderr
    rooms = {line.split("|")[-1].strip() for line in said.splitlines()}
    assert "grpo_orch.orchestrator.cli" in rooms
    assert (
        not {
            "grpo_orch.orchestrator.control",
            "grpo_orch.orchestrator.simulate",
            "grpo_orch.orchestrator.clouds",
            "numpy",
        }
        & rooms
    )


@pytest.mark.parametrize("words", ["init --recipe", "checkpoints ls nosuch -o json"])
def test_a_full_disk_behind_stdout_is_one_line(words: str) -> None:
    argv = [sys.executable, "-m", "grpo_orch", *words.split()]
    with Path("/dev/full").open("w") as full:
        told = subprocess.run(argv, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert told.returncode != 0
    assert "Traceback" not in told.stderr
    assert told.stderr.count("\n") == 1


# Every command that takes `-o json`, in a way in which it fails; WORLD is a run that has not trained yet.
FAILURES = {
    "validate nothing.yaml": exit_codes.USAGE,
    "plan nothing.yaml": exit_codes.USAGE,
    "doctor nothing.yaml": exit_codes.USAGE,
    "status nothing": exit_codes.USAGE,
    "status nosuch://bucket/run": exit_codes.FAILED,
    "events nothing": exit_codes.USAGE,
    "explain nothing": exit_codes.USAGE,
    "rollback --set beta=much WORLD": exit_codes.USAGE,
    "down nothing": exit_codes.USAGE,
    "report nothing": exit_codes.USAGE,
    "samples WORLD": exit_codes.USAGE,
    "web nothing": exit_codes.USAGE,
    "detect nothing": exit_codes.USAGE,
    "simulate nothing.yaml": exit_codes.USAGE,
    "eval WORLD": exit_codes.USAGE,
    "checkpoints ls nothing": exit_codes.USAGE,
    "checkpoints pin 5 WORLD": exit_codes.USAGE,
    "checkpoints unpin 5 WORLD": exit_codes.USAGE,
    "checkpoints verify 5 WORLD": exit_codes.USAGE,
    "checkpoints export 5 folder WORLD": exit_codes.USAGE,
    "members ls nothing": exit_codes.USAGE,
    "members drain rollout-0 WORLD": exit_codes.FAILED,
    "members remove rollout-0 WORLD": exit_codes.FAILED,
}


@pytest.mark.parametrize("command", FAILURES)
def test_a_program_gets_json_of_a_failure_too(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, grpo_orch: Cli
) -> None:
    monkeypatch.setenv("GRPO_ORCH_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    words = command.replace("WORLD", World().store.url).split()
    told = grpo_orch(*words, "-o", "json")
    assert told.code == FAILURES[command]
    document = json.loads(told.out)
    if words[0] not in ("validate", "detect"):  # whose own documents say what is wrong
        assert document == {"error": told.err.rstrip("\n"), "exit_code": FAILURES[command]}
    assert grpo_orch(*words).out == "", "who reads it asked for no JSON"


def test_every_command_with_json_is_among_these() -> None:
    listed = {tuple(word for word in command.split()[:2] if word.isalpha()) for command in FAILURES}
    known = {words[:length] for words in listed for length in (1, 2)}
    group: Any = typer.main.get_command(app)
    group.list_commands(None)  # which imports them
    found = set(_with_json(group, ()))
    assert found
    assert found <= known


def _with_json(command: Any, path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    for name, below in getattr(command, "commands", {}).items():
        yield from _with_json(below, (*path, name))
    if any("--output" in one.opts for one in command.params):
        yield path
