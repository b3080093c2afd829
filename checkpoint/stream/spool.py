"""Where checkpoints wait for their upload: a folder in memory or on a fast disk, shared by trainer and uploader.

    checkpoint-50/            a slot: being written, whole, or free to be written over
    checkpoint-50.json        the slot is whole, and the uploader's
    uploader.json             what the uploader is doing

The trainer writes a slot and seals it; the uploader stores it and takes the seal away. A slot without a seal is
free: its files are written over in place, because getting fresh memory from the kernel takes longer than copying a
checkpoint does. Both processes may be killed at any point: a slot counts once it is sealed, and the seal appears
atomically.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from checkpoint.store.codec import from_json, to_json
from policies.model.vocabulary import PolicyVersion

UPLOADER = "uploader.json"
ZEROS_BYTES = 1 << 22
UNWRITTEN_NS = 0  # the modification time of a file that the save in progress has not written


@dataclass(frozen=True, slots=True)
class Seal:
    """Says that a slot is whole.

    `frozen` are files that belong to the checkpoint and lie elsewhere on this machine, unchanged: path by name.
    The newest checkpoint before `keep_before_step` must be kept, and all from `keep_since_step` on; None: no such
    step.
    """

    version: str  # PolicyVersion as text
    made_at_s: float
    meta: dict[str, str] = field(default_factory=dict)
    frozen: dict[str, str] = field(default_factory=dict)
    keep_before_step: int | None = None
    keep_since_step: int | None = None

    @property
    def at(self) -> PolicyVersion:
        return PolicyVersion.parse(self.version)


@dataclass(frozen=True, slots=True)
class UploaderState:
    """What the uploader last reported. `stored` and `storing` are PolicyVersions as text."""

    stored: str | None = None
    storing: str | None = None
    done_bytes: int = 0
    total_bytes: int = 0
    error: str = ""
    took_s: float | None = None  # what storing the last one has taken


class Spool:
    """One trainer machine's spool.

    Args:
        folder: its own; made here.
        budget_bytes: what all slots together may take; a slot is begun only if it fits.
        slot_bytes: the expected size of a slot, until there is one to measure.
    """

    def __init__(self, folder: Path, budget_bytes: int, slot_bytes: int) -> None:
        self.folder = folder
        self._budget_bytes = budget_bytes
        self._slot_bytes = slot_bytes
        self._preparing: threading.Thread | None = None
        folder.mkdir(parents=True, exist_ok=True)

    def prepare(self, files: dict[str, int]) -> None:
        """Begin, in the background, to get memory for the first slot's files: sizes in bytes by name."""
        if not list(self._slots()) and sum(files.values()) <= self._budget_bytes:
            slot = self.folder / "checkpoint-0"
            slot.mkdir()
            self._preparing = threading.Thread(target=_allocate, args=(slot, files), daemon=True)
            self._preparing.start()

    def claim(self, step: int) -> Path | None:
        """Return the folder for the checkpoint of `step`, with an old one's files in it; None without room."""
        if self._preparing is not None:
            self._preparing.join()
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
        """Hand a slot to the uploader, without those files of the old checkpoint that were not written over.

        Raises OSError, where there is no room even for that.
        """
        for path in _files_of(slot):
            if path.stat().st_mtime_ns == UNWRITTEN_NS:
                path.unlink()
        _write(_seal_of(slot), to_json(seal))

    def give_up(self, slot: Path) -> bool:
        """Remove a slot that could not be written for lack of space, and lower the budget to what the others take.

        Returns whether there are others, which the uploader frees.
        """
        shutil.rmtree(slot)
        others = list(self._slots())
        self._budget_bytes = sum(_size_of(other) for other in others)
        return bool(others)

    def sealed(self) -> list[tuple[Seal, Path]]:
        """Slots that wait for the uploader, oldest first."""
        found = []
        for slot in self._slots():
            with contextlib.suppress(FileNotFoundError):  # free, or released at this moment
                found.append((from_json(_seal_of(slot).read_bytes(), Seal, str(slot)), slot))
        return sorted(found, key=lambda pair: pair[0].at)

    def release(self, slot: Path) -> None:
        """Give a slot back: its checkpoint is stored."""
        _seal_of(slot).unlink()

    def report(self, state: UploaderState) -> None:
        """Tell the trainer about the upload. A full spool takes no report; the upload goes on."""
        with contextlib.suppress(OSError):
            _write(self.folder / UPLOADER, to_json(state))

    def reported(self) -> UploaderState:
        """What the uploader last reported; an empty report before its first."""
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


def _allocate(slot: Path, files: dict[str, int]) -> None:
    """Write zeros: memory that is only reserved is allocated page by page at the first write.

    A lack of space is left for the save to report.
    """
    zeros = bytes(ZEROS_BYTES)
    for name, size_bytes in files.items():
        with (slot / name).open("wb", buffering=0) as file, contextlib.suppress(OSError):
            for at in range(0, size_bytes, ZEROS_BYTES):
                file.write(zeros[: size_bytes - at])


def _write(path: Path, data: bytes) -> None:
    part = path.with_suffix(".part")
    part.write_bytes(data)
    part.replace(path)
