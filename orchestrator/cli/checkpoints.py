"""Commands for a run's checkpoints: ls, pin, unpin, verify, export."""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import progress as bars
from rich.table import Table

from checkpoint.records import documents
from checkpoint.records.documents import read_forks
from checkpoint.store.document import Unreadable
from checkpoint.store.errors import NotFound
from checkpoint.store.run_store import Store
from checkpoint.stream import manifest
from checkpoint.stream.catalog import Catalog, Checkpoint
from checkpoint.stream.chunks import Progress
from checkpoint.stream.transfer import read_manifest
from checkpoint.stream.transfer import verify as read_all
from orchestrator.cli.options import AsJson, Output, Stop, Target, console, errors, print_json
from orchestrator.cli.target import open_run
from orchestrator.views.run_view import Looker
from orchestrator.views.words import NOT_KNOWN, data_size, duration, kept_as
from policies.model import exit_codes

NEWEST = "latest"
WANTED = f"expected TIMELINE-STEP as in 0-120, a step, or `{NEWEST}`"
_VERSION = re.compile(rf"(\d+-)?\d+|{NEWEST}")

app = typer.Typer(name="checkpoints", help="List, keep, check and take out checkpoints.", no_args_is_help=True)
Version = Annotated[
    str, typer.Argument(help=f"TIMELINE-STEP as in 0-120, a step (of the newest timeline), or `{NEWEST}`.")
]


@app.command()
def ls(target: Target = None, output: AsJson = Output.TEXT) -> None:
    """List the checkpoints that the store has, oldest first."""
    store, record = open_run(target)
    listed = _catalog(store).newest().checkpoints
    beat = documents.TRAINER.read(store, Unreadable())
    reasons = kept_as(listed, record.spec, read_forks(store), beat)
    if output is Output.JSON:
        print_json([{**_plain(one), "kept_as": reasons[one.at]} for one in listed])
        return
    if not listed:
        console.print("no checkpoint yet")
        return
    table = Table(box=None, pad_edge=False, header_style="dim")
    for title in ("version", "age", "size"):
        table.add_column(title, no_wrap=True)
    table.add_column("kept as")
    now_s = Looker(store).settle()
    for one in listed:
        age = duration(now_s - one.created_at_s)
        why = ", ".join(reasons[one.at]) or NOT_KNOWN
        table.add_row(one.version, age, data_size(one.size_bytes), why)
    console.print(table, highlight=False)


@app.command()
def pin(version: Version, target: Target = None, output: AsJson = Output.TEXT) -> None:
    """Keep a checkpoint until it is unpinned, whatever the retention says."""
    _pin(version, target, output, pinned=True)


@app.command()
def unpin(version: Version, target: Target = None, output: AsJson = Output.TEXT) -> None:
    """Leave a checkpoint to the retention again."""
    _pin(version, target, output, pinned=False)


@app.command()
def verify(
    what: Annotated[
        list[str] | None,
        typer.Argument(metavar="VERSION|RUN", help="Which checkpoints, default: all; and whose, as elsewhere."),
    ] = None,
    output: AsJson = Output.TEXT,
) -> None:
    """Read every byte of checkpoints; exit code 1 if any is damaged."""
    versions, target = _versions_and_run(what or [])
    store, _ = open_run(target)
    catalog = _catalog(store)
    listed = catalog.newest().checkpoints
    wanted = [find_checkpoint(listed, text) for text in versions or [one.version for one in listed] or [NEWEST]]
    found: dict[Checkpoint, list[str]] = {}
    for one in dict.fromkeys(wanted):
        with _progress(f"reading {one.version}", one.size_bytes) as progress:
            damage = read_all(store, one, progress=progress)
        if damage and not _is_listed(catalog, one):
            told = f"{one.version} was retired meanwhile"
        else:
            found[one] = damage
            whole = f"{one.version} is whole, {data_size(one.size_bytes)}"
            told = f"{one.version} is damaged: {'; '.join(damage)}" if damage else whole
        if output is Output.TEXT:
            console.print(told, highlight=False, soft_wrap=True)
    if output is Output.JSON:
        print_json([{**_plain(one), "damage": damage} for one, damage in found.items()])
    if damaged := [one.version for one, damage in found.items() if damage]:
        raise Stop(f"damaged: {', '.join(damaged)}", exit_codes.FAILED)


