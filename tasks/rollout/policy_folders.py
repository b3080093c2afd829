"""The policies on a rollout node's disk: one is fetched at a time, and what is not needed makes room for it."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable
from pathlib import Path

import structlog

from checkpoint.store.errors import Corrupt
from checkpoint.store.run_store import Store
from checkpoint.stream import manifest
from policies.serving.wire import PolicyRef

log = structlog.get_logger()

FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


class Overtaken(Exception):
    """Another policy is wanted by now."""


class DiskFailed(Exception):
    """The files cannot be written; what could be freed is."""


class PolicyFolders:
    """A folder of folders, each named by a policy's label.

    Args:
        store: the run's.
        root: nobody else's folder.
    """

    def __init__(self, store: Store, root: Path) -> None:
        self._store = store
        self._root = root

    def fetch(self, wanted: PolicyRef, still: Callable[[], bool]) -> Path:
        """Return the folder with that policy's verified files.

        Raises Overtaken at the next piece once `still` is false, DiskFailed, StoreError.
        """
        folder = self._root / wanted.label

        def check(_: int) -> None:
            if not still():
                raise Overtaken

        try:
            self._forget_parts(folder)
            if not folder.exists():
                found = manifest.fetch(self._store, wanted.prefix, folder, progress=check)
                holds = PolicyRef(found.version, wanted.prefix, found.digest_as(wanted.digest))
                if holds != wanted:
                    shutil.rmtree(folder)
                    raise Corrupt(f"{wanted.prefix} holds policy {holds.label}, not {wanted.label}")
        except Overtaken:
            self._forget_parts()
            raise
        except OSError as error:
            raise DiskFailed(self._free_up(error)) from error
        return folder

    def keep_only(self, folder: Path) -> None:
        """Delete every other policy."""
        for other in self._root.iterdir():
            if other != folder:
                shutil.rmtree(other, ignore_errors=True)

    def _forget_parts(self, folder: Path | None = None) -> None:
        """Delete what was begun of other policies than this one."""
        kept = None if folder is None else manifest.part_of(folder)
        for part in self._root.glob(".*"):
            if part != kept:
                shutil.rmtree(part, ignore_errors=True)

    def _free_up(self, error: OSError) -> str:
        """Make room: of older policies nothing is needed once vLLM holds them. Returns what to say."""
        if error.errno not in FULL:
            return f"{self._root}: {error.strerror or error}"
        before = _free_bytes(self._root)
        shutil.rmtree(self._root, ignore_errors=True)
        after = _free_bytes(self._root)
        log.warning("disk_full", folder=str(self._root), freed_mib=(after - before) >> 20, free_mib=after >> 20)
        return f"{self._root}: {error.strerror}; {after >> 20} MiB are free once all older policies are deleted"


def _free_bytes(folder: Path) -> int:
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free
