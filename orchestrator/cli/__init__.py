"""The command line. Each command is a thin function over the rooms below."""

from __future__ import annotations

import io
import sys
from importlib.metadata import version
from typing import Annotated

import structlog
import typer

from checkpoint.store.errors import StoreError
from orchestrator.cli import checkpoints, members
from orchestrator.cli.console import Stop, console, errors
from orchestrator.cli.detect import detect
from orchestrator.cli.doctor.command import doctor
from orchestrator.cli.down import down
from orchestrator.cli.evaluate import evaluate
from orchestrator.cli.look import events, logs, plot, report, status
from orchestrator.cli.plan import plan
from orchestrator.cli.rollback import rollback
from orchestrator.cli.samples import samples
from orchestrator.cli.simulate import app as weather
from orchestrator.cli.simulate import simulate
from orchestrator.cli.start import resume, up
from orchestrator.cli.target import NoSuchRun
from orchestrator.cli.web import web
from orchestrator.cli.write import Init, init, validate
from orchestrator.clouds import CloudMissing
from orchestrator.clouds.protocol import CloudRefused, CloudUnavailable
from orchestrator.config.load import ConfigError
from orchestrator.control.launcher import DaemonFailed
from policies.model import exit_codes

app = typer.Typer(
    name="grpo-orch",
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


app.command(cls=Init)(init)
for command in (
    validate,
    plan,
    doctor,
    up,
    status,
    logs,
    events,
    resume,
    rollback,
    down,
    report,
    plot,
    samples,
    web,
    detect,
    simulate,
):
    app.command()(command)
app.command("eval")(evaluate)
app.add_typer(checkpoints.app)
app.add_typer(members.app)
app.add_typer(weather)


def main() -> None:
    """Run the command line. A user's mistake is one line and an exit code, never a traceback."""
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))  # stdout is for what was asked
    if isinstance(sys.stdout, io.TextIOWrapper):  # whose locale may lack what strips and bars are drawn with
        sys.stdout.reconfigure(errors="replace")
    try:
        app()
    except Stop as stop:
        told = console if stop.exit_code == exit_codes.OK else errors
        told.print(str(stop), highlight=False, markup=False, soft_wrap=True)
        sys.exit(stop.exit_code)
    except (ConfigError, NoSuchRun) as error:
        errors.print(str(error), highlight=False, markup=False, soft_wrap=True)
        sys.exit(exit_codes.USAGE)
    except (StoreError, CloudRefused, CloudUnavailable, CloudMissing, DaemonFailed) as error:
        errors.print(str(error), highlight=False, markup=False, soft_wrap=True)
        sys.exit(exit_codes.FAILED)
