"""Would this run have been stopped? Detection over the metrics of any GRPO run."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer

from orchestrator.cli.console import Stop, console
from orchestrator.cli.options import AsJson, Output, print_json
from orchestrator.views.detection import detect as follow
from orchestrator.views.detection import render, to_json
from orchestrator.views.traces import NotATrace, read_trace
from policies.model import exit_codes

PICTURE = Path("detect.png")


def detect(
    files: Annotated[
        list[Path],
        typer.Argument(help="trainer_state.json, a trainer's log, JSON lines or CSV of metrics; one run each."),
    ],
    limit: Annotated[
        float | None, typer.Option("--limit", metavar="KL", help="As policies.kl.limit; default: none.")
    ] = None,
    save_steps: Annotated[
        int | None,
        typer.Option("--save-steps", metavar="N", help="How often the run saved, where a file does not say."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", help=f"The PNG to write; default: {PICTURE}, and with `-o json` none."),
    ] = None,
    output: AsJson = Output.TEXT,
) -> None:
    """Tell from a run's metrics whether and where it diverged, and which checkpoint is from before."""
    if limit is not None and not (limit > 0 and math.isfinite(limit)):
        raise Stop(f"--limit {limit:g}: expected a number above 0", exit_codes.USAGE)
    if save_steps is not None and save_steps < 1:
        raise Stop(f"--save-steps {save_steps}: expected a whole number above 0", exit_codes.USAGE)
    try:
        traces = [(str(file), read_trace(file)) for file in files]
    except NotATrace as error:
        raise Stop(str(error), exit_codes.USAGE) from None
    found = [follow(file, trace, limit, save_steps) for file, trace in traces]
    out = PICTURE if out is None and output is Output.TEXT else out
    if out is not None:
        # matplotlib takes half a second to import.
        from orchestrator.views.detection_plot import plot_detections

        try:
            plot_detections(found, out)
        except OSError as error:
            raise Stop(f"{out}: {error.strerror}", exit_codes.USAGE) from None
    if output is Output.JSON:
        print_json([to_json(one) for one in found])
        return
    console.print(render(found), highlight=False)
    console.print(f"\nWrote {out}", markup=False, highlight=False, soft_wrap=True)
