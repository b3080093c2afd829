"""Restore the newest whole checkpoint from the store to the trainer's machine."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import structlog

from grpo_orch.checkpoint.store.codec import from_json, to_json
from grpo_orch.checkpoint.store.errors import Corrupt, NoIntactCheckpoint, NotFound
from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.checkpoint.stream import manifest, transfer
from grpo_orch.checkpoint.stream.catalog import Catalog, Checkpoint
from grpo_orch.checkpoint.stream.chunks import DamagedChunk, TransferLog, same
from grpo_orch.checkpoint.stream.manifest import Manifest
from grpo_orch.checkpoint.stream.transfer import is_weights
from grpo_orch.policies.model.timelines import on_lineage
from grpo_orch.policies.model.vocabulary import PolicyVersion
from grpo_orch.policies.serving.joining import CHECKPOINT, Stage
from grpo_orch.tasks.machine.leaving import LeaveNow, Leaving

log = structlog.get_logger()

# The first trainer process of a machine downloads the checkpoint, and passes the result to the others in a file. A
# collective would time out during a long download, and the processes have no process group yet.

NOTE = "restored-{attempt}-{launcher}.json"  # by launcher: a machine may start an attempt more than once
POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class Restored:
    """A checkpoint on this machine.

    `base_model` is the checkpoint's copy of the model that training started from; None if it has no copy, or if
    this machine already has the model.
    """

    at: PolicyVersion
    folder: Path
    base_model: Path | None


def restore_once(
    workdir: Path, attempt: int, restore: Callable[[], Restored | None] | None, leaving: Leaving
) -> Restored | None:
    """Restore in the first process; wait for its result in the others.

    Args:
        restore: None in all processes but the first.

    Raises LeaveNow if this process must end while it waits, and what `restore` raises.
    """
    path = workdir / NOTE.format(attempt=attempt, launcher=os.getppid())
    if restore is not None:
        for older in workdir.glob(NOTE.format(attempt="*", launcher="*")):
            older.unlink()
        restored = restore()
        part = path.with_suffix(".part")
        known = () if restored is None else (restored.at, restored.folder, restored.base_model or "")
        part.write_bytes(to_json([str(value) for value in known]))
        part.rename(path)
        return restored
    while not path.exists():
        if leaving.is_stop_requested:  # for example if the first process failed: the launcher then ends all
            raise LeaveNow
        time.sleep(POLL_S)
    note = from_json(path.read_bytes(), list[str], str(path))
    if not note:
        return None
    at, at_folder, base_model = note
    return Restored(PolicyVersion.parse(at), Path(at_folder), Path(base_model) if base_model else None)


BASE_MODEL = "base_model"  # folder in a checkpoint: the model that training started from, if still needed
DAMAGE_KINDS_SHOWN_MAX = 3


def restore_newest(
    store: Store,
    lineage: Sequence[PolicyVersion | int],
    folder: Path,
    local_model: Path | None,
    report: Callable[[Stage], None] = lambda _: None,
) -> Restored | None:
    """Fetch the newest whole checkpoint of a lineage to `folder/checkpoint-STEP`, skipping damaged ones.

    Args:
        lineage: from `policies.model.timelines.lineage`.
        local_model: this machine's folder of the model; files it has are not fetched.
        report: called with the progress.

    Returns None if the lineage has no checkpoint yet. Raises NoIntactCheckpoint if all are damaged, or if the
    checkpoint that the timeline continues from is missing; StoreError, OSError.
    """
    catalog = Catalog(store, "restore")
    errors: dict[str, str] = {}  # by manifest
    while True:
        # Read again each time: an uploader may have replaced all listed checkpoints with newer ones.
        listed = [checkpoint for checkpoint in catalog.newest().checkpoints if on_lineage(checkpoint.at, lineage)]
        usable = [checkpoint for checkpoint in listed if checkpoint.manifest not in errors]
        if not usable:
            break
        checkpoint = usable[-1]
        try:
            return _restore(store, checkpoint, folder, local_model, report)
        except (Corrupt, NotFound) as error:
            log.warning("checkpoint_unusable", checkpoint=checkpoint.version, error=str(error))
            errors[checkpoint.manifest] = str(error)
            if isinstance(error, DamagedChunk):
                catalog.suspect(time.time(), error.chunk)
    if listed:
        damage = [(checkpoint.version, errors[checkpoint.manifest]) for checkpoint in listed]
        raise NoIntactCheckpoint(_describe_damage(damage), _REPAIR)
    parents = [str(stretch) for stretch in lineage if isinstance(stretch, PolicyVersion)]
    if parents:
        raise NoIntactCheckpoint(
            f"the timeline continues from {parents[0]}, and the store has neither it nor an older checkpoint",
            _REPAIR,
        )
    return None


def restore_weights(
    store: Store,
    checkpoint: Checkpoint,
    folder: Path,
    local_model: Path | None,
    report: Callable[[Stage], None] = lambda _: None,
) -> Restored:
    """Fetch one checkpoint's model without its optimizer, like `restore_newest`.

    Raises NotFound, Corrupt, StoreError, OSError.
    """
    return _restore(store, checkpoint, folder, local_model, report, is_weights)


_REPAIR = (
    "restore the objects from a copy of the store or from the bucket's older versions and run `grpo-orch resume`; "
    "`grpo-orch checkpoints verify` lists the damage"
)


def _describe_damage(damage: Sequence[tuple[str, str]]) -> str:
    """Describe damaged versions, newest first, grouped by error."""
    by_error: dict[str, list[str]] = {}
    for version, error in reversed(damage):
        by_error.setdefault(error, []).append(version)
    kinds = [f"{', '.join(versions)}: {error}" for error, versions in by_error.items()]
    hidden = len(kinds) - DAMAGE_KINDS_SHOWN_MAX
    more = f"; and {hidden} more" if hidden > 0 else ""
    return f"none of the run's checkpoints can be restored: {'; '.join(kinds[:DAMAGE_KINDS_SHOWN_MAX])}{more}"


def _restore(
    store: Store,
    checkpoint: Checkpoint,
    folder: Path,
    local_model: Path | None,
    report: Callable[[Stage], None],
    is_needed: Callable[[str], bool] = lambda _: True,
) -> Restored:
    target = folder / f"checkpoint-{checkpoint.at.step}"
    if folder.exists():  # keep only the partial files of this checkpoint's previous attempt
        for other in folder.iterdir():
            if other.name != f".{target.name}.part":
                shutil.rmtree(other)
    found = transfer.read_manifest(store, checkpoint)
    has_base_model = _has_base_model(found, local_model)
    needed = [file for file in found.files if is_needed(file.name)]
    wanted = [file for file in needed if not (has_base_model and file.name.startswith(f"{BASE_MODEL}/"))]
    progress = TransferLog(CHECKPOINT, sum(file.size_bytes for file in wanted), report)
    manifest.materialize(store, found.root, wanted, target, progress.add)
    log.info("checkpoint_restored", checkpoint=checkpoint.version)
    base_model = target / BASE_MODEL
    return Restored(checkpoint.at, target, base_model if base_model.exists() else None)


def _has_base_model(found: Manifest, local_model: Path | None) -> bool:
    """Return whether this machine has identical copies of all files of the checkpoint's base model."""
    files = [file for file in found.files if file.name.startswith(f"{BASE_MODEL}/")]
    return local_model is not None and all(
        same(file, local_model / file.name.removeprefix(f"{BASE_MODEL}/")) for file in files
    )
