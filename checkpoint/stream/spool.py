"""The spool: a folder in memory or on a fast disk where checkpoints wait for their upload.

    checkpoint-50/            a slot: being written, complete, or free to be overwritten
    checkpoint-50.json        its seal: the slot is complete and belongs to the uploader
    uploader.json             the uploader's state

The trainer writes a slot and seals it; the uploader stores it and removes the seal. A slot without a seal is free:
its files are overwritten in place, because allocating new memory takes longer than copying a checkpoint. Both
processes may be killed at any point: a slot is valid once it is sealed, and the seal appears atomically.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from grpo_orch.checkpoint.store.codec import from_json, to_json
from grpo_orch.policies.model.vocabulary import PolicyVersion

UPLOADER = "uploader.json"
UNWRITTEN_NS = 0  # the modification time of a file that the save in progress has not written


@dataclass(frozen=True, slots=True)
class Seal:
    """Marks a slot as complete. Written by the trainer.

    `frozen` are unchanging files of the checkpoint elsewhere on this machine, path by name. The newest checkpoint
    before `keep_before_step` must be kept, and all from `keep_since_step` on; None: no such step.
    """

    version: str  # PolicyVersion as text
    made_at_s: float  # seconds since the epoch
    frozen: dict[str, str] = field(default_factory=dict)
    keep_before_step: int | None = None
    keep_since_step: int | None = None

    @property
    def at(self) -> PolicyVersion:
        return PolicyVersion.parse(self.version)


@dataclass(frozen=True, slots=True)
class UploaderState:
    """The state that the uploader last reported. `stored` and `storing` are PolicyVersions as text."""

    stored: str | None = None
    storing: str | None = None
    done_bytes: int = 0
    total_bytes: int = 0
    error: str = ""
    took_s: float | None = None  # duration of the last upload


class Spool:
    """One trainer machine's spool.

    Args:
        folder: used by this spool alone; created if missing.
        budget_bytes: the maximum size of all slots together; a slot is created only if it fits.
        slot_bytes: the expected size of the first slot.
    """

    def __init__(self, folder: Path, budget_bytes: int, slot_bytes: int) -> None:
        self.folder = folder
        self._budget_bytes = budget_bytes
        self._slot_bytes = slot_bytes
        folder.mkdir(parents=True, exist_ok=True)

    def claim(self, step: int) -> Path | None:
        """Return a folder for the checkpoint of `step`, perhaps with old files in it; None if no slot fits."""
        wanted = self.folder / f"checkpoint-{step}"
        slots = list(self._slots())
        free = [slot for slot in slots if not _seal_of(slot).exists()]
        if free:
            if wanted not in free:
                free[0].rename(wanted)
            for path in _files_of(wanted):
                os.utime(path, ns=(0, UNWRITTEN_NS))
            return wanted
        sizes = [_size_of(slot) for slot in slots]
        if sum(sizes) + max(sizes, default=self._slot_bytes) > self._budget_bytes:
            return None
        wanted.mkdir()
        return wanted

    def seal(self, slot: Path, seal: Seal) -> None:
        """Hand a slot to the uploader, after deleting the old checkpoint's files that were not overwritten.

        Raises OSError if there is no space for the seal.
        """
        for path in _files_of(slot):
            if path.stat().st_mtime_ns == UNWRITTEN_NS:
                path.unlink()
        _write(_seal_of(slot), to_json(seal))

    def discard(self, slot: Path) -> bool:
        """Remove a slot that could not be written for lack of space, and reduce the budget to the others' size.

        Returns whether others exist, which the uploader will free.
        """
        shutil.rmtree(slot)
        others = list(self._slots())
        self._budget_bytes = sum(_size_of(other) for other in others)
        return bool(others)

    def sealed(self) -> list[tuple[Seal, Path]]:
        """Return the slots that wait for the uploader, oldest first."""
        found = []
        for slot in self._slots():
            with contextlib.suppress(FileNotFoundError):  # free, or released at this moment
                found.append((from_json(_seal_of(slot).read_bytes(), Seal, str(slot)), slot))
        return sorted(found, key=lambda pair: pair[0].at)

    def release(self, slot: Path) -> None:
        """Free a slot whose checkpoint is stored."""
        _seal_of(slot).unlink()

    def report(self, state: UploaderState) -> None:
        """Report the upload's state to the trainer. Does nothing if the spool is full."""
        with contextlib.suppress(OSError):
            _write(self.folder / UPLOADER, to_json(state))

    def reported(self) -> UploaderState:
        """Return the state that the uploader last reported; an empty one before its first report."""
        path = self.folder / UPLOADER
        return from_json(path.read_bytes(), UploaderState, str(path)) if path.exists() else UploaderState()

    def _slots(self) -> Iterator[Path]:
        return (path for path in sorted(self.folder.glob("checkpoint-*")) if path.is_dir())


def _seal_of(slot: Path) -> Path:
    return slot.with_name(f"{slot.name}.json")


def _size_of(slot: Path) -> int:
    return sum(path.stat().st_size for path in _files_of(slot))


def _files_of(slot: Path) -> list[Path]:
    return [path for path in slot.rglob("*") if path.is_file()]


def _write(path: Path, data: bytes) -> None:
    part = path.with_suffix(".part")
    part.write_bytes(data)
    part.replace(path)