@app.command()
def export(
    version: Version,
    folder: Annotated[Path, typer.Argument(help="A new folder; what a killed export left beside it is reused.")],
    target: Target = None,
    output: AsJson = Output.TEXT,
) -> None:
    """Write a checkpoint as a folder for from_pretrained and for TRL's resume_from_checkpoint."""
    store, _ = open_run(target)
    catalog = _catalog(store)
    one = find_checkpoint(catalog.newest().checkpoints, version)
    folder = folder.resolve()
    try:
        _refuse_used(folder)
        found = read_manifest(store, one)
        with _progress(f"exporting {one.version}", found.size_bytes) as progress:
            manifest.materialize(store, found.root, found.files, folder, progress)
    except OSError as error:
        raise Stop(f"{folder}: {error.strerror}", exit_codes.USAGE) from None
    except NotFound:
        if _is_listed(catalog, one):
            raise
        hint = f"keep one before it is exported with `grpo-orch checkpoints pin VERSION {store.quoted}`"
        raise Stop(f"{one.version} was retired meanwhile; {hint}", exit_codes.FAILED) from None
    if output is Output.JSON:
        print_json({**_plain(one), "folder": str(folder)})
    else:
        told = f"Wrote {one.version} to {folder}, {data_size(found.size_bytes)}"
        console.print(told, highlight=False, soft_wrap=True)


def _pin(version: str, target: str | None, output: Output, *, pinned: bool) -> None:
    store, _ = open_run(target)
    catalog = _catalog(store)
    at = find_checkpoint(catalog.newest().checkpoints, version).at
    one = catalog.pin(time.time(), at, pinned=pinned).find(at)
    if output is Output.JSON:
        print_json(_plain(one))
    else:
        console.print(f"{at} is {'pinned' if pinned else 'not pinned'}", highlight=False)


def _catalog(store: Store) -> Catalog:
    return Catalog(store, f"{socket.gethostname()}/{os.getpid()}")


def _is_listed(catalog: Catalog, one: Checkpoint) -> bool:
    return any(other.manifest == one.manifest for other in catalog.newest().checkpoints)


def find_checkpoint(listed: Sequence[Checkpoint], text: str) -> Checkpoint:
    """The checkpoint that `text` names; a step is that of the newest timeline which has it. Raises Stop."""
    if not _VERSION.fullmatch(text):
        raise Stop(f"{text!r} names no checkpoint: {WANTED}", exit_codes.USAGE)
    if not listed:
        raise Stop("the run has no checkpoint yet", exit_codes.USAGE)
    for one in reversed(listed):
        if text in (NEWEST, one.version, str(one.at.step)):
            return one
    there = ", ".join(one.version for one in listed)
    raise Stop(f"no checkpoint {text}; there are: {there}", exit_codes.USAGE)


def _versions_and_run(words: Sequence[str]) -> tuple[list[str], str | None]:
    """Tell versions from the run, which is what does not look like one. Raises Stop for two runs."""
    others = [word for word in words if not _VERSION.fullmatch(word)]
    if len(others) > 1:
        two = f"{others[0]!r} and {others[1]!r}"
        raise Stop(f"{two}: one run at a time; for a version, {WANTED}", exit_codes.USAGE)
    return [word for word in words if word not in others], others[0] if others else None


def _refuse_used(folder: Path) -> None:
    """Raise Stop unless the folder is new or empty. Raises OSError where it cannot be looked into."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        what = "is not empty" if folder.is_dir() else "is a file"
        raise Stop(f"{folder} {what}; name a new folder", exit_codes.USAGE)


def _plain(one: Checkpoint) -> dict[str, Any]:
    return {
        "version": one.version,
        "timeline": one.at.timeline,
        "step": one.at.step,
        "created_at_s": one.created_at_s,
        "size_bytes": one.size_bytes,
        "pinned": one.pinned,
    }


@contextmanager
def _progress(what: str, total_bytes: int) -> Iterator[Progress]:
    """A bar of bytes on stderr, on a terminal only."""
    bar = bars.Progress(
        bars.TextColumn("{task.description}"),
        bars.BarColumn(),
        bars.DownloadColumn(binary_units=True),
        bars.TransferSpeedColumn(),
        bars.TimeRemainingColumn(),
        console=errors,
        transient=True,
        redirect_stdout=False,  # which may be a file, and must not come out on stderr
        disable=not errors.is_terminal,
    )
    with bar:
        task = bar.add_task(what, total=total_bytes)
        yield lambda size_bytes: bar.advance(task, size_bytes)
