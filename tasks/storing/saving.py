"""The trainer's checkpoints, out of its way: into the spool, from which the uploader stores them."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import structlog

from checkpoint.records.documents import RunRecord
from checkpoint.store.codec import from_json, to_json
from checkpoint.store.errors import StoreUnavailable
from checkpoint.stream.spool import Seal, Spool, UploaderState
from policies.detect.divergence import Detector
from policies.ledger.retention import keep_before, keep_since
from policies.model.vocabulary import PolicyVersion
from policies.serving.joining import Stage
from tasks.machine.spooling import NoRoom
from tasks.machine.transfer_log import TransferLog
from tasks.storing.heartbeat import Heartbeat

log = structlog.get_logger()

PACKAGES = ("torch", "transformers", "trl", "peft", "accelerate", "datasets", "numpy", "safetensors", "grpo-orch")
RUN_FILE = "run.json"
DETECTOR_FILE = "detector.json"  # what the divergence detector knows: a restart goes on with it
LOOK_S = 0.2  # between looks for what the uploader has done
STUCK_S = 600.0  # an uploader that gets nothing done for so long is not waited for


class CheckpointSaver:
    """Where a trainer's checkpoints go. Only its first process has one.

    Args:
        spool: this machine's.
        heartbeat: tells whether the store is slow.
        record: the run's.
        timeline: of this trainer.
        meta: kept with each manifest.
        frozen: files that belong to each checkpoint and do not change, path by name.
        max_behind_steps: the trainer waits for room once the newest stored checkpoint is so many steps old.
        detector: returns what the guard's detector knows now.
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
        detector: Callable[[], Detector],
    ) -> None:
        self._spool = spool
        self._heartbeat = heartbeat
        self._record = record
        self._timeline = timeline
        self._meta = {**package_versions(), **meta}
        self._frozen = {name: str(path) for name, path in frozen.items()}
        self._max_behind_steps = max_behind_steps
        self._detector = detector
        self._stored_step = 0
        self._sealed_step = 0
        self._logging_steps = 1

    def begin_from(self, step: int, logging_steps: int) -> None:
        """Name the step of the checkpoint that training goes on from, and how many steps a logged row spans."""
        self._stored_step = self._sealed_step = step
        self._logging_steps = logging_steps

    @property
    def sealed_step(self) -> int:
        """The step of the newest checkpoint that is in the store or on its way there."""
        return self._sealed_step

    def last_store_s(self) -> float | None:
        """How long storing the last one took; None before the first."""
        return self._spool.reported().took_s

    def stored_step(self) -> int:
        """The step of the newest checkpoint that the store is known to have."""
        stored = self._spool.reported().stored
        if stored is not None and (at := PolicyVersion.parse(stored)).timeline == self._timeline:
            self._stored_step = max(self._stored_step, at.step)
        return self._stored_step

    def open(self, step: int, *, last: bool) -> Path | None:
        """Return the folder to save the checkpoint of `step` into; None while there is no room for it.

        Waits for room for the last one, and once the newest stored one is `max_behind_steps` old. Raises Fenced.
        """
        self._heartbeat.check()
        slot = self._spool.claim(step)
        if slot is None and (last or step - self.stored_step() >= self._max_behind_steps):
            log.warning("waiting_for_the_store", step=step, stored_step=self.stored_step())
            self._heartbeat.say("storing", store_slow=True)
            while (slot := self._spool.claim(step)) is None:
                _say_how_far(self._heartbeat, self._spool.reported())
                self._heartbeat.wait(LOOK_S)
            self._heartbeat.say("training")
        if slot is None:
            log.warning("checkpoint_put_off", step=step, stored_step=self.stored_step())
        self._heartbeat.say(store_slow=slot is None)
        return slot

    def seal(self, step: int, slot: Path) -> None:
        """Hand a written checkpoint to the uploader. Raises OSError, for want of room too."""
        detector = self._detector()
        (slot / DETECTOR_FILE).write_bytes(to_json(detector))
        (slot / RUN_FILE).write_bytes(to_json(self._record))
        before = keep_before(step, detector.verdict, self._logging_steps)
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


def wait_until_stored(spool: Spool, heartbeat: Heartbeat) -> None:
    """Wait until the uploader has stored all that was sealed.

    Raises StoreUnavailable when it gets nothing done for STUCK_S, Fenced.
    """
    heard, since_s, told = spool.reported(), time.monotonic(), TransferLog("storing")
    while waiting := spool.sealed():
        if spool.reported() != heard:
            heard, since_s = spool.reported(), time.monotonic()
            told.at(heard.done_bytes, heard.total_bytes)
            _say_how_far(heartbeat, heard)
        if time.monotonic() - since_s > STUCK_S:
            what = ", ".join(seal.version for seal, _ in waiting)
            raise StoreUnavailable(
                f"checkpoints {what} wait in {spool.folder} for {STUCK_S:.0f} s",
                heard.error or "is the uploader up?",
            )
        heartbeat.wait(LOOK_S)


def _say_how_far(heartbeat: Heartbeat, upload: UploaderState) -> None:
    """As long as it gets on, it is waited for: one that begins again has first to come as far as it was."""
    if upload.storing is not None:
        stage = Stage(f"storing checkpoint {upload.storing}", upload.done_bytes, upload.total_bytes)
        heartbeat.say(stage=stage)


def package_versions() -> dict[str, str]:
    """The versions that a checkpoint was made with, by package."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def read_detector(checkpoint: Path) -> Detector:
    """What the detector knew at a restored checkpoint. Raises Corrupt."""
    path = checkpoint / DETECTOR_FILE
    return from_json(path.read_bytes(), Detector, str(path))
