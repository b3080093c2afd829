"""Shared parts of commands: terminals, the Stop exception, common options, and JSON output."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

import typer
from rich.console import Console

# No markup: names, URLs and store errors may contain brackets.
console = Console(markup=False)
errors = Console(stderr=True, markup=False)


class Stop(Exception):
    """End the command with a message for the user and an exit code."""

    def __init__(self, message: str, exit_code: int) -> None:
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


def print_json(document: object) -> None:
    """Print one line of JSON."""
    reader.has_json = True
    print(json.dumps(document), flush=True)


def print_failure(message: str, exit_code: int) -> None:
    """Print the failure as JSON if the program requested JSON and has not received any."""
    if reader.wants_json and not reader.has_json:
        print_json({"error": message, "exit_code": exit_code})
