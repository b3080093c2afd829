"""Where a trainer machine's spool is: found by its uploader, and by the next trainer on the same machine."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import psutil

from checkpoint.stream.spool import Spool
from policies.model.node_contract import SPOOL, SPOOL_PREFIX
from policies.model.spec import CheckpointsSpec

MEMORY = Path("/dev/shm")  # tmpfs on every Linux
GIB = 1 << 30


class NoRoom(Exception):
    """A checkpoint does not fit into the spool. Only the user can help; the message says how."""


def make_spool(workdir: Path, spec: CheckpointsSpec, slot_bytes: int) -> Spool:
    """Open the machine's spool, made where run.yaml says, else in memory if that has room, else on the disk.

    `slot_bytes` is what one checkpoint is expected to take. Raises NoRoom.
    """
    link = workdir / SPOOL
    folder = link.resolve() if _leads_somewhere(link) else _place(workdir, spec, slot_bytes)
    free_bytes = _free_bytes(folder) + sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    budget_bytes = int(spec.spool_gib * GIB) if spec.spool_gib is not None else free_bytes // 2
    if slot_bytes > budget_bytes:
        key = "spool_gib" if spec.spool_gib is not None else "spool"
        raise NoRoom(
            f"checkpoints.{key}: a checkpoint takes about {slot_bytes / GIB:.2f} GiB, and {folder} may hold "
            f"{budget_bytes / GIB:.2f}; name a folder with room in `spool`, or more in `spool_gib`"
        )
    if not _leads_somewhere(link):
        if link.is_dir():
            shutil.rmtree(link)  # transformers makes its output folder where there is none, TRL one in it
        link.unlink(missing_ok=True)
        link.symlink_to(folder)
    return Spool(folder, budget_bytes, slot_bytes)


def find_spool(workdir: Path) -> Spool | None:
    """The machine's spool, to read from it and to release in it; None before it was made."""
    link = workdir / SPOOL
    return Spool(link.resolve(), 0, 0) if _leads_somewhere(link) else None


def remove_spool(workdir: Path) -> None:
    """Give its memory back."""
    link = workdir / SPOOL
    if link.is_symlink():
        shutil.rmtree(link.resolve(), ignore_errors=True)
        link.unlink()


def _leads_somewhere(link: Path) -> bool:
    """Whether it is a link, and what it leads to is there: memory forgets, the working folder does not."""
    return link.is_symlink() and link.is_dir()


def _place(workdir: Path, spec: CheckpointsSpec, slot_bytes: int) -> Path:
    if spec.spool:
        base = Path(spec.spool)
    else:
        base = MEMORY if MEMORY.is_dir() and slot_bytes <= _free_bytes(MEMORY) // 2 else workdir
    try:
        base.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=SPOOL_PREFIX, dir=base))
    except OSError as error:
        raise NoRoom(f"checkpoints.spool: {base}: {error.strerror}; name a folder that can be written") from error


def _free_bytes(folder: Path) -> int:
    """What can still be written there: in memory no more than the machine has left."""
    free_bytes = shutil.disk_usage(folder).free
    if not folder.is_relative_to(MEMORY):
        return free_bytes
    return min(free_bytes, int(psutil.virtual_memory().available))
