"""What the command itself answers to, before any of its commands."""

from __future__ import annotations

from importlib.metadata import version

from typer.testing import CliRunner

from orchestrator.cli import app


def test_it_says_its_version_and_needs_no_command_for_that() -> None:
    told = CliRunner().invoke(app, ["--version"])
    assert (told.exit_code, told.stdout) == (0, f"grpo-orch {version('grpo-orch')}\n")


def test_a_shell_can_complete_its_commands() -> None:
    asked = {"_GRPO_ORCH_COMPLETE": "complete_bash", "COMP_WORDS": "grpo-orch ro", "COMP_CWORD": "1"}
    told = CliRunner().invoke(app, [], env=asked, prog_name="grpo-orch")
    assert told.stdout.split() == ["rollback"]
