"""Save the trainer's checkpoints to the spool, from which the uploader stores them in the background."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import structlog

from grpo_orch.checkpoint.records.documents import RunRecord
from grpo_orch.checkpoint.store.codec import from_json, to_json
from grpo_orch.checkpoint.store.errors import StoreUnavailable
from grpo_orch.checkpoint.stream.chunks import TransferLog
from grpo_orch.checkpoint.stream.spool import Seal, Spool, UploaderState
from grpo_orch.policies.detect.divergence import Detector
from grpo_orch.policies.ledger.retention import keep_before, keep_since
from grpo_orch.policies.model.vocabulary import PolicyVersion
from grpo_orch.policies.serving.joining import Stage
from grpo_orch.tasks.machine.spooling import SpoolFull
from grpo_orch.tasks.storing.heartbeat import Heartbeat

log = structlog.get_logger()

RUN_FILE = "run.json"
DETECTOR_FILE = "detector.json"  # state of the divergence detector, for a restart
POLL_S = 0.2  # between checks of the uploader's progress
STUCK_S = 600.0  # stop waiting for an uploader without progress for this long


class CheckpointSaver:
    """Saves a trainer's checkpoints. Only the trainer's first process has one.

    Args:
        spool: this machine's spool.
        heartbeat: records whether the store is slow.
        record: the run's record.
        timeline: of this trainer.
        frozen: unchanging files that belong to each checkpoint, path by name.
        max_behind_steps: the trainer waits for space once the newest stored checkpoint is this many steps old.
        detector: returns the current state of the divergence detector.
    """

    def __init__(
        self,
        spool: Spool,
        heartbeat: Heartbeat,
        record: RunRecord,
        timeline: int,
        *,
        frozen: dict[str, Path],
        max_behind_steps: int,
        detector: Callable[[], Detector],
    ) -> None:
        self._spool = spool
        self._heartbeat = heartbeat
        self._record = record
        self._timeline = timeline
        self._frozen = {name: str(path) for name, path in frozen.items()}
        self._max_behind_steps = max_behind_steps
        self._detector = detector
        self._stored_step = 0
        self._sealed_step = 0
        self._logging_steps = 1

    def start_from(self, step: int, logging_steps: int) -> None:
        """Set the step of the checkpoint that training starts from, and the number of steps per logged row."""
        self._stored_step = self._sealed_step = step
        self._logging_steps = logging_steps

    @property
    def sealed_step(self) -> int:
        """The step of the newest checkpoint that is stored or waiting to be stored."""
        return self._sealed_step

    def last_store_s(self) -> float | None:
        """Return how long storing the last checkpoint took; None before the first."""
        return self._spool.reported().took_s

    def stored_step(self) -> int:
        """Return the step of the newest checkpoint known to be stored."""
        stored = self._spool.reported().stored
        if stored is not None and (at := PolicyVersion.parse(stored)).timeline == self._timeline:
            self._stored_step = max(self._stored_step, at.step)
        return self._stored_step

    def claim_slot(self, step: int, *, last: bool) -> Path | None:
        """Return the folder to save the checkpoint of `step` into; None while the spool is full.

        Waits for space for the last checkpoint, and once the newest stored one is `max_behind_steps` old. Raises
        Fenced.
        """
        self._heartbeat.check()
        slot = self._spool.claim(step)
        if slot is None and (last or step - self.stored_step() >= self._max_behind_steps):
            log.warning("waiting_for_the_store", step=step, stored_step=self.stored_step())
            self._heartbeat.update("storing", store_slow=True)
            while (slot := self._spool.claim(step)) is None:
                _report_progress(self._heartbeat, self._spool.reported())
                self._heartbeat.wait(POLL_S)
            self._heartbeat.update("training")
        if slot is None:
            log.warning("checkpoint_skipped", step=step, stored_step=self.stored_step())
        self._heartbeat.update(store_slow=slot is None)
        return slot

    def seal(self, step: int, slot: Path) -> None:
        """Hand a written checkpoint to the uploader. Raises OSError, also if the disk is full."""
        detector = self._detector()
        (slot / DETECTOR_FILE).write_bytes(to_json(detector))
        (slot / RUN_FILE).write_bytes(to_json(self._record))
        before = keep_before(step, detector.verdict, self._logging_steps)
        since = keep_since(step, self._logging_steps)
        at = str(PolicyVersion(self._timeline, step))
        self._spool.seal(slot, Seal(at, time.time(), self._frozen, before, since))
        self._sealed_step = step

    def discard(self, slot: Path) -> None:
        """Discard a checkpoint that did not fit into the spool; it is retried once another one is stored.

        Raises SpoolFull if no other checkpoint is waiting to be stored.
        """
        log.warning("spool_full", spool=str(self._spool.folder))
        if not self._spool.discard(slot):
            raise SpoolFull(
                f"checkpoints.spool: {self._spool.folder} has no space for a checkpoint; free some space, "
                f"or set `spool` to another folder"
            )


def wait_until_stored(spool: Spool, heartbeat: Heartbeat) -> None:
    """Wait until the uploader has stored all sealed checkpoints.

    Raises StoreUnavailable if it makes no progress for STUCK_S, Fenced.
    """
    upload, since_s, progress = spool.reported(), time.monotonic(), TransferLog("storing")
    while waiting := spool.sealed():
        if spool.reported() != upload:
            upload, since_s = spool.reported(), time.monotonic()
            progress.at(upload.done_bytes, upload.total_bytes)
            _report_progress(heartbeat, upload)
        if time.monotonic() - since_s > STUCK_S:
            versions = ", ".join(seal.version for seal, _ in waiting)
            raise StoreUnavailable(
                f"no progress in storing checkpoints {versions} from {spool.folder} for {STUCK_S:.0f} s",
                upload.error or "is the uploader running?",
            )
        heartbeat.wait(POLL_S)


def _report_progress(heartbeat: Heartbeat, upload: UploaderState) -> None:
    """Report the upload in the heartbeat: the controller extends its timeout while there is progress."""
    if upload.storing is not None:
        stage = Stage(f"storing checkpoint {upload.storing}", upload.done_bytes, upload.total_bytes)
        heartbeat.update(stage=stage)


def read_detector(checkpoint: Path) -> Detector:
    """Read the detector's state at a restored checkpoint. Raises Corrupt."""
    path = checkpoint / DETECTOR_FILE
    return from_json(path.read_bytes(), Detector, str(path))
