"""Objects as files in a folder: one writer wins a name, readers see whole files, and finished writes survive a
power cut.

A file is written beside its place as NAME#DIGITS, which obstore takes for unfinished and does not list, then moved
there. Neither obstore nor fsspec syncs: without that a file may be empty or missing after a power cut.
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

from checkpoint.store.backends import BytesLike

# Documents are synced one by one. Anything larger belongs to something that exists only through a document: it can
# wait for `secure`, so that publishing a policy at each step does not wait for the disk.
DOCUMENT_BYTES = 1 << 20
TRIES = 5  # to open a file: whoever deletes a folder's last file removes the folder

_STAGED = re.compile(r"#\d+$")


def write(path: Path, data: BytesLike, *, create: bool) -> None:
    """Write a file atomically; with `create`, only if there is none.

    When this returns it is durable if it was created or has at most DOCUMENT_BYTES. Raises FileExistsError,
    OSError.
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
        # Also if it exists: it may be the writer's own, from a try that was cut off before this.
        if durable:
            _sync_folder(path.parent)


def check(root: Path) -> None:
    """Raise OSError where the folder of a store that was found or made is not there any more.

    It is not made anew: what was mounted or moved comes back, and must not find the beginning of another run.
    """
    if not root.is_dir():
        raise OSError(errno.ESTALE, f"{root} is not there any more")


def secure(paths: Iterable[Path]) -> None:
    """Wait until these files are on disk, whoever wrote them. Raises FileNotFoundError, OSError."""
    folders = set()
    for path in paths:
        _sync(path, os.O_RDONLY)
        folders.add(path.parent)
    for folder in folders:
        _sync_folder(folder)


def is_staged(name: str) -> bool:
    """Whether the file is still being written, or was left by a killed writer."""
    return _STAGED.search(name) is not None


def sweep(folder: Path, older_than_s: float) -> None:
    """Remove what killed writers left."""
    for path in folder.rglob("*#*"):
        with contextlib.suppress(FileNotFoundError):
            if is_staged(path.name) and time.time() - path.stat().st_mtime > older_than_s:
                path.unlink()


def make(folder: Path) -> None:
    """Make a folder and its parents, each durably. Raises OSError."""
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
    for left in reversed(range(TRIES)):
        try:
            out = staged.open("xb", buffering=0)
            break
        except FileNotFoundError:
            if not left:
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
