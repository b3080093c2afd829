"""Commands that are named exist, and a shell takes them as they stand, whatever the folder is called."""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from grpo_orch.checkpoint.records import documents
from grpo_orch.orchestrator.cli import app
from grpo_orch.orchestrator.control.lease import own_lease
from grpo_orch.orchestrator.views.formatting import continue_command
from grpo_orch.policies.model import exit_codes
from grpo_orch.policies.model.vocabulary import RunPhase
from tests.rigs.command_line import Cli
from tests.stand_ins.control_plane import Run

ROOT = Path(__file__).parents[3]
NAMED = re.compile(r"(?:`|^)grpo-orch (?P<command>[a-z]+(?:-[a-z]+)*)(?: (?P<below>[a-z]+))?", re.MULTILINE)


def commands() -> dict[str, frozenset[str]]:
    """The names of all commands, each with those below it."""
    group: Any = typer.main.get_command(app)  # typer brings its own copy of click, without types
    context = typer.Context(group)
    found = {}
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        found[name] = frozenset(command.list_commands(context) if hasattr(command, "list_commands") else ())
    return found


def texts() -> Iterator[Path]:
    yield ROOT / "README.md"
    for folder, pattern in (("docs", "*.md"), ("orchestrator", "*.py"), ("tasks", "*.py"), ("policies", "*.py")):
        yield from (ROOT / folder).rglob(pattern)


def test_named_commands_exist() -> None:
    known = commands()
    wrong = [
        f"{path.relative_to(ROOT)}: {found.group()}"
        for path in texts()
        for found in NAMED.finditer(path.read_text())
        if found["command"] not in known
        or (known[found["command"]] and found["below"] not in known[found["command"]])
    ]
    assert not wrong


NAMES = ["plain", "two words", "it's", 'a "b"', "$HOME", "`id`", "a[b]", "a;b&c", "*"]


@pytest.mark.parametrize("name", NAMES)
def test_suggested_next_commands_can_be_pasted(name: str, grpo_orch: Cli, tmp_path: Path) -> None:
    store = Run(tmp_path / name).create().store
    documents.LEASE.write(store, own_lease(1, time.time(), time.time()))
    held = grpo_orch("resume", store.url)
    assert held.code == exit_codes.HELD
    told = held.line.partition("watch it with `")[2].partition("`, stop it with ")[0]
    words = shlex.split(told)
    assert words == ["grpo-orch", "status", "-w", store.url]
    assert grpo_orch("status", *words[3:]).code == exit_codes.OK


@pytest.mark.parametrize("phase", [RunPhase.FAILED, RunPhase.PAUSED, RunPhase.GAVE_UP])
def test_suggested_resume_command_can_be_pasted(phase: RunPhase) -> None:
    told = continue_command(phase, "because", "file:///two words/$x")
    assert shlex.split(told.partition(": ")[2])[-1] == "file:///two words/$x"
