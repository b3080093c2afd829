"""The newest whole checkpoint, back from the store on to the trainer's machine."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import structlog

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
from tasks.machine.transfer_log import TransferLog
from tasks.storing.sharing import Restored

log = structlog.get_logger()

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
