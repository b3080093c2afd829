"""What several commands share: how a run is named, and printing for people or for programs."""

from __future__ import annotations

import json
from enum import StrEnum
from typing import Annotated

import typer


class Output(StrEnum):
    """How a command prints."""

    TEXT = "text"
    JSON = "json"


Target = Annotated[
    str | None, typer.Argument(help="Store URL or run.yaml; default: ./run.yaml, else the latest run.")
]
AsJson = Annotated[Output, typer.Option("-o", "--output", help="text, or json for programs.")]


def print_json(document: object) -> None:
    """One line of JSON, for programs."""
    print(json.dumps(document), flush=True)
