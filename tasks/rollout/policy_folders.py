"""The policies on a rollout node's disk: one is fetched at a time, and what is not needed makes room for it.

What has changed is staged first, for an engine to take from there (see `policy_loader`); the file's weights
follow, in one pass for all that is staged. They are overwritten in place: a step writes no second model.
While they are neither the old ones nor the new ones their folder has a name that begins with a dot, which is never
taken for a policy: it gets its name once every tensor was read again and found to be what that name says.
"""

from __future__ import annotations

import errno
import shutil
import threading
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import structlog

from checkpoint.store import layout
from checkpoint.store.errors import Corrupt, NotFound, StoreError
from checkpoint.store.run_store import Store
from checkpoint.stream import manifest
from checkpoint.stream.chunks import Progress
from checkpoint.stream.manifest import Manifest
from checkpoint.weights import delta, safetensors
from checkpoint.weights.safetensors import DIGEST_BYTES
from policies.serving.joining import POLICY, Stage
from policies.serving.wire import PolicyRef

log = structlog.get_logger()

# How a node comes by a policy: by the deltas since one that it holds, or since the last that is stored whole.

# Deltas at a time: more than publishers put after a whole policy, so that those of two of them are followed.
DELTAS_MAX = 64


@dataclass(frozen=True, slots=True)
class Route:
    """Where to begin and what follows. Either `start` is held, by its digest, or `whole` is to be fetched."""

    deltas: list[Manifest]
    start: str = ""
    whole: Manifest | None = None


def route_to(load: Callable[..., Manifest], wanted: Manifest, held: Collection[str]) -> Route:
    """The shortest way from weights that are held, else from the nearest whole policy.

    By digests alone: two trainers may have published one version, and a rollback leads to older ones.

    Args:
        load: reads a manifest at its place in the store, of another name if told so.
        held: digests of weights.

    Raises NotFound, Corrupt (deltas that nothing whole comes before), StoreError.
    """
    deltas, from_whole, at = list[Manifest](), None, wanted
    lost: StoreError | None = None
    while True:
        if manifest.WEIGHTS in at.meta and digest_of(at) in held:
            return Route(deltas, start=digest_of(at))
        if from_whole is None and at.meta.get(manifest.KIND) != manifest.DELTA:
            from_whole = Route(deltas, whole=at)
        elif from_whole is None and at.root == wanted.meta.get(manifest.SNAPSHOT):
            try:
                from_whole = Route(deltas, whole=load(at.root, layout.SNAPSHOT))
            except (NotFound, Corrupt) as error:
                lost = error  # what is held may be before it
        base = at.meta.get(manifest.BASE, "")
        if not base or len(deltas) == DELTAS_MAX or (from_whole is not None and not held):
            break
        deltas = [at, *deltas]
        before = base.partition("@")[2]
        if before in held:
            return Route(deltas, start=before)
        try:
            at = load(at.meta.get(manifest.BASE_PREFIX, ""))
        except (NotFound, Corrupt) as error:
            if from_whole is None:
                raise lost or error from None
            break
        if digest_of(at) != before:
            raise Corrupt(f"{deltas[0].root} is a delta to {base}, and {at.root} holds {digest_of(at)}")
    if from_whole is None:
        raise lost or Corrupt(f"{wanted.root}: {len(deltas)} deltas, and no whole policy before them")
    return from_whole


def digest_of(policy: Manifest) -> str:
    """The digest in its label."""
    return policy.digest_as("0" * 2 * DIGEST_BYTES)


FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
STAGED = ".staged"  # fetched deltas, and what goes beside weights
APPLYING = ".applying"  # weights that are being overwritten


class Overtaken(Exception):
    """Another policy is wanted by now."""


class DiskFailed(Exception):
    """The files cannot be written; what could be freed is."""


