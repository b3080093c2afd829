"""What the command line knows before it knows what is asked: the names of its commands, and where each is.

A command's module is imported when the command is called for: each needs other rooms, and all of them together
take longer than most commands.
"""

from __future__ import annotations

from collections.abc import Iterable
from pkgutil import resolve_name
from typing import Any

import typer
from typer.core import TyperGroup
from typer.main import get_command, get_group

# Below orchestrator.cli, in the order of the help.
COMMANDS = {
    "init": "write:init",
    "validate": "write:validate",
    "plan": "plan:plan",
    "doctor": "doctor:doctor",
    "up": "steering.start:up",
    "status": "look:status",
    "logs": "look:logs",
    "events": "look:events",
    "resume": "steering.start:resume",
    "rollback": "steering.rollback:rollback",
    "down": "steering.down:down",
    "report": "look:report",
    "plot": "look:plot",
    "samples": "samples:samples",
    "web": "web:web",
    "detect": "detect:detect",
    "simulate": "simulate:simulate",
    "eval": "evaluate:evaluate",
    "checkpoints": "checkpoints:app",
    "members": "members:app",
    "weather": "simulate:app",
}
CLASSES = {"init": "write:Init"}  # of commands that read their arguments in a way of their own


class Commands(TyperGroup):
    """Typer's group, which imports its commands."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """See TyperGroup. A name that is none is compared with all of them."""
        self._import(args[:1] if args[0] in COMMANDS else COMMANDS)
        return super().resolve_command(ctx, args)

    def list_commands(self, ctx: Any) -> list[str]:
        """See TyperGroup. The help tells a line of each."""
        self._import(COMMANDS)
        return super().list_commands(ctx)

    def _import(self, names: Iterable[str]) -> None:
        for name in names:
            found = _named(COMMANDS[name])
            self.add_command(get_group(found) if isinstance(found, typer.Typer) else _command(name, found), name)


def _command(name: str, function: Any) -> Any:
    alone = typer.Typer(add_completion=False)
    alone.command(name, cls=_named(CLASSES[name]) if name in CLASSES else None)(function)
    return get_command(alone)


def _named(where: str) -> Any:
    return resolve_name(f"orchestrator.cli.{where}")
