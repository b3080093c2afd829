"""Stores in a folder. The first write makes it; whoever only looks finds nothing there, and leaves nothing."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from obstore.store import LocalStore

from checkpoint.store.backends import BytesLike, Entry, Fault, Options, files
from checkpoint.store.backends.obstore_backend import ObstoreBackend, fault_of
from checkpoint.store.errors import StoreUnusable


class FolderBackend:
    """Objects below a folder that may not be there yet."""

    errors = ObstoreBackend.errors

    def __init__(self, url: str, path: str) -> None:
        self._url = url
        self.folder = Path(path)
        self._opened: ObstoreBackend | None = None  # kept: a folder that vanishes later is not made anew
        with contextlib.suppress(*self.errors):  # whoever reads or writes is told
            self._found()

    def get(self, key: str) -> memoryview:
        if (found := self._found()) is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        return found.get(key)

    def put(self, key: str, data: BytesLike) -> None:
        self._made().put(key, data)

    def put_parts(self, key: str, parts: Iterable[BytesLike]) -> None:
        self._made().put_parts(key, parts)

    def create(self, key: str, data: BytesLike) -> None:
        self._made().create(key, data)

    def secure(self, keys: Sequence[str]) -> None:
        files.secure(self.folder / key for key in keys)

    def delete(self, keys: Sequence[str]) -> None:
        if (found := self._found()) is not None:
            found.delete(keys)

    def entries(self, prefix: str, after: str | None) -> list[Entry]:
        found = self._found()
        return [] if found is None else found.entries(prefix, after)

    def folders(self, prefix: str) -> list[str]:
        found = self._found()
        return [] if found is None else found.folders(prefix)

    def sweep(self, prefix: str, older_than_s: float) -> None:
        files.sweep(self.folder / prefix, older_than_s)

    def fault(self, error: Exception) -> Fault | None:
        return fault_of(error, "")

    def _found(self) -> ObstoreBackend | None:
        """The store, once somebody has made its folder. Raises OSError."""
        if self._opened is None and self.folder.is_dir():
            local = LocalStore(prefix=self.folder, automatic_cleanup=True)
            self._opened = ObstoreBackend(local, local, folder=self.folder)
        return self._opened

    def _made(self) -> ObstoreBackend:
        """The store, for a write. Raises StoreUnusable, OSError."""
        if (found := self._found()) is not None:
            return found
        try:
            files.make(self.folder)
        except OSError as error:
            raise StoreUnusable(
                f"store {self._url!r}: {error.strerror}", "name a folder that can be written"
            ) from error
        return self._made()


def open_folder(url: str, options: Options) -> FolderBackend:
    """The backend of a `file://` URL. Raises StoreUnusable."""
    if options:
        raise StoreUnusable(f"store {url!r}: option {next(iter(options))!r}", "file:// has no options")
    return FolderBackend(url, url.partition("://")[2])
