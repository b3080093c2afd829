"""Stores in a folder: objects as files, with atomic and create-only writes that survive a power failure.

A file is written in its folder as NAME#DIGITS, which is not listed, and then renamed or linked. The first write
creates the folder; reads of a missing folder find nothing.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import time
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from grpo_orch.checkpoint.store.backends import BytesLike, Entry, Fault, Options, of_errno
from grpo_orch.checkpoint.store.errors import StoreUnusable

# Documents are synced immediately. Larger files are valid only once a document refers to them, so they wait for
# `secure`: publishing a policy at each step must not wait for the disk.
DOCUMENT_BYTES = 1 << 20
TRIES = 5  # to open a file: deleting a folder's last file removes the folder

_STAGED = re.compile(r"#\d+$")


class FolderBackend:
    """Objects below a folder that may not exist yet."""

    errors: tuple[type[Exception], ...] = (OSError,)

    def __init__(self, url: str, folder: Path) -> None:
        self._url = url
        self.folder = folder
        self._has_existed = os.path.isdir(folder)  # unlike Path.is_dir it never raises

    def get(self, key: str) -> memoryview:
        return memoryview(self._path(key).read_bytes())

    def put(self, key: str, data: BytesLike) -> None:
        self._write(key, [data], durable=memoryview(data).nbytes <= DOCUMENT_BYTES)

    def put_parts(self, key: str, parts: Iterable[BytesLike]) -> None:
        self._write(key, parts, durable=False)

    def create(self, key: str, data: BytesLike) -> None:
        self._write(key, [data], durable=True, create=True)

    def secure(self, keys: Sequence[str]) -> None:
        paths = [self._path(key) for key in keys]
        for path in paths:
            _sync(path, os.O_RDONLY)
        for folder in {path.parent for path in paths}:
            _sync_folder(folder)

    def delete(self, keys: Sequence[str]) -> None:
        paths = [self._path(key) for key in keys]
        for path in paths:
            path.unlink(missing_ok=True)
        for folder in {path.parent for path in paths}:
            with contextlib.suppress(OSError):  # not empty, or already removed
                while folder != self.folder:
                    folder.rmdir()
                    folder = folder.parent

    def entries(self, prefix: str, after: str | None) -> list[Entry]:
        found, root_chars = [], len(str(self.folder)) + 1
        for folder, _, names in os.walk(self._path(prefix), onerror=_raise_unless_missing):
            for name in names:
                key = f"{folder}/{name}"[root_chars:]
                if _STAGED.search(name) or (after is not None and key <= after):
                    continue
                with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
                    stat = os.stat(f"{folder}/{name}")
                    found.append(Entry(key, stat.st_size, datetime.fromtimestamp(stat.st_mtime, UTC)))
        return found

    def folders(self, prefix: str) -> list[str]:
        try:
            with os.scandir(self._path(prefix)) as found:
                return [f"{prefix}/{entry.name}".lstrip("/") for entry in found if entry.is_dir()]
        except FileNotFoundError:
            return []

    def sweep(self, prefix: str, older_than_s: float) -> None:
        for path in self._path(prefix).rglob("*#*"):
            with contextlib.suppress(FileNotFoundError):
                if _STAGED.search(path.name) and time.time() - path.stat().st_mtime > older_than_s:
                    path.unlink()

    def fault(self, error: Exception) -> Fault:
        assert isinstance(error, OSError)
        return of_errno(error.errno, error.strerror or str(error))

    def _path(self, key: str) -> Path:
        if key.startswith("/") or ".." in key.split("/"):
            raise StoreUnusable(f"{key!r} is outside the store {self._url!r}")
        self._has_existed = self._has_existed or self.folder.is_dir()
        return self.folder / key

    def _write(self, key: str, parts: Iterable[BytesLike], *, durable: bool, create: bool = False) -> None:
        """Write a file atomically; with `create`, only if it does not exist; with `durable`, synced on return.

        Raises FileExistsError, StoreUnusable, OSError.
        """
        path = self._path(key)
        self._ensure_folder()
        staged = _stage(path, parts, durable=durable)
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

    def _ensure_folder(self) -> None:
        """Create the store's folder before the first write. Raises StoreUnusable, OSError.

        A folder that disappears later is not created again: an unmounted or moved folder may return, and must not
        meet the start of another run.
        """
        if self._has_existed:
            if not self.folder.is_dir():
                raise OSError(errno.ESTALE, f"{self.folder} no longer exists")
            return
        try:
            _make(self.folder)
        except OSError as error:
            hint = "name a folder that can be written"
            raise StoreUnusable(f"store {self._url!r}: {error.strerror}", hint) from error
        self._has_existed = True


def open_folder(url: str, options: Options) -> FolderBackend:
    """Open the backend of a `file://` URL. Raises StoreUnusable."""
    if options:
        raise StoreUnusable(f"store {url!r}: option {next(iter(options))!r}", "file:// takes no options")
    return FolderBackend(url, Path(url.partition("://")[2]))


def _raise_unless_missing(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error


def _make(folder: Path) -> None:
    """Create a folder and its parents durably. Raises OSError."""
    if folder.is_dir():
        return
    _make(folder.parent)
    folder.mkdir(exist_ok=True)
    _sync_folder(folder.parent)


def _stage(path: Path, parts: Iterable[BytesLike], *, durable: bool) -> Path:
    staged = path.with_name(f"{path.name}#{secrets.randbits(62)}")
    for tries_left in reversed(range(TRIES)):
        try:
            out = staged.open("xb", buffering=0)
            break
        except FileNotFoundError:
            if not tries_left:
                raise
            _make(path.parent)
    try:
        with out:
            for part in parts:
                with memoryview(part).cast("B") as rest:
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
