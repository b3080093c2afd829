"""Commands around run.yaml: init, validate."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from orchestrator.cli.console import Stop, console
from orchestrator.config.load import load_spec
from orchestrator.config.template import init_text
from policies import exit_codes


def init(
    path: Annotated[Path, typer.Argument(help="Where to write it.")] = Path("run.yaml"),
    name: Annotated[str, typer.Option(help="The run's name.")] = "my-run",
) -> None:
    """Write a commented run.yaml to start from."""
    try:
        with path.open("x") as out:
            out.write(init_text(name))
    except FileExistsError:
        raise Stop(f"{path} exists already; remove it or name another", exit_codes.USAGE) from None
    except OSError as error:
        raise Stop(f"{path}: {error.strerror}", exit_codes.USAGE) from None
    console.print(f"Wrote {path}. Check it with: grpo-orch validate {path}", highlight=False)


def validate(
    run_yaml: Annotated[Path, typer.Argument(help="The file to check.")] = Path("run.yaml"),
) -> None:
    """Check a run.yaml without starting anything."""
    spec = load_spec(run_yaml)
    console.print(f"{run_yaml}: {spec.name} is valid", highlight=False)
