"""The command line. Each command is a thin function over the rooms below."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import MutableMapping
from importlib.metadata import version
from typing import Annotated, Any, NoReturn

import structlog
import typer
from rich.console import Console

from orchestrator.cli.commands import Commands
from orchestrator.cli.options import Stop, console, errors, print_failure, reader
from policies.model import exit_codes

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
        # Imported here, for what raises them takes long to import.
        from orchestrator.cli.failures import exit_code_of

        if (exit_code := exit_code_of(error)) is None:
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
