"""The policies on a rollout node's disk: one is fetched at a time, and what is not needed makes room for it.

The weights that are held are overwritten in place with what has changed, so a step writes no second model. While
they are neither the old ones nor the new ones their folder has a name that begins with a dot, which is never taken
for a policy: it gets its name once every tensor was read again and found to be what that name says.
"""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import structlog

from checkpoint.store import layout
from checkpoint.store.errors import Corrupt, NotFound
from checkpoint.store.run_store import Store
from checkpoint.stream import manifest
from checkpoint.stream.chunks import Progress
from checkpoint.stream.elsewhere import Elsewhere
from checkpoint.stream.manifest import Manifest
from checkpoint.weights import delta, safetensors
from policies.serving.wire import PolicyRef
from tasks.rollout.policy_route import Route, digest_of, route_to

log = structlog.get_logger()

FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
CHANGES = ".changes"  # fetched deltas, and what goes beside the new weights
APPLYING = ".applying"  # weights that are being overwritten


class Overtaken(Exception):
    """Another policy is wanted by now."""


class DiskFailed(Exception):
    """The files cannot be written; what could be freed is."""


class PolicyFolders:
    """A folder of folders, each named by a policy's label.

    Args:
        store: the run's.
        root: nobody else's folder.
        peers: nodes that may have what is fetched.
    """

    def __init__(self, store: Store, root: Path, peers: Elsewhere | None = None) -> None:
        self._store = store
        self._root = root
        self.fetched_bytes = 0  # by the last `fetch`
        self._peers = peers
        self._pool = ThreadPoolExecutor(delta.WORKERS, thread_name_prefix="weights")

    def fetch(self, wanted: PolicyRef, still: Callable[[], bool]) -> Path:
        """Return the folder with that policy's verified files. A policy that was held may be gone: it has become
        this one.

        Raises Overtaken at the next piece once `still` is false, DiskFailed, StoreError. What came until then
        stays for the next try: the next policies may be deltas to the same whole one, whose transfer may take
        longer than a step.
        """
        folder, pieces = self._root / wanted.label, list[int]()

        def check(size_bytes: int) -> None:
            pieces.append(size_bytes)
            if not still():
                raise Overtaken

        try:
            if not folder.exists():
                self._bring(wanted, folder, check)
            self._forget_parts()
            self.fetched_bytes = sum(pieces)
        except OSError as error:
            raise DiskFailed(self._free_up(error)) from error
        return folder

    def keep_only(self, folder: Path) -> None:
        """Delete every other policy."""
        for other in self._root.iterdir():
            if other != folder:
                shutil.rmtree(other, ignore_errors=True)

    def _bring(self, wanted: PolicyRef, folder: Path, check: Progress) -> None:
        """Make the folder, from what is held if that is possible. Raises StoreError, OSError."""
        found = manifest.load(self._store, wanted.prefix)
        holds = PolicyRef(found.version, wanted.prefix, found.digest_as(wanted.digest))
        if holds != wanted:
            raise Corrupt(f"{wanted.prefix} holds policy {holds.label}, not {wanted.label}")
        held = self._held()
        route = route_to(self._store, found, held)
        if route.whole is None:
            try:
                self._overwrite(held[route.start], route, found, folder, check)
            except (Corrupt, NotFound) as error:
                log.warning("deltas_not_applied", policy=wanted.label, deltas=len(route.deltas), why=str(error))
                route = route_to(self._store, found, ())
        if route.whole is not None:
            self._bring_whole(route, found, folder, check)
        log.info(
            "policy_fetched",
            policy=wanted.label,
            deltas=len(route.deltas),
            whole=route.whole.version if route.whole is not None else None,
        )

    def _bring_whole(self, route: Route, wanted: Manifest, folder: Path, check: Progress) -> None:
        """Fetch the whole policy, which may be there from an earlier try, and what has changed since."""
        assert route.whole is not None
        start = self._root / f"{route.whole.version}@{digest_of(route.whole)}" if route.deltas else folder
        fuzzy = route.whole.meta.get(manifest.KIND) == manifest.FUZZY
        if fuzzy:  # it is no policy before the deltas are applied
            start = start.with_name(f".{start.name}")
        if not start.exists():
            self._forget_parts(start)
            files = [file for file in route.whole.files if file.name != delta.NAME]
            manifest.materialize(self._store, route.whole.root, files, start, check, self._peers)
            if manifest.WEIGHTS in route.whole.meta and not fuzzy:
                self._prove(start, digest_of(route.whole))
        if route.deltas:
            self._overwrite(start, route, wanted, folder, check)

    def _overwrite(self, start: Path, route: Route, wanted: Manifest, folder: Path, check: Progress) -> None:
        """Turn the policy in `start` into the wanted one. While the store is asked nothing is overwritten; then
        there is no stopping, for what is begun and not ended is lost. Raises StoreError, OSError."""
        changes, applying = self._root / CHANGES, self._root / APPLYING
        for number, one in enumerate(route.deltas):
            files = [file for file in one.files if file.name == delta.NAME]
            manifest.materialize(self._store, one.root, files, changes / str(number), check, self._peers)
        beside = [file for file in wanted.files if file.name not in (layout.MODEL, delta.NAME)]
        manifest.materialize(self._store, wanted.root, beside, changes / "beside", check)
        shutil.rmtree(applying, ignore_errors=True)
        start.rename(applying)
        weights = applying / layout.MODEL
        deltas = [changes / str(number) / delta.NAME for number in range(len(route.deltas))]
        delta.apply(deltas, weights, digest_of_folder(start), self._pool)
        weights.rename(changes / "beside" / layout.MODEL)
        self._prove(changes / "beside", digest_of(wanted))
        (changes / "beside").rename(folder)

    def _prove(self, folder: Path, digest: str) -> None:
        """Raise Corrupt, and delete the folder, unless its weights are those of that digest."""
        found = safetensors.content_of(folder / layout.MODEL, self._pool)
        if found != digest:
            shutil.rmtree(folder)
            raise Corrupt(f"{folder.name} holds weights {found}, not {digest}")

    def _held(self) -> dict[str, Path]:
        """The folders of whole policies, by their weights' digests."""
        folders = [one for one in self._root.glob("[!.]*") if (one / layout.MODEL).is_file()]
        return {digest: one for one in folders if (digest := digest_of_folder(one))}

    def _forget_parts(self, folder: Path | None = None) -> None:
        """Delete what was begun, but for the part of this policy; without one but for deltas, if there are peers:
        they may be fetching them."""
        kept = manifest.part_of(folder) if folder is not None else self._peers and self._root / CHANGES
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


def digest_of_folder(folder: Path) -> str:
    """The digest in a policy's label, nothing where it names none."""
    return folder.name.partition("@")[2]


def _free_bytes(folder: Path) -> int:
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free
