"""Shared parts of commands: terminals, the Stop exception, common options, and JSON output."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

import typer
from rich.console import Console, RenderableType

from grpo_orch.policies.model import exit_codes

# No markup: names, URLs and store errors may contain brackets.
console = Console(markup=False, highlight=False)
errors = Console(stderr=True, markup=False, highlight=False)


# The exit codes of all commands, for the help and the documentation.
EXIT_CODES = {
    exit_codes.OK: "success",
    exit_codes.FAILED: "the command or the run failed, the run is paused, or you answered no",
    exit_codes.USAGE: "wrong command line or run.yaml, or the run's state forbids the command",
    exit_codes.TRIPPED: "`detect`: a run tripped",
    exit_codes.HELD: "`up`, `resume`: another daemon controls the run",
    exit_codes.GAVE_UP: "the run gave up after repeated divergence",
    exit_codes.INTERRUPTED: "interrupted with Ctrl-C",
}


class Stop(Exception):
    """End the command with a message for the user and an exit code, by default that of a user's mistake."""

    def __init__(self, message: str, exit_code: int = exit_codes.USAGE) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Output(StrEnum):
    """The output format of a command."""

    TEXT = "text"
    JSON = "json"


@dataclass(slots=True)
class Reader:
    """Who reads the output. A program that requested JSON gets a JSON document even if the command fails."""

    wants_json: bool = False
    has_json: bool = False


reader = Reader()


def _note_reader(output: Output) -> Output:
    reader.wants_json = output is Output.JSON
    return output


Target = Annotated[
    str | None,
    typer.Argument(
        metavar="RUN", help="Store URL, run.yaml or run folder. Default: ./run.yaml, else the latest run."
    ),
]
AsJson = Annotated[
    Output,
    typer.Option("-o", "--output", callback=_note_reader, is_eager=True, help="Output format."),
]


Yes = Annotated[bool, typer.Option("-y", "--yes", help="Start without asking.")]


def require_terminal(yes: bool) -> None:
    """Raise Stop if the command would ask and there is no terminal for the answer."""
    if not yes and (sys.stdin is None or not sys.stdin.isatty()):
        raise Stop("cannot ask without a terminal; pass --yes to start without asking", exit_codes.USAGE)


def confirm(question: str, *, yes: bool) -> None:
    """Ask on stderr, unless `yes`. Raises Stop if the answer is no."""
    try:
        if yes or typer.confirm(question, default=True, err=True):
            return
    except typer.Abort:  # Ctrl-C or Ctrl-D
        errors.print()
    raise Stop("nothing was started", exit_codes.FAILED)


def print_line(text: str, terminal: Console = console) -> None:
    """Print a line that the terminal itself wraps, so that commands and paths in it can be copied."""
    terminal.print(text, soft_wrap=True)


def text_terminal(output: Output) -> Console:
    """Return the terminal for text: stderr if stdout carries JSON."""
    return errors if output is Output.JSON else console


def print_json(document: object) -> None:
    """Print one line of JSON."""
    reader.has_json = True
    print(json.dumps(document), flush=True)


def print_result(output: Output, document: object, text: RenderableType | Callable[[], RenderableType]) -> None:
    """Print a command's result: the document as JSON, or the text or its result, a string as `print_line` does."""
    if output is Output.JSON:
        print_json(document)
        return
    text = text() if callable(text) else text
    if isinstance(text, str):
        print_line(text)
    else:
        console.print(text)


def print_failure(message: str, exit_code: int) -> None:
    """Print the failure as JSON if the program requested JSON and has not received any."""
    if reader.wants_json and not reader.has_json:
        print_json({"error": message, "exit_code": exit_code})
