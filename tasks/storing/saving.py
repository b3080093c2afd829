"""The trainer's checkpoints: out of its way through the spool, and the newest whole one back from the store."""

from __future__ import annotations

import platform
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import structlog

from checkpoint.records import resume_state
from checkpoint.records.documents import RunRecord
from checkpoint.records.resume_state import ResumeState
from checkpoint.store.codec import to_json
from checkpoint.store.errors import Corrupt, NotFound, NothingWhole, StoreUnavailable
from checkpoint.store.run_store import Store
from checkpoint.stream import manifest, transfer
from checkpoint.stream.catalog import Catalog, Checkpoint
from checkpoint.stream.chunks import DamagedChunk, same
from checkpoint.stream.manifest import Manifest
from checkpoint.stream.spool import Seal, Spool
from policies.ledger.retention import keep_before, keep_since
from policies.model.timelines import on_lineage
from policies.model.vocabulary import PolicyVersion
from tasks.machine.spooling import NoRoom
from tasks.machine.transfer_log import TransferLog
from tasks.storing.heartbeat import Heartbeat

log = structlog.get_logger()

PACKAGES = ("torch", "transformers", "trl", "peft", "accelerate", "datasets", "numpy", "safetensors", "grpo-orch")
BASE_MODEL = "base_model"  # folder of a checkpoint: the model that training began from, where it is still needed
RUN_FILE = "run.json"
RESUME_FILE = "resume_state.json"
LOOK_S = 0.2  # between looks for what the uploader has done
TOLD = 3  # kinds of damage that are named
STUCK_S = 600.0  # an uploader that gets nothing done for so long is not waited for


class Checkpoints:
    """Where a trainer's checkpoints go. Used by the first process of a trainer alone.

    Args:
        spool: this machine's.
        heartbeat: tells how far the store is behind.
        record: the run's.
        timeline: of this trainer.
        meta: kept with each manifest.
        frozen: files that belong to each checkpoint and do not change, path by name.
        max_behind_steps: the trainer waits for room once the newest stored checkpoint is so old.
        history: returns the resume state as of now.
    """

    def __init__(
        self,
        spool: Spool,
        heartbeat: Heartbeat,
        record: RunRecord,
        timeline: int,
        *,
        meta: dict[str, str],
        frozen: dict[str, Path],
        max_behind_steps: int,
        history: Callable[[int], ResumeState],
    ) -> None:
        self._spool = spool
        self._heartbeat = heartbeat
        self._record = record
        self._timeline = timeline
        self._meta = {**package_versions(), **meta}
        self._frozen = {name: str(path) for name, path in frozen.items()}
        self._max_behind_steps = max_behind_steps
        self._history = history
        self._stored_step = 0
        self._sealed_step = 0
        self._logging_steps = 1

    def begin_from(self, step: int, logging_steps: int) -> None:
        """Name the step of the checkpoint that training goes on from, and how often is logged from there."""
        self._stored_step = self._sealed_step = step
        self._logging_steps = logging_steps

    @property
    def sealed_step(self) -> int:
        """The step of the newest checkpoint that is in the store or on its way there."""
        return self._sealed_step

    def store_s(self) -> float | None:
        """What storing the last one has taken; None before the first."""
        return self._spool.reported().took_s

    def stored_step(self) -> int:
        """The step of the newest checkpoint that the store is known to have."""
        stored = self._spool.reported().stored
        if stored is not None and (at := PolicyVersion.parse(stored)).timeline == self._timeline:
            self._stored_step = max(self._stored_step, at.step)
        return self._stored_step

    def open(self, step: int, *, last: bool) -> Path | None:
        """Return the folder to save the checkpoint of `step` into; None while there is no room for it.

        Waits for room for the last one, and once the store is `max_behind_steps` behind. Raises Fenced.
        """
        self._heartbeat.check()
        slot = self._spool.claim(step)
        if slot is None and (last or step - self.stored_step() >= self._max_behind_steps):
            log.warning("waiting_for_the_store", step=step, stored_step=self.stored_step())
            self._heartbeat.say("storing", store_slow=True)
            while (slot := self._spool.claim(step)) is None:
                self._heartbeat.wait(LOOK_S)
            self._heartbeat.say("training")
        if slot is None:
            log.warning("checkpoint_put_off", step=step, stored_step=self.stored_step())
        self._heartbeat.say(store_slow=slot is None)
        return slot

    def seal(self, step: int, slot: Path) -> None:
        """Hand a written checkpoint to the uploader. Raises OSError, for want of room too."""
        history = self._history(step)
        (slot / RESUME_FILE).write_bytes(to_json(history))
        (slot / RUN_FILE).write_bytes(to_json(self._record))
        before = keep_before(step, history.detector.verdict, self._logging_steps)
        since = keep_since(step, self._logging_steps)
        at = str(PolicyVersion(self._timeline, step))
        self._spool.seal(slot, Seal(at, time.time(), self._meta, self._frozen, before, since))
        self._sealed_step = step

    def give_up(self, slot: Path) -> None:
        """Take back a checkpoint for which there was no room after all: it is due again when another is stored.

        Raises NoRoom where no other is on its way to the store.
        """
        log.warning("spool_full", spool=str(self._spool.folder))
        if not self._spool.give_up(slot):
            raise NoRoom(
                f"checkpoints.spool: {self._spool.folder} has no room for one checkpoint; free some space, "
                f"or name another folder in `spool`"
            )


