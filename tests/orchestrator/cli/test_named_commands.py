"""Every `grpo-orch COMMAND` that the documentation or a message names is a command."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from orchestrator.cli import app

ROOT = Path(__file__).parents[3]
NAMED = re.compile(r"(?:`|^)grpo-orch (?P<command>[a-z]+)(?: (?P<below>[a-z]+))?", re.MULTILINE)


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
