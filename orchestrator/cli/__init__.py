"""The command line: the table of commands, and how a command exits.

Each command is imported when it is called: importing all of them takes longer than most commands run.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from importlib.metadata import version
from pkgutil import resolve_name
from typing import Annotated, Any, NoReturn

import structlog
import typer
from rich.console import Console
from typer.core import TyperGroup
from typer.main import get_command, get_group

from grpo_orch.orchestrator.cli.options import EXIT_CODES, Stop, console, errors, print_failure, print_line, reader
from grpo_orch.policies.model import exit_codes

# Modules and functions in orchestrator.cli, in the order of the help.
COMMANDS = {
    "demo": "demo:demo",
    "init": "prepare:init",
    "schema": "prepare:schema",
    "validate": "prepare:validate",
    "plan": "prepare:plan",
    "doctor": "doctor:doctor",
    "node-env": "demo:node_env",
    "up": "start:up",
    "status": "look:status",
    "logs": "look:logs",
    "events": "look:events",
    "explain": "explain:explain",
    "resume": "start:resume",
    "rollback": "start:rollback",
    "down": "down:down",
    "report": "look:report",
    "plot": "look:plot",
    "samples": "look:samples",
    "web": "look:web",
    "detect": "detect:detect",
    "simulate": "simulate:simulate",
    "eval": "evaluate:evaluate",
    "checkpoints": "checkpoints:app",
    "members": "members:app",
}
CLASSES = {"init": "prepare:Init"}  # commands that parse their own arguments
# Examples of commands, which end their help.
EXAMPLES: Mapping[str, Sequence[str]] = {
    "init": ("grpo-orch init", "grpo-orch init --recipe gsm8k-zero2 my-run --name my-run"),
    "schema": ("grpo-orch schema > run.schema.json",),
    "validate": ("grpo-orch validate run.yaml", "grpo-orch validate run.yaml -o json"),
    "plan": ("grpo-orch plan run.yaml",),
    "doctor": ("grpo-orch doctor", "grpo-orch doctor run.yaml"),
    "node-env": ("grpo-orch node-env --yes",),
    "demo": ("grpo-orch demo", "grpo-orch demo --yes my-demo"),
    "up": ("grpo-orch up run.yaml", "grpo-orch up run.yaml --yes --detach -o json"),
    "status": ("grpo-orch status -w", "grpo-orch status s3://my-bucket/runs/digits -o json"),
    "logs": ("grpo-orch logs trainer-0 -f", "grpo-orch logs daemon s3://my-bucket/runs/digits"),
    "events": ("grpo-orch events -f", "grpo-orch events s3://my-bucket/runs/digits -o json"),
    "explain": ("grpo-orch explain",),
    "resume": (
        "grpo-orch resume s3://my-bucket/runs/digits",
        "grpo-orch resume s3://my-bucket/runs/digits --set max_steps=1000",
    ),
    "rollback": ("grpo-orch rollback", "grpo-orch rollback --to 0-120 --set learning_rate=5e-7"),
    "down": ("grpo-orch down", "grpo-orch down s3://my-bucket/runs/digits --now"),
    "report": ("grpo-orch report", "grpo-orch report s3://my-bucket/runs/digits -o json"),
    "plot": ("grpo-orch plot --out digits.png",),
    "samples": ("grpo-orch samples --worst", "grpo-orch samples --step 120 --search sorry -n 20"),
    "web": ("grpo-orch web s3://my-bucket/runs/digits",),
    "detect": ("grpo-orch detect trainer_state.json", "grpo-orch detect runs/*/metrics.jsonl -o json"),
    "simulate": ("grpo-orch simulate run.yaml", "grpo-orch simulate run.yaml --climate storms --seeds 100"),
    "eval": ("grpo-orch eval", "grpo-orch eval --base --step 200 --step 400 --rows 500 --yes"),
    "checkpoints": ("grpo-orch checkpoints ls", "grpo-orch checkpoints export latest ./model"),
    "checkpoints ls": ("grpo-orch checkpoints ls", "grpo-orch checkpoints ls s3://my-bucket/runs/digits -o json"),
    "checkpoints pin": ("grpo-orch checkpoints pin 0-120",),
    "checkpoints unpin": ("grpo-orch checkpoints unpin 0-120",),
    "checkpoints verify": ("grpo-orch checkpoints verify", "grpo-orch checkpoints verify latest"),
    "checkpoints export": ("grpo-orch checkpoints export latest ./model",),
    "members": ("grpo-orch members ls", "grpo-orch members drain rollout-1"),
    "members ls": ("grpo-orch members ls",),
    "members drain": ("grpo-orch members drain rollout-1",),
    "members remove": ("grpo-orch members remove rollout-1",),
}


class Commands(TyperGroup):
    """A TyperGroup that imports commands on demand."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """See TyperGroup. For an unknown command, load all commands so that Typer can suggest one."""
        self._import(args[:1] if args[0] in COMMANDS else COMMANDS)
        return super().resolve_command(ctx, args)

    def list_commands(self, ctx: Any) -> list[str]:
        """See TyperGroup. The help prints a line for each command."""
        self._import(COMMANDS)
        return super().list_commands(ctx)

    def _import(self, names: Iterable[str]) -> None:
        for name in names:
            target = _resolve(COMMANDS[name])
            command: Any = get_group(target) if isinstance(target, typer.Typer) else _command(name, target)
            _complete_help(command, name)
            self.add_command(command, name)


def _complete_help(command: Any, name: str) -> None:
    """Add examples to the help of a command and of those below it, and let the terminal break its lines."""
    command.help = "\n\n".join(" ".join(part.split()) for part in (command.help or "").split("\n\n"))
    command.epilog = "Examples:\n" + "\n".join(f"$ {example}" for example in EXAMPLES[name])
    for below, subcommand in getattr(command, "commands", {}).items():
        _complete_help(subcommand, f"{name} {below}")


def _command(name: str, function: Any) -> Any:
    single = typer.Typer(add_completion=False)
    single.command(name, cls=_resolve(CLASSES[name]) if name in CLASSES else None)(function)
    return get_command(single)


def _resolve(path: str) -> Any:
    return resolve_name(f"grpo_orch.orchestrator.cli.{path}")


app = typer.Typer(
    name="grpo-orch",
    cls=Commands,
    help="Run GRPO post-training on spot machines without losing a step or a token when they are preempted.",
    epilog="Exit codes:\n" + "\n".join(f"  {code:3}  {meaning}" for code, meaning in EXIT_CODES.items()),
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
    """Run GRPO post-training on spot machines without losing a step or a token when they are preempted."""


def _ensure_utf8_mode() -> None:
    """Restart this command in Python's UTF-8 mode if the locale has another encoding.

    Libraries written in Rust read file names as UTF-8, in every process of a run. The terminal keeps its encoding.
    """
    if sys.getfilesystemencoding() != "utf-8":
        terminal = {"PYTHONIOENCODING": os.environ.get("PYTHONIOENCODING") or sys.stdout.encoding}
        os.execve(sys.executable, sys.orig_argv, {**os.environ, **terminal, "PYTHONUTF8": "1"})


def main() -> None:
    """Run the command line. Report a user's mistake as one line and an exit code, never as a traceback."""
    _ensure_utf8_mode()
    processors = [_drop_store_retries, *structlog.get_config()["processors"]]
    # Log to stderr: stdout carries the command's output.
    structlog.configure(processors=processors, logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    if isinstance(sys.stdout, io.TextIOWrapper):  # the locale may lack the characters of bars and plots
        sys.stdout.reconfigure(errors="replace")
    reader.wants_json = reader.has_json = False
    try:
        app()
    except Stop as stop:
        terminal = console if stop.exit_code == exit_codes.OK and not reader.wants_json else errors
        _exit(str(stop), stop.exit_code, terminal)
    except Exception as error:
        if (exit_code := _exit_code_of(error)) is None:
            raise
        _exit(str(error), exit_code)


def _drop_store_retries(_: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Drop the log events of store retries: a store that stays unavailable is reported once, as an error."""
    if event["event"] == "store_retry":
        raise structlog.DropEvent
    return event


def _exit(message: str, exit_code: int, terminal: Console = errors) -> NoReturn:
    try:
        print_line(message, terminal)
        print_failure(message, exit_code)
    except OSError as error:  # of stdout, which may be the error that `message` reports
        if terminal is not errors:
            print_line(f"cannot print: {error.strerror}", errors)
        exit_code = exit_code or exit_codes.FAILED
    sys.exit(exit_code)


def _exit_code_of(error: Exception) -> int | None:
    """Return the exit code of an error that is reported as one line; None for a bug, which prints a traceback."""
    # Imported here because these modules take long to import.
    from grpo_orch.checkpoint.store.errors import StoreError
    from grpo_orch.orchestrator.cli.target import NoSuchRun
    from grpo_orch.orchestrator.clouds import CloudMissing
    from grpo_orch.orchestrator.clouds.protocol import CloudRefused, CloudUnavailable
    from grpo_orch.orchestrator.config.load import ConfigError
    from grpo_orch.orchestrator.control.launcher import AlreadyControlled, DaemonFailed
    from grpo_orch.orchestrator.home import HomeUnusable

    match error:
        case AlreadyControlled():
            return exit_codes.HELD
        case ConfigError() | NoSuchRun():
            return exit_codes.USAGE
        case OSError() if error.filename is None and error.errno in (errno.ENOSPC, errno.EIO):
            return exit_codes.FAILED  # the disk behind stdout is full or gone
        case StoreError() | CloudRefused() | CloudUnavailable() | CloudMissing() | DaemonFailed() | HomeUnusable():
            return exit_codes.FAILED
        case _:
            return None
