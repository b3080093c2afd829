"""Commands to try this project on one machine: node-env makes the nodes' environment, demo trains a tiny model."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from grpo_orch.checkpoint import journal
from grpo_orch.checkpoint.store import layout
from grpo_orch.orchestrator.cli.down import down
from grpo_orch.orchestrator.cli.look import plot
from grpo_orch.orchestrator.cli.options import Stop, Yes, confirm, print_line, require_terminal
from grpo_orch.orchestrator.cli.prepare import RECIPES, SCHEMA_LINE, write_recipe
from grpo_orch.orchestrator.cli.start import up
from grpo_orch.orchestrator.cli.target import open_run
from grpo_orch.orchestrator.clouds.local import NoNodeEnvironment, node_env_folder, node_python
from grpo_orch.orchestrator.clouds.wheel import build_wheel, wheel_digest
from grpo_orch.orchestrator.home import run_dir
from grpo_orch.orchestrator.node_installer import (
    Kind,
    NodeEnvFailed,
    State,
    ThisMachine,
    kind_of,
    make,
    refuse_unfit,
    state_of,
)
from grpo_orch.policies.model import exit_codes
from grpo_orch.policies.model.phases import TERMINAL_RUN

RECIPE = "tiny"


def node_env(yes: Yes = False) -> None:
    """Install torch, TRL and vLLM for the nodes that run on this machine, or repair that installation."""
    ensure_node_env(ThisMachine(), yes=yes)
    print_line(f"The nodes on this machine run {node_python()}")


def demo(
    folder: Annotated[Path, typer.Argument(help="Folder to write. An earlier demo in it is deleted.")] = Path(
        "grpo-orch-demo"
    ),
    yes: Yes = False,
) -> None:
    """Train a tiny model on this machine while five faults hit its processes, then report and plot.

    It first installs torch, TRL and vLLM if this machine does not have them.
    """
    refuse_other_folder(folder)
    ensure_node_env(ThisMachine(), yes=yes)
    run_yaml = str(prepare_folder(folder))
    up(Path(run_yaml), yes=True)
    store, _ = open_run(run_yaml)
    if journal.recover(store).state.phase in TERMINAL_RUN:  # else the user has detached
        plot(run_yaml, folder / "plot.png")
        print_line(f"The report again: grpo-orch report {run_yaml}")


def refuse_other_folder(folder: Path) -> None:
    """Raise Stop if something other than a demo is in the folder."""
    if not os.path.lexists(folder):
        return
    try:
        text = (folder / "run.yaml").read_text("utf-8")
        is_demo = text == SCHEMA_LINE + (RECIPES / RECIPE / "run.yaml").read_text("utf-8")
    except (OSError, UnicodeError):
        is_demo = False
    if not is_demo:
        raise Stop(f"{folder} exists and is not an unchanged demo; name another folder")


def prepare_folder(folder: Path) -> Path:
    """Write the recipe, or stop and remove the folder's earlier run; return its run.yaml. Raises Stop."""
    run_yaml = folder / "run.yaml"
    try:
        if not folder.exists():
            folder.parent.mkdir(parents=True, exist_ok=True)
            write_recipe(RECIPE, folder, None)
        if (folder / "build" / "store" / layout.RUN).exists():
            down(str(run_yaml))
            _, record = open_run(str(run_yaml))
            shutil.rmtree(run_dir(record.run_id))
        shutil.rmtree(folder / "build", ignore_errors=True)
        (folder / "plot.png").unlink(missing_ok=True)
    except OSError as error:
        raise Stop(f"{error.filename or folder}: {error.strerror}") from None
    return run_yaml


def ensure_node_env(machine: ThisMachine, *, yes: bool) -> None:
    """Make or repair this machine's node environment if it has none that works, after asking. Raises Stop."""
    try:
        node_python()
        return
    except NoNodeEnvironment:
        folder, kind = node_env_folder(), kind_of(machine)
    try:
        refuse_unfit(folder, kind, machine)
        print_line(_announcement(kind, folder))
        require_terminal(yes)
        confirm("Install it?", yes=yes)
        with tempfile.TemporaryDirectory(prefix="grpo-orch-") as part:
            wheel = build_wheel(Path(part))
            package = f"grpo-orch[{kind.extra}] @ {wheel.as_uri()}"
            make(folder, kind, [package], wheel_digest(), machine)
    except NodeEnvFailed as error:
        raise Stop(str(error), exit_codes.FAILED) from None


def _announcement(kind: Kind, folder: Path) -> str:
    match state_of(folder, wheel_digest()):
        case State.HALF_MADE:
            return f"The nodes' environment in {folder} is unfinished; downloads that are complete are used."
        case State.OUTDATED:
            return f"The nodes' environment in {folder} is of another version of grpo-orch; it will be updated."
    disk = f"{'' if kind.is_disk_measured else 'an estimated '}{kind.disk_gb:.1f} GB of disk"
    size = f"{kind.download_gb:.1f} GB to download, {disk}"
    return f"The nodes on this machine need torch, TRL and vLLM, for {kind.machine}: {size}, in {folder}."
