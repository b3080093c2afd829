"""Create and find a trainer machine's spool, which its trainer, its uploader and later attempts share."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import psutil

from grpo_orch.checkpoint.stream.spool import Spool
from grpo_orch.policies.model.node_contract import SPOOL, SPOOL_PREFIX
from grpo_orch.policies.model.spec import CheckpointsSpec

MEMORY = Path("/dev/shm")  # tmpfs on every Linux
GIB = 1 << 30


class SpoolFull(Exception):
    """A checkpoint does not fit into the spool. The message tells the user what to change."""


def make_spool(workdir: Path, spec: CheckpointsSpec, slot_bytes: int) -> Spool:
    """Open the machine's spool. A new one is in the folder of run.yaml, else in memory if it fits, else on disk.

    `slot_bytes` is the expected size of a checkpoint. Raises SpoolFull.
    """
    link = workdir / SPOOL
    folder = link.resolve() if _has_target(link) else _new_folder(workdir, spec, slot_bytes)
    free_bytes = _free_bytes(folder) + sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    budget_bytes = int(spec.spool_gib * GIB) if spec.spool_gib is not None else free_bytes // 2
    if slot_bytes > budget_bytes:
        key = "spool_gib" if spec.spool_gib is not None else "spool"
        raise SpoolFull(
            f"checkpoints.{key}: a checkpoint takes about {slot_bytes / GIB:.2f} GiB, but {folder} may use only "
            f"{budget_bytes / GIB:.2f} GiB; set `spool` to a folder with more space, or raise `spool_gib`"
        )
    if not _has_target(link):
        if link.is_dir():
            shutil.rmtree(link)  # transformers and TRL create their output folder here
        link.unlink(missing_ok=True)
        link.symlink_to(folder)
    return Spool(folder, budget_bytes, slot_bytes)


def find_spool(workdir: Path) -> Spool | None:
    """Open the machine's spool to read and release checkpoints; None before it exists."""
    link = workdir / SPOOL
    return Spool(link.resolve(), 0, 0) if _has_target(link) else None


def remove_spool(workdir: Path) -> None:
    """Delete the spool and free its memory."""
    link = workdir / SPOOL
    if link.is_symlink():
        shutil.rmtree(link.resolve(), ignore_errors=True)
        link.unlink()


def _has_target(link: Path) -> bool:
    """Return whether it is a link to an existing folder. After a reboot a folder in memory is gone."""
    return link.is_symlink() and link.is_dir()


def _new_folder(workdir: Path, spec: CheckpointsSpec, slot_bytes: int) -> Path:
    if spec.spool:
        base = Path(spec.spool)
    else:
        base = MEMORY if MEMORY.is_dir() and slot_bytes <= _free_bytes(MEMORY) // 2 else workdir
    try:
        base.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=SPOOL_PREFIX, dir=base))
    except OSError as error:
        raise SpoolFull(f"checkpoints.spool: {base}: {error.strerror}; choose a writable folder") from error


def _free_bytes(folder: Path) -> int:
    """Return the free space of a folder; in memory at most the machine's available memory."""
    free_bytes = shutil.disk_usage(folder).free
    if not folder.is_relative_to(MEMORY):
        return free_bytes
    return min(free_bytes, int(psutil.virtual_memory().available))
