"""Objects as files of a folder: one writer wins a name, readers see whole files, and what is done outlives a
power cut.

A file is written beside its place, as NAME#DIGITS, which obstore takes for unfinished and does not list, and moved
there. Neither obstore nor fsspec waits for the disk: without that a file may be empty, or have no name, when the
machine comes back.
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

# Documents are made durable one by one. What is larger is part of something that a document makes exist: it can
# wait for `secure`, so that a policy's weights do not wait for the disk at each step.
DOCUMENT_BYTES = 1 << 20
TRIES = 5  # of a folder that whoever deletes its last file takes away

_STAGED = re.compile(r"#\d+$")


def write(path: Path, data: BytesLike, *, create: bool) -> None:
    """Write a file in one act; with `create`, only where there is none.

    It is durable when this returns, if it is created or a document. Raises FileExistsError, OSError.
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
        # Also where it exists: the writer may be meeting its own file, whose answer was lost before this.
        if durable:
            _sync_folder(path.parent)


def secure(paths: Iterable[Path]) -> None:
    """Wait until these files are on the disk, whoever wrote them. Raises FileNotFoundError, OSError."""
    folders = set()
    for path in paths:
        _sync(path, os.O_RDONLY)
        folders.add(path.parent)
    for folder in folders:
        _sync_folder(folder)


def is_staged(name: str) -> bool:
    """Whether the file is one that is still being written, or was left by a writer that was killed."""
    return _STAGED.search(name) is not None


def sweep(folder: Path, older_than_s: float) -> None:
    """Remove what writers that were killed have left."""
    for path in folder.rglob("*#*"):
        with contextlib.suppress(FileNotFoundError):
            if is_staged(path.name) and time.time() - path.stat().st_mtime > older_than_s:
                path.unlink()


def make(folder: Path) -> None:
    """Make a folder and what it lies in, each durably. Raises OSError."""
    if folder.is_dir():
        return
    make(folder.parent)
    folder.mkdir(exist_ok=True)
    _sync_folder(folder.parent)


def leave_no_empty(folders: Iterable[Path], root: Path) -> None:
    """Remove these folders, and what they lie in below `root`, as far as nothing is in them."""
    for folder in folders:
        with contextlib.suppress(OSError):  # something is in it, or another has removed it
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
    with contextlib.suppress(FileNotFoundError):  # it went with its last file
        try:
            _sync(folder, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # file systems that have no such thing
                raise


def _sync(path: Path, flags: int) -> None:
    handle = os.open(path, flags)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
