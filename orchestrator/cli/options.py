"""What commands share: the terminal, how they stop, how a run is named, printing for people or for programs."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

import typer
from rich.console import Console

# No markup: names, URLs and what a store says may have brackets.
console = Console(markup=False)
errors = Console(stderr=True, markup=False)


class Stop(Exception):
    """A command ends here with a message for the user and an exit code."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Output(StrEnum):
    """How a command prints."""

    TEXT = "text"
    JSON = "json"


@dataclass(slots=True)
class Reader:
    """Who reads what the command prints. A program that asked for JSON gets some, however the command ends."""

    wants_json: bool = False
    has_json: bool = False


reader = Reader()


def _note_reader(output: Output) -> Output:
    reader.wants_json = output is Output.JSON
    return output


Target = Annotated[
    str | None, typer.Argument(help="Store URL or run.yaml; default: ./run.yaml, else the latest run.")
]
AsJson = Annotated[
    Output,
    typer.Option("-o", "--output", callback=_note_reader, is_eager=True, help="text, or json for programs."),
]


def print_json(document: object) -> None:
    """One line of JSON, for programs."""
    reader.has_json = True
    print(json.dumps(document), flush=True)


def print_failure(message: str, exit_code: int) -> None:
    """In place of the JSON that a program asked for, where it has got none."""
    if reader.wants_json and not reader.has_json:
        print_json({"error": message, "exit_code": exit_code})
