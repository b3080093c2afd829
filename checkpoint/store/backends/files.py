"""Objects as files with atomic and create-only writes that survive a power failure.

A file is written in its folder as NAME#DIGITS, which obstore does not list, and then renamed. Neither obstore nor
fsspec syncs files, which may leave them empty or missing after a power failure.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import time
from collections.abc import Iterable
from pathlib import Path

from grpo_orch.checkpoint.store.backends import BytesLike

# Documents are synced immediately. Larger files are valid only once a document refers to them, so they wait for
# `secure`: publishing a policy at each step must not wait for the disk.
DOCUMENT_BYTES = 1 << 20
TRIES = 5  # to open a file: deleting a folder's last file removes the folder

_STAGED = re.compile(r"#\d+$")


def write(path: Path, data: BytesLike, *, create: bool) -> None:
    """Write a file atomically; with `create`, only if it does not exist.

    On return it is durable if it was created or has at most DOCUMENT_BYTES. Raises FileExistsError, OSError.
    """
    durable = create or memoryview(data).nbytes <= DOCUMENT_BYTES
    staged = _stage(path, data, durable=durable)
    try:
        if create:
            os.link(staged, path)
        else:
            os.replace(staged, path)
    finally:
        staged.unlink(missing_ok=True)
        # Also if it exists: it may be the writer's own, from an attempt that was interrupted before this.
        if durable:
            _sync_folder(path.parent)


def check(root: Path) -> None:
    """Raise OSError if the folder of an opened store has disappeared.

    It is not created again: an unmounted or moved folder may return, and must not meet the start of another run.
    """
    if not root.is_dir():
        raise OSError(errno.ESTALE, f"{root} no longer exists")


def secure(paths: Iterable[Path]) -> None:
    """Sync these files to disk. Raises FileNotFoundError, OSError."""
    folders = set()
    for path in paths:
        _sync(path, os.O_RDONLY)
        folders.add(path.parent)
    for folder in folders:
        _sync_folder(folder)


def is_staged(name: str) -> bool:
    """Whether the file is being written, or was left by a killed writer."""
    return _STAGED.search(name) is not None


def sweep(folder: Path, older_than_s: float) -> None:
    """Remove unfinished files of killed writers."""
    for path in folder.rglob("*#*"):
        with contextlib.suppress(FileNotFoundError):
            if is_staged(path.name) and time.time() - path.stat().st_mtime > older_than_s:
                path.unlink()


def make(folder: Path) -> None:
    """Create a folder and its parents durably. Raises OSError."""
    if folder.is_dir():
        return
    make(folder.parent)
    folder.mkdir(exist_ok=True)
    _sync_folder(folder.parent)


def remove_empty(folders: Iterable[Path], root: Path) -> None:
    """Remove these folders and their parents below `root`, as far as they are empty."""
    for folder in folders:
        with contextlib.suppress(OSError):  # not empty, or already removed
            while folder != root:
                folder.rmdir()
                folder = folder.parent


def _stage(path: Path, data: BytesLike, *, durable: bool) -> Path:
    staged = path.with_name(f"{path.name}#{secrets.randbits(62)}")
    for tries_left in reversed(range(TRIES)):
        try:
            out = staged.open("xb", buffering=0)
            break
        except FileNotFoundError:
            if not tries_left:
                raise
            make(path.parent)
    try:
        with out, memoryview(data).cast("B") as rest:
            written = 0
            while written < len(rest):
                written += out.write(rest[written:]) or 0
            if durable:
                os.fsync(out.fileno())
    except BaseException:
        staged.unlink(missing_ok=True)
        raise
    return staged


def _sync_folder(folder: Path) -> None:
    with contextlib.suppress(FileNotFoundError):  # removed with its last file
        try:
            _sync(folder, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # file systems that cannot sync a folder
                raise


def _sync(path: Path, flags: int) -> None:
    handle = os.open(path, flags)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
