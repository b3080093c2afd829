"""Would this run have been stopped? Detection over the metrics of any GRPO run."""

from __future__ import annotations

import math
from collections.abc import Collection
from pathlib import Path
from typing import Annotated

import typer

from orchestrator.cli.options import AsJson, Output, Stop, console, errors, print_json
from orchestrator.traces.read import NotATrace, read_traces
from orchestrator.views.detection import Detection, Unreadable, render, to_json
from orchestrator.views.detection import detect as follow
from policies.model import exit_codes

REASON_CHARACTERS = 200


def detect(
    files: Annotated[
        list[Path],
        typer.Argument(
            help="A trainer's log, trainer_state.json, JSON lines, CSV or TensorBoard events, "
            "gzipped or not; a run's folder; or - for standard input."
        ),
    ],
    limit: Annotated[
        float | None,
        typer.Option("--limit", metavar="KL", help="Trip at a KL so far above the run's own start, too."),
    ] = None,
    save_steps: Annotated[
        int | None,
        typer.Option("--save-steps", metavar="N", help="How often the run saved, where a file does not say."),
    ] = None,
    task_change: Annotated[
        list[int] | None,
        typer.Option(
            "--task-change", metavar="STEP", help="The first step of harder tasks; give it once for each."
        ),
    ] = None,
    output: AsJson = Output.TEXT,
) -> None:
    """Tell from runs' metrics whether and where they diverged, and which checkpoint is from before it.

    Exit code: 3 when a run tripped; else 2 when a file could not be read, or the command is wrong; else 0. A file
    that cannot be read is one line on stderr, and the others are judged all the same.
    """
    if limit is not None and not (limit > 0 and math.isfinite(limit)):
        raise Stop(f"--limit {limit:g}: expected a number above 0", exit_codes.USAGE)
    if save_steps is not None and save_steps < 1:
        raise Stop(f"--save-steps {save_steps}: expected a whole number above 0", exit_codes.USAGE)
    told = [one for file in files for one in _judge(file, limit, save_steps, task_change or ())]
    found = [one for one in told if isinstance(one, Detection)]
    if output is Output.JSON:
        print_json([to_json(one) for one in told])
    elif found:
        console.print(render(found), highlight=False)
    if any(one.tripped for one in found):
        raise typer.Exit(exit_codes.TRIPPED)
    if len(found) < len(told):
        raise typer.Exit(exit_codes.USAGE)


def _judge(
    file: Path, limit: float | None, save_steps: int | None, task_changes: Collection[int]
) -> list[Detection | Unreadable]:
    """Every run in the file; one that cannot be read is told at once, on stderr."""
    try:
        traces = read_traces(file)
        runs = [one.name.removeprefix(str(file)).removeprefix("#") for one in traces]
        named = zip(runs, traces, strict=True)
        return [follow(str(file), run, trace.trace, limit, save_steps, task_changes) for run, trace in named]
    except NotATrace as error:
        reason = str(error).removeprefix(f"{file}: ")
    except Exception as error:  # noqa: BLE001  # one file that breaks a reader must not cost the others
        reason = f"cannot be read: {type(error).__name__}: {' '.join(str(error).split())[:REASON_CHARACTERS]}"
    errors.print(f"{file}: {reason}", highlight=False, soft_wrap=True)
    return [Unreadable(str(file), reason)]
