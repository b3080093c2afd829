"""What the command itself answers to, before any of its commands."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import typer

from grpo_orch.orchestrator.cli import COMMANDS, EXAMPLES, app
from grpo_orch.orchestrator.cli.options import EXIT_CODES
from grpo_orch.policies.model import exit_codes
from tests.generators.views_world import World
from tests.rigs.command_line import Cli


def test_version_option_needs_no_command(grpo_orch: Cli) -> None:
    assert grpo_orch("--version") == (0, f"grpo-orch {version('grpo-orch')}\n", "")


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_is_where_it_is_looked_for(
    name: str, monkeypatch: pytest.MonkeyPatch, grpo_orch: Cli
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    told = grpo_orch(name, "--help")
    assert told.code == 0
    lines = told.out.splitlines()
    assert f" {name} " in lines[1]
    assert max(map(len, lines)) <= 80
    shown = [line.strip().removeprefix("$ ") for line in lines[lines.index(f"{' Examples:':80}") + 1 :]]
    assert [line for line in shown if line] == list(EXAMPLES[name])


def test_examples_are_valid_command_lines() -> None:
    group: Any = typer.main.get_command(app)
    for name, examples in EXAMPLES.items():
        for example in examples:
            words = shlex.split(example.partition(" > ")[0])
            assert words[: 1 + len(name.split())] == ["grpo-orch", *name.split()]
            command, words = group, words[1:]
            while hasattr(command, "commands"):
                _, command, words = command.resolve_command(
                    command.make_context("", [], resilient_parsing=True), words
                )
            command.make_context(name, words)


def test_exit_codes_are_in_the_help_and_documented(monkeypatch: pytest.MonkeyPatch, grpo_orch: Cli) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = [line.strip() for line in grpo_orch("--help").out.splitlines() if line.strip()]
    shown = lines[lines.index("Exit codes:") + 1 :]
    assert shown == [f"{code:3}  {meaning}".strip() for code, meaning in EXIT_CODES.items()]


def test_misspelled_command_is_suggested(grpo_orch: Cli) -> None:
    told = grpo_orch("rolback")
    assert told.code == exit_codes.USAGE
    assert "'rollback'" in told.err


def test_command_imports_only_its_own_modules() -> None:
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
def test_full_disk_at_stdout_is_one_line(words: str) -> None:
    argv = [sys.executable, "-m", "grpo_orch", *words.split()]
    with Path("/dev/full").open("w") as full:
        told = subprocess.run(argv, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert told.returncode != 0
    assert "Traceback" not in told.stderr
    assert told.stderr.count("\n") == 1


# Every command that takes `-o json`, in a way in which it fails; WORLD is a run that has not trained yet.
FAILURES = {
    "init --recipe nothing": exit_codes.USAGE,
    "validate nothing.yaml": exit_codes.USAGE,
    "plan nothing.yaml": exit_codes.USAGE,
    "doctor nothing.yaml": exit_codes.USAGE,
    "up nothing.yaml --yes": exit_codes.USAGE,
    "resume nothing": exit_codes.USAGE,
    "plot nothing": exit_codes.USAGE,
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
