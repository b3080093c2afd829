"""The newest whole checkpoint, back from the store on to the trainer's machine."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import structlog

from checkpoint.store.codec import from_json, to_json
from checkpoint.store.errors import Corrupt, NotFound, NothingWhole
from checkpoint.store.run_store import Store
from checkpoint.stream import manifest, transfer
from checkpoint.stream.catalog import Catalog, Checkpoint
from checkpoint.stream.chunks import DamagedChunk, same
from checkpoint.stream.manifest import Manifest
from checkpoint.stream.transfer import is_weights
from policies.model.timelines import on_lineage
from policies.model.vocabulary import PolicyVersion
from policies.serving.joining import CHECKPOINT, Stage
from tasks.machine.leaving import LeaveNow, Leaving
from tasks.machine.transfer_log import TransferLog

log = structlog.get_logger()

# What the first of a machine's trainer processes has restored, told to the others: one download for all of them.
#
# By a file, not by a collective: fetching may take longer than any collective waits, and it comes before the
# others have a process group.

NOTE = "restored-{attempt}-{launcher}.json"  # of one start: a machine may be started with an attempt again
LOOK_S = 0.1


@dataclass(frozen=True, slots=True)
class Restored:
    """A checkpoint on this machine. `base_model` is its copy of the model that training began from; None where it
    has none, or this machine has the same."""

    at: PolicyVersion
    folder: Path
    base_model: Path | None


@dataclass(frozen=True, slots=True)
class _Note:
    at: str | None = None
    folder: str = ""
    base_model: str | None = None


def told_by_first(
    workdir: Path, attempt: int, restore: Callable[[], Restored | None] | None, leaving: Leaving
) -> Restored | None:
    """Restore and tell the others, in the first process; wait to be told, in the others.

    Args:
        restore: of the first process; None in the others.

    Raises LeaveNow in a process that is told to end while it waits, and what `restore` raises.
    """
    note = workdir / NOTE.format(attempt=attempt, launcher=os.getppid())
    if restore is not None:
        for older in workdir.glob(NOTE.format(attempt="*", launcher="*")):
            older.unlink()
        found = restore()
        part = note.with_suffix(".part")
        part.write_bytes(to_json(_noted(found)))
        part.rename(note)
        return found
    while not note.exists():
        if leaving.asked:  # as where the first one has failed: the launcher ends all
            raise LeaveNow
        time.sleep(LOOK_S)
    told = from_json(note.read_bytes(), _Note, str(note))
    base_model = None if told.base_model is None else Path(told.base_model)
    return None if told.at is None else Restored(PolicyVersion.parse(told.at), Path(told.folder), base_model)


def _noted(found: Restored | None) -> _Note:
    if found is None:
        return _Note()
    return _Note(str(found.at), str(found.folder), None if found.base_model is None else str(found.base_model))


BASE_MODEL = "base_model"  # folder of a checkpoint: the model that training began from, where it is still needed
DAMAGE_TOLD_MAX = 3  # kinds of it


def restore_newest(
    store: Store,
    line: Sequence[PolicyVersion | int],
    folder: Path,
    local_model: Path | None,
    say: Callable[[Stage], None] = lambda _: None,
) -> Restored | None:
    """Fetch the newest whole checkpoint of a timeline's line to `folder/checkpoint-STEP`.

    Args:
        line: what `policies.model.timelines.lineage` says of the timeline.
        local_model: this machine's folder of the model; what it has is not fetched again.
        say: told how far it is.

    A damaged one is passed over for the next older one. Returns None where the line has no checkpoint yet. Raises
    NothingWhole where all are damaged, or the one that the line goes on from is missing; StoreError, OSError.
    """
    catalog = Catalog(store, "restore")
    unusable: dict[str, str] = {}  # what is wrong, by manifest
    while True:
        # Read anew each time: an uploader elsewhere may have retired all that was listed, for newer ones.
        listed = [one for one in catalog.newest().checkpoints if on_lineage(one.at, line)]
        found = [one for one in listed if one.manifest not in unusable]
        if not found:
            break
        checkpoint = found[-1]
        try:
            return _restore(store, checkpoint, folder, local_model, say)
        except (Corrupt, NotFound) as error:
            log.warning("checkpoint_unusable", checkpoint=checkpoint.version, error=str(error), next="another one")
            unusable[checkpoint.manifest] = str(error)
            if isinstance(error, DamagedChunk):
                catalog.suspect(time.time(), error.chunk)
    if listed:
        raise NothingWhole(_all_damaged([(one.version, unusable[one.manifest]) for one in listed]), _REPAIR)
    begun_from = [str(stretch) for stretch in line if isinstance(stretch, PolicyVersion)]
    if begun_from:
        raise NothingWhole(
            f"the timeline goes on from {begun_from[0]}, and neither it nor an older one is there", _REPAIR
        )
    return None


def restore_weights(
    store: Store,
    checkpoint: Checkpoint,
    folder: Path,
    local_model: Path | None,
    say: Callable[[Stage], None] = lambda _: None,
) -> Restored:
    """Fetch what of one checkpoint a model is made of, as `restore_newest` does; no optimizer.

    Raises NotFound, Corrupt, StoreError, OSError.
    """
    return _restore(store, checkpoint, folder, local_model, say, is_weights)


_REPAIR = (
    "put the objects back, from a copy of the store or from the bucket's older versions, and `grpo-orch resume`; "
    "`grpo-orch checkpoints verify` names what is damaged"
)


def _all_damaged(damage: Sequence[tuple[str, str]]) -> str:
    """In words, the newest first, those with the same damage together; `checkpoints verify` tells the rest."""
    by_damage: dict[str, list[str]] = {}
    for at, why in reversed(damage):
        by_damage.setdefault(why, []).append(at)
    told = [f"{', '.join(ats)}: {why}" for why, ats in by_damage.items()]
    more = f"; and {len(told) - DAMAGE_TOLD_MAX} more" if len(told) > DAMAGE_TOLD_MAX else ""
    return f"none of the run's checkpoints can be restored: {'; '.join(told[:DAMAGE_TOLD_MAX])}{more}"


def _restore(
    store: Store,
    checkpoint: Checkpoint,
    folder: Path,
    local_model: Path | None,
    say: Callable[[Stage], None],
    needed: Callable[[str], bool] = lambda _: True,
) -> Restored:
    target = folder / f"checkpoint-{checkpoint.at.step}"
    if folder.exists():  # one whole checkpoint at a time, and what is left of this one's last try
        for other in folder.iterdir():
            if other.name != f".{target.name}.part":
                shutil.rmtree(other)
    found = transfer.read_manifest(store, checkpoint)
    own = _has_base_model(found, local_model)
    named = [file for file in found.files if needed(file.name)]
    wanted = [file for file in named if not (own and file.name.startswith(f"{BASE_MODEL}/"))]
    told = TransferLog(CHECKPOINT, sum(file.size_bytes for file in wanted), say)
    manifest.materialize(store, found.root, wanted, target, told.add)
    log.info("checkpoint_restored", checkpoint=checkpoint.version)
    base_model = target / BASE_MODEL
    return Restored(checkpoint.at, target, base_model if base_model.exists() else None)


def _has_base_model(found: Manifest, local_model: Path | None) -> bool:
    """Whether this machine has every file of the checkpoint's base model, byte for byte."""
    files = [file for file in found.files if file.name.startswith(f"{BASE_MODEL}/")]
    return local_model is not None and all(
        same(file, local_model / file.name.removeprefix(f"{BASE_MODEL}/")) for file in files
    )