def drain(spool: Spool, heartbeat: Heartbeat) -> None:
    """Wait until the uploader has stored all that was sealed.

    Raises StoreUnavailable when it gets nothing done for STUCK_S, Fenced.
    """
    heard, since_s, told = spool.reported(), time.monotonic(), TransferLog("storing")
    while waiting := spool.sealed():
        if spool.reported() != heard:
            heard, since_s = spool.reported(), time.monotonic()
            told.at(heard.done_bytes, heard.total_bytes)
        if time.monotonic() - since_s > STUCK_S:
            what = ", ".join(seal.version for seal, _ in waiting)
            raise StoreUnavailable(
                f"checkpoints {what} wait in {spool.folder} for {STUCK_S:.0f} s",
                heard.error or "is the uploader up?",
            )
        heartbeat.wait(LOOK_S)


@dataclass(frozen=True, slots=True)
class Restored:
    """A checkpoint on this machine. `base_model` is its copy of the model that training began from, if it has one
    and this machine does not have the same."""

    at: PolicyVersion
    folder: Path
    base_model: Path | None


def restore_newest(
    store: Store, line: Sequence[PolicyVersion | int], folder: Path, local_model: Path | None
) -> Restored | None:
    """Fetch the newest checkpoint of a timeline's line that is whole, to `folder/checkpoint-STEP`.

    Args:
        line: what `policies.model.timelines.lineage` says of the timeline.
        local_model: this machine's folder of the model; what it has is not fetched again.

    One that is damaged is passed over for the next older one. Returns None where the line has no checkpoint yet.
    Raises NothingWhole where it has some and all are damaged, or where it goes on from one that is not there;
    StoreError when the store fails, OSError.
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
            return _restore(store, checkpoint, folder, local_model)
        except (Corrupt, NotFound) as error:
            log.warning("checkpoint_unusable", checkpoint=checkpoint.version, error=str(error), next="another one")
            unusable[checkpoint.manifest] = str(error)
            if isinstance(error, DamagedChunk):
                catalog.suspect(time.time(), error.chunk)
    if listed:
        raise NothingWhole(_all_damaged([(one.version, unusable[one.manifest]) for one in listed]), _MEND)
    begun_from = [str(stretch) for stretch in line if isinstance(stretch, PolicyVersion)]
    if begun_from:
        raise NothingWhole(
            f"the timeline goes on from {begun_from[0]}, and neither it nor an older one is there", _MEND
        )
    return None


_MEND = (
    "put the objects back, from a copy of the store or from the bucket's older versions, and `grpo-orch resume`; "
    "`grpo-orch checkpoints verify` names what is damaged"
)


def _all_damaged(damage: Sequence[tuple[str, str]]) -> str:
    """In words, the newest first, those with the same damage together; `checkpoints verify` tells the rest."""
    by_damage: dict[str, list[str]] = {}
    for at, why in reversed(damage):
        by_damage.setdefault(why, []).append(at)
    told = [f"{', '.join(ats)}: {why}" for why, ats in by_damage.items()]
    more = f"; and {len(told) - TOLD} more" if len(told) > TOLD else ""
    return f"none of the run's checkpoints can be restored: {'; '.join(told[:TOLD])}{more}"


def _restore(store: Store, checkpoint: Checkpoint, folder: Path, local_model: Path | None) -> Restored:
    target = folder / f"checkpoint-{checkpoint.at.step}"
    if folder.exists():  # one whole checkpoint at a time, and what is left of this one's last try
        for other in folder.iterdir():
            if other.name != f".{target.name}.part":
                shutil.rmtree(other)
    found = transfer.read_manifest(store, checkpoint)
    own = _has_base_model(found, local_model)
    wanted = [file for file in found.files if not (own and file.name.startswith(f"{BASE_MODEL}/"))]
    told = TransferLog("restoring", total_bytes=sum(file.size_bytes for file in wanted))
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


def package_versions() -> dict[str, str]:
    """The versions that a checkpoint was made with, by package."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def read_history(checkpoint: Path) -> ResumeState:
    """The resume state that a restored checkpoint holds. Raises Corrupt."""
    return resume_state.decode((checkpoint / RESUME_FILE).read_bytes(), str(checkpoint / RESUME_FILE))