@dataclass(frozen=True, slots=True)
class Staged:
    """The way from weights that an engine holds to a policy: verified files of deltas, one after the other.

    Attributes:
        digests: of the weights before the first delta and after each.
        beside: the folder of what is published beside the weights.
    """

    deltas: list[Path]
    digests: list[str]
    beside: Path


class PolicyFolders:
    """A folder of folders, each named by a policy's label. While one thread fetches or settles another may stage.

    Args:
        store: the run's.
        root: nobody else's folder.
    """

    def __init__(self, store: Store, root: Path) -> None:
        self._store = store
        self._root = root
        self.fetched_bytes = 0  # by the last `fetch` or `stage`
        self.coming: Stage | None = None  # of a whole policy, while it is fetched
        self._pool = ThreadPoolExecutor(delta.WORKERS, thread_name_prefix="weights")
        self._file = threading.Lock()  # held by who may change the weights' file
        # By their places: those of staged deltas may go from the store before the file has followed.
        self._known = dict[str, Manifest]()
        self._applied = list[Path]()  # staged deltas that the file has taken

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

        with self._file:
            try:
                if not folder.exists():
                    self._bring(wanted, folder, check)
                self._forget_parts()
                self.fetched_bytes = sum(pieces)
            except OSError as error:
                raise DiskFailed(self._free_up(error)) from error
        return folder

    def keep_only(self, folder: Path) -> None:
        """Delete every other policy, and all that is staged."""
        self._known.clear()
        for other in self._root.iterdir():
            if other != folder:
                shutil.rmtree(other, ignore_errors=True)

    def stage(self, wanted: PolicyRef, base: str, still: Callable[[], bool]) -> Staged | None:
        """Fetch what has changed since the weights of the digest `base`, which an engine holds whatever the file
        does, and return it verified; None where no deltas lead from there, or the disk has no room for them.

        Raises Overtaken at the next piece once `still` is false, StoreError.
        """

        pieces = list[int]()

        def check(size_bytes: int) -> None:
            pieces.append(size_bytes)
            if not still():
                raise Overtaken

        found = self._manifest_of(wanted)
        route = route_to(self._load, found, (base,))
        if route.whole is not None:
            return None
        try:
            deltas, beside = self._stage(route, found, check)
        except (Corrupt, NotFound, OSError) as error:
            log.warning("deltas_not_staged", policy=wanted.label, why=str(error))
            return None
        self.fetched_bytes = sum(pieces)
        self._known |= {one.root: one for one in [*route.deltas, found]}
        return Staged(deltas, [base, *(digest_of(one) for one in route.deltas)], beside)

    def settle(self, wanted: PolicyRef, still: Callable[[], bool]) -> Path:
        """Bring the file to a policy that an engine holds, and delete the deltas of the policy before it.

        Raises as `fetch`.
        """
        before = self._applied
        folder = self.fetch(wanted, still)
        spent = [one for one in before if one not in self._applied]
        for other in [one for one in self._root.glob("[!.]*") if one != folder] + spent:
            shutil.rmtree(other, ignore_errors=True)
        known = dict(self._known)  # another thread may stage more: what it adds was there before
        kept = {path.name for path in (self._root / STAGED).glob("*")}
        for root in [root for root, one in known.items() if _way(one) not in kept]:
            self._known.pop(root, None)
        return folder

    def _bring(self, wanted: PolicyRef, folder: Path, check: Progress) -> None:
        """Make the folder, from what is held if that is possible. Raises StoreError, OSError."""
        found = self._manifest_of(wanted)
        held = self._held()
        route = route_to(self._load, found, held)
        if route.whole is None:
            try:
                self._overwrite(held[route.start], route, found, folder, check)
            except (Corrupt, NotFound) as error:
                log.warning("deltas_not_applied", policy=wanted.label, deltas=len(route.deltas), why=str(error))
                route = route_to(self._load, found, ())
        if route.whole is not None:
            self._bring_whole(route, found, folder, check)
        log.info(
            "policy_fetched",
            policy=wanted.label,
            deltas=len(route.deltas),
            whole=route.whole.version if route.whole is not None else None,
        )

    def _manifest_of(self, wanted: PolicyRef) -> Manifest:
        found = self._load(wanted.prefix)
        holds = PolicyRef(found.version, wanted.prefix, found.digest_as(wanted.digest))
        if holds != wanted:
            raise Corrupt(f"{wanted.prefix} holds policy {holds.label}, not {wanted.label}")
        return found

    def _load(self, prefix: str, name: str = layout.MANIFEST) -> Manifest:
        known = self._known.get(prefix) if name == layout.MANIFEST else None
        return known or manifest.load(self._store, prefix, name)

    def _stage(self, route: Route, wanted: Manifest, check: Progress) -> tuple[list[Path], Path]:
        """Fetch and verify the deltas of a route, and what goes beside the weights. Raises StoreError, OSError."""
        staged, deltas = self._root / STAGED, list[Path]()
        for one in route.deltas:
            deltas.append(staged / _way(one) / delta.NAME)
            try:
                delta.verify(deltas[-1])
            except (FileNotFoundError, Corrupt):  # which it has become since it came
                files = [file for file in one.files if file.name == delta.NAME]
                manifest.materialize(self._store, one.root, files, deltas[-1].parent, check)
                delta.verify(deltas[-1])
        beside = staged / f"{wanted.version}@{digest_of(wanted)}"
        if not beside.exists():
            files = [file for file in wanted.files if file.name not in (layout.MODEL, delta.NAME)]
            manifest.materialize(self._store, wanted.root, files, beside, check)
        return deltas, beside

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
            progress = self._counted(sum(file.size_bytes for file in files), check)
            try:
                manifest.materialize(self._store, route.whole.root, files, start, progress)
            finally:
                self.coming = None
            if manifest.WEIGHTS in route.whole.meta and not fuzzy:
                self._prove(start, digest_of(route.whole))
        if route.deltas:
            self._overwrite(start, route, wanted, folder, check)

    def _counted(self, total_bytes: int, check: Progress) -> Progress:
        """Tell in `coming` how far it is, too."""
        lock, self.coming = threading.Lock(), Stage(POLICY, 0, total_bytes)

        def progress(size_bytes: int) -> None:
            with lock:
                if self.coming is not None:
                    self.coming = replace(self.coming, done_bytes=self.coming.done_bytes + size_bytes)
            check(size_bytes)

        return progress

    def _overwrite(self, start: Path, route: Route, wanted: Manifest, folder: Path, check: Progress) -> None:
        """Turn the policy in `start` into the wanted one. While the store is asked nothing is overwritten; then
        there is no stopping, for what is begun and not ended is lost. Raises StoreError, OSError."""
        deltas, beside = self._stage(route, wanted, check)
        applying = self._root / APPLYING
        shutil.rmtree(applying, ignore_errors=True)
        start.rename(applying)
        weights = applying / layout.MODEL
        delta.apply(deltas, weights, digest_of_folder(start), self._pool)
        weights.rename(beside / layout.MODEL)
        self._prove(beside, digest_of(wanted))
        beside.rename(folder)
        self._applied = [path.parent for path in deltas]

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
        """Delete what was begun, but for what is staged and the part of this policy."""
        kept = None if folder is None else manifest.part_of(folder)
        for part in self._root.glob(".*"):
            if part not in (kept, self._root / STAGED):
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


def _way(one: Manifest) -> str:
    """Names a delta by where it leads from and to: two may lead to the same weights."""
    return f"{one.meta.get(manifest.BASE, '').partition('@')[2]}-{digest_of(one)}"


def digest_of_folder(folder: Path) -> str:
    """The digest in a policy's label, nothing where it names none."""
    return folder.name.partition("@")[2]


def _free_bytes(folder: Path) -> int:
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free
