"""`grpo-orch detect`: run the divergence detectors over the metrics of any GRPO run."""

from __future__ import annotations

import math
from collections.abc import Collection
from pathlib import Path
from typing import Annotated

import typer

from grpo_orch.orchestrator.cli.options import AsJson, Output, Stop, console, errors, print_json, print_line
from grpo_orch.orchestrator.traces.read import NotATrace, read_traces
from grpo_orch.orchestrator.views.detection import Detection, Unreadable, render, to_json
from grpo_orch.orchestrator.views.detection import detect as detect_run
from grpo_orch.policies.model import exit_codes

REASON_CHARACTERS = 200


def detect(
    files: Annotated[
        list[Path],
        typer.Argument(
            help="A trainer's log, trainer_state.json, JSON lines, CSV or TensorBoard event file, "
            "optionally gzipped; a run's folder; or - for standard input."
        ),
    ],
    limit: Annotated[
        float | None,
        typer.Option("--limit", metavar="KL", help="Also trip when KL rises this far above its initial value."),
    ] = None,
    save_steps: Annotated[
        int | None,
        typer.Option(
            "--save-steps", metavar="N", help="Steps between checkpoints, if the file does not record it."
        ),
    ] = None,
    task_change: Annotated[
        list[int] | None,
        typer.Option("--task-change", metavar="STEP", help="First step of harder tasks. May be repeated."),
    ] = None,
    output: AsJson = Output.TEXT,
) -> None:
    """Find out from a run's metrics whether and where it diverged, and which checkpoint is still healthy.

    Exit code: 3 if a run tripped; else 2 if a file could not be read or the command is wrong; else 0. For each
    file that cannot be read, print one line on stderr and continue with the others.
    """
    if limit is not None and not (limit > 0 and math.isfinite(limit)):
        raise Stop(f"--limit {limit:g}: expected a number above 0")
    if save_steps is not None and save_steps < 1:
        raise Stop(f"--save-steps {save_steps}: expected a whole number above 0")
    results = [result for file in files for result in _detect_in(file, limit, save_steps, task_change or ())]
    detections = [result for result in results if isinstance(result, Detection)]
    if output is Output.JSON:
        print_json([to_json(result) for result in results])
    elif detections:
        console.print(render(detections))
    if any(detection.tripped for detection in detections):
        raise typer.Exit(exit_codes.TRIPPED)
    if len(detections) < len(results):
        raise typer.Exit(exit_codes.USAGE)


def _detect_in(
    file: Path, limit: float | None, save_steps: int | None, task_changes: Collection[int]
) -> list[Detection | Unreadable]:
    """Return a result for every run in the file. Report an unreadable file on stderr immediately."""
    try:
        traces = read_traces(file)
        names = [trace.name.removeprefix(str(file)).removeprefix("#") for trace in traces]
        named = zip(names, traces, strict=True)
        return [detect_run(str(file), name, trace.trace, limit, save_steps, task_changes) for name, trace in named]
    except NotATrace as error:
        reason = str(error).removeprefix(f"{file}: ")
    except Exception as error:  # noqa: BLE001  # the remaining files must still be read
        reason = f"cannot be read: {type(error).__name__}: {' '.join(str(error).split())[:REASON_CHARACTERS]}"
    print_line(f"{file}: {reason}", errors)
    return [Unreadable(str(file), reason)]
