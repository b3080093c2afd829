"""The command line: its commands, each imported when it is called, and how a command ends.

Each command needs other packages, and all of them together take longer to import than most commands run.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Iterable, MutableMapping
from importlib.metadata import version
from pkgutil import resolve_name
from typing import Annotated, Any, NoReturn

import structlog
import typer
from rich.console import Console
from typer.core import TyperGroup
from typer.main import get_command, get_group

from orchestrator.cli.options import Stop, console, errors, print_failure, reader
from policies.model import exit_codes

# Below orchestrator.cli, in the order of the help.
COMMANDS = {
    "init": "prepare:init",
    "validate": "prepare:validate",
    "plan": "prepare:plan",
    "doctor": "doctor:doctor",
    "up": "start:up",
    "status": "look:status",
    "logs": "look:logs",
    "events": "look:events",
    "explain": "explain:explain",
    "resume": "start:resume",
    "rollback": "start:rollback",
    "down": "down:down",
    "report": "look:report",
    "plot": "look:plot",
    "samples": "look:samples",
    "web": "look:web",
    "detect": "detect:detect",
    "simulate": "simulate:simulate",
    "eval": "evaluate:evaluate",
    "checkpoints": "checkpoints:app",
    "members": "members:app",
}
CLASSES = {"init": "prepare:Init"}  # of commands that read their arguments in a way of their own


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


app = typer.Typer(
    name="grpo-orch",
    cls=Commands,
    help="GRPO post-training on spot machines that die, without losing a step or a token.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"grpo-orch {version('grpo-orch')}")
        raise typer.Exit


@app.callback()
def _options(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """GRPO post-training on spot machines that die, without losing a step or a token."""


def _read_names_as_utf8() -> None:
    """Start this command again in Python's UTF-8 mode if the locale has another encoding.

    Libraries written in Rust read file names as UTF-8, in every process of a run. The terminal keeps its encoding.
    """
    if sys.getfilesystemencoding() != "utf-8":
        printed = {"PYTHONIOENCODING": os.environ.get("PYTHONIOENCODING") or sys.stdout.encoding}
        os.execve(sys.executable, sys.orig_argv, {**os.environ, **printed, "PYTHONUTF8": "1"})


def main() -> None:
    """Run the command line. A user's mistake is one line and an exit code, never a traceback."""
    _read_names_as_utf8()
    processors = [_without_retries, *structlog.get_config()["processors"]]
    # stdout is for what was asked.
    structlog.configure(processors=processors, logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    if isinstance(sys.stdout, io.TextIOWrapper):  # whose locale may lack what strips and bars are drawn with
        sys.stdout.reconfigure(errors="replace")
    reader.wants_json = reader.has_json = False
    try:
        app()
    except Stop as stop:
        told = console if stop.exit_code == exit_codes.OK and not reader.wants_json else errors
        _end(str(stop), stop.exit_code, told)
    except Exception as error:
        if (exit_code := _exit_code_of(error)) is None:
            raise
        _end(str(error), exit_code)


def _without_retries(_: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """A store that is away for seconds is tried again, and told of once, in a line, where it stays away."""
    if event["event"] == "store_retry":
        raise structlog.DropEvent
    return event


def _end(message: str, exit_code: int, told: Console = errors) -> NoReturn:
    try:
        told.print(message, highlight=False, soft_wrap=True)
        print_failure(message, exit_code)
    except OSError as error:  # of stdout; or it is what has failed before, and was told
        if told is not errors:
            errors.print(f"cannot be printed: {error.strerror}", highlight=False, soft_wrap=True)
        exit_code = exit_code or exit_codes.FAILED
    sys.exit(exit_code)


def _exit_code_of(error: Exception) -> int | None:
    """Return the exit code of an error that is reported as one line; None for an error that is ours."""
    # Imported here, for what raises these errors takes long to import.
    from checkpoint.store.errors import StoreError
    from orchestrator.cli.target import NoSuchRun
    from orchestrator.clouds import CloudMissing
    from orchestrator.clouds.protocol import CloudRefused, CloudUnavailable
    from orchestrator.config.load import ConfigError
    from orchestrator.control.launcher import DaemonFailed, TakenByAnother
    from orchestrator.home import HomeUnusable

    match error:
        case TakenByAnother():
            return exit_codes.HELD
        case ConfigError() | NoSuchRun():
            return exit_codes.USAGE
        case OSError() if error.filename is None and error.errno in (errno.ENOSPC, errno.EIO):
            return exit_codes.FAILED  # what stdout is written to is full, or gone
        case StoreError() | CloudRefused() | CloudUnavailable() | CloudMissing() | DaemonFailed() | HomeUnusable():
            return exit_codes.FAILED
        case _:
            return None
