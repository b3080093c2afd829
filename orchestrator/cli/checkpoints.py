"""Commands for the checkpoints of a run: ls, pin, unpin, verify, export."""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import progress as bars
from rich.console import RenderableType

from grpo_orch.checkpoint.records import documents
from grpo_orch.checkpoint.records.documents import read_forks
from grpo_orch.checkpoint.store.document import UnreadableDocuments
from grpo_orch.checkpoint.store.errors import NotFound
from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.checkpoint.stream import manifest
from grpo_orch.checkpoint.stream.catalog import Catalog, Checkpoint
from grpo_orch.checkpoint.stream.chunks import Progress
from grpo_orch.checkpoint.stream.transfer import read_manifest
from grpo_orch.checkpoint.stream.transfer import verify as read_all
from grpo_orch.orchestrator.cli.options import (
    AsJson,
    Output,
    Stop,
    Target,
    errors,
    print_json,
    print_line,
    print_result,
)
from grpo_orch.orchestrator.cli.target import open_run
from grpo_orch.orchestrator.views.formatting import UNKNOWN_TEXT, data_size, duration, keep_reasons, plain_table
from grpo_orch.orchestrator.views.run_view import RunObserver
from grpo_orch.policies.model import exit_codes
from grpo_orch.policies.model.vocabulary import PolicyVersion

NEWEST = "latest"
EXPECTED = f"expected TIMELINE-STEP as in 0-120, a step, or `{NEWEST}`"
_VERSION = re.compile(rf"(\d+-)?\d+|{NEWEST}")

app = typer.Typer(name="checkpoints", help="List, pin, verify and export checkpoints.", no_args_is_help=True)
Version = Annotated[
    str, typer.Argument(help=f"TIMELINE-STEP as in 0-120, a step (of the newest timeline), or `{NEWEST}`.")
]


@app.command()
def ls(target: Target = None, output: AsJson = Output.TEXT) -> None:
    """List the checkpoints in the store, oldest first, with every reason why they are kept."""
    store, record = open_run(target)
    listed = _catalog(store).newest().checkpoints
    beat = documents.TRAINER.read(store, UnreadableDocuments())
    reasons = keep_reasons(listed, record.spec, read_forks(store), beat)
    document = [{**_plain(checkpoint), "keep_reasons": reasons[checkpoint.at]} for checkpoint in listed]
    print_result(output, document, lambda: _table(store, listed, reasons) if listed else "no checkpoint yet")


def _table(
    store: Store, listed: Sequence[Checkpoint], reasons: Mapping[PolicyVersion, Sequence[str]]
) -> RenderableType:
    table = plain_table("version", "age", "size", "kept as")
    now_s = RunObserver(store).settle()
    for checkpoint in listed:
        age = duration(now_s - checkpoint.created_at_s)
        why = ", ".join(reasons[checkpoint.at]) or UNKNOWN_TEXT
        table.add_row(checkpoint.version, age, data_size(checkpoint.size_bytes), why)
    return table


@app.command()
def pin(version: Version, target: Target = None, output: AsJson = Output.TEXT) -> None:
    """Protect a checkpoint from retention until it is unpinned."""
    _pin(version, target, output, pinned=True)


@app.command()
def unpin(version: Version, target: Target = None, output: AsJson = Output.TEXT) -> None:
    """Let retention delete a checkpoint again."""
    _pin(version, target, output, pinned=False)


@app.command()
def verify(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="VERSION|RUN", help="Checkpoints (default: all), and the run's store or run.yaml."),
    ] = None,
    output: AsJson = Output.TEXT,
) -> None:
    """Read every byte of the checkpoints; exit code 1 if any is damaged."""
    versions, target = _versions_and_run(names or [])
    store, _ = open_run(target)
    catalog = _catalog(store)
    listed = catalog.newest().checkpoints
    texts = versions or [checkpoint.version for checkpoint in listed] or [NEWEST]
    damage_of: dict[Checkpoint, list[str]] = {}
    for checkpoint in dict.fromkeys(find_checkpoint(listed, text) for text in texts):
        version = checkpoint.version
        with _progress(f"reading {version}", checkpoint.size_bytes) as progress:
            damage = read_all(store, checkpoint, progress=progress)
        if damage and not _is_listed(catalog, checkpoint):
            line = f"{version} was retired in the meantime"
        else:
            damage_of[checkpoint] = damage
            intact = f"{version} is intact, {data_size(checkpoint.size_bytes)}"
            line = f"{version} is damaged: {'; '.join(damage)}" if damage else intact
        if output is Output.TEXT:
            print_line(line)
    if output is Output.JSON:
        print_json([{**_plain(checkpoint), "damage": damage} for checkpoint, damage in damage_of.items()])
    if damaged := [checkpoint.version for checkpoint, damage in damage_of.items() if damage]:
        raise Stop(f"damaged: {', '.join(damaged)}", exit_codes.FAILED)


@app.command()
def export(
    version: Version,
    folder: Annotated[Path, typer.Argument(help="A new folder. Files of an interrupted export are reused.")],
    target: Target = None,
    output: AsJson = Output.TEXT,
) -> None:
    """Write a checkpoint as a folder for from_pretrained and for TRL's resume_from_checkpoint."""
    store, _ = open_run(target)
    catalog = _catalog(store)
    checkpoint = find_checkpoint(catalog.newest().checkpoints, version)
    folder = folder.resolve()
    try:
        _refuse_used(folder)
        found = read_manifest(store, checkpoint)
        with _progress(f"exporting {checkpoint.version}", found.size_bytes) as progress:
            manifest.materialize(store, found.root, found.files, folder, progress)
    except OSError as error:
        raise Stop(f"{folder}: {error.strerror}") from None
    except NotFound:
        if _is_listed(catalog, checkpoint):
            raise
        hint = f"pin a checkpoint before you export it: `grpo-orch checkpoints pin VERSION {store.quoted}`"
        raise Stop(f"{checkpoint.version} was retired in the meantime; {hint}", exit_codes.FAILED) from None
    line = f"Wrote {checkpoint.version} to {folder}, {data_size(found.size_bytes)}"
    print_result(output, {**_plain(checkpoint), "folder": str(folder)}, line)


def _pin(version: str, target: str | None, output: Output, *, pinned: bool) -> None:
    store, _ = open_run(target)
    catalog = _catalog(store)
    at = find_checkpoint(catalog.newest().checkpoints, version).at
    checkpoint = catalog.pin(time.time(), at, pinned=pinned).find(at)
    print_result(output, _plain(checkpoint), f"{at} is {'pinned' if pinned else 'not pinned'}")


def _catalog(store: Store) -> Catalog:
    return Catalog(store, f"{socket.gethostname()}/{os.getpid()}")


def _is_listed(catalog: Catalog, checkpoint: Checkpoint) -> bool:
    return any(other.manifest == checkpoint.manifest for other in catalog.newest().checkpoints)


def find_checkpoint(listed: Sequence[Checkpoint], text: str) -> Checkpoint:
    """Return the checkpoint that `text` names; a bare step means the newest timeline that has it. Raises Stop."""
    if not _VERSION.fullmatch(text):
        raise Stop(f"{text!r} is not a checkpoint: {EXPECTED}")
    if not listed:
        raise Stop("the run has no checkpoint yet")
    for checkpoint in reversed(listed):
        if text in (NEWEST, checkpoint.version, str(checkpoint.at.step)):
            return checkpoint
    available = ", ".join(checkpoint.version for checkpoint in listed)
    raise Stop(f"no checkpoint {text}; available: {available}")


def _versions_and_run(names: Sequence[str]) -> tuple[list[str], str | None]:
    """Split the arguments into versions and the run. Raises Stop for two runs."""
    others = [name for name in names if not _VERSION.fullmatch(name)]
    if len(others) > 1:
        two = f"{others[0]!r} and {others[1]!r}"
        raise Stop(f"{two}: expected one run; for a version, {EXPECTED}")
    return [name for name in names if name not in others], others[0] if others else None


def _refuse_used(folder: Path) -> None:
    """Raise Stop unless the folder is new or empty. Raises OSError if it cannot be listed."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        state = "is not empty" if folder.is_dir() else "is a file"
        raise Stop(f"{folder} {state}; name a new folder")


def _plain(checkpoint: Checkpoint) -> dict[str, Any]:
    return {
        "version": checkpoint.version,
        "timeline": checkpoint.at.timeline,
        "step": checkpoint.at.step,
        "created_at_s": checkpoint.created_at_s,
        "size_bytes": checkpoint.size_bytes,
        "pinned": checkpoint.pinned,
    }


@contextmanager
def _progress(label: str, total_bytes: int) -> Iterator[Progress]:
    """Show a progress bar on stderr if it is a terminal."""
    bar = bars.Progress(
        bars.TextColumn("{task.description}"),
        bars.BarColumn(),
        bars.DownloadColumn(binary_units=True),
        bars.TransferSpeedColumn(),
        bars.TimeRemainingColumn(),
        console=errors,
        transient=True,
        redirect_stdout=False,  # stdout may be a file
        disable=not errors.is_terminal,
    )
    with bar:
        task = bar.add_task(label, total=total_bytes)
        yield lambda size_bytes: bar.advance(task, size_bytes)
