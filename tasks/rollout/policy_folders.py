"""Policies on a rollout node's disk: fetch one at a time, and delete older ones when space is needed.

Deltas are staged first, so that engines can apply them (see `policy_loader`). Then they are applied to the file of
weights, all staged deltas in one pass and in place, so that no second copy of the model is written. Meanwhile the
folder's name begins with a dot, so that it is never used as a policy. It gets the policy's name once all tensors
were read back and match its digest.
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

from grpo_orch.checkpoint.store import layout
from grpo_orch.checkpoint.store.errors import Corrupt, NotFound, StoreError
from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.checkpoint.stream import manifest
from grpo_orch.checkpoint.stream.chunks import Progress
from grpo_orch.checkpoint.stream.manifest import Manifest
from grpo_orch.checkpoint.weights import delta, safetensors
from grpo_orch.checkpoint.weights.safetensors import DIGEST_BYTES
from grpo_orch.policies.serving.joining import POLICY, Stage
from grpo_orch.policies.serving.wire import PolicyRef

log = structlog.get_logger()

# Maximum length of a route: more than publishers append to a whole policy, so that chains of two publishers work.
DELTAS_MAX = 64


@dataclass(frozen=True, slots=True)
class Route:
    """Deltas that lead to a policy, either from held weights with the digest `start`, or from `whole`."""

    deltas: list[Manifest]
    start: str = ""
    whole: Manifest | None = None


def route_to(load: Callable[..., Manifest], wanted: Manifest, held: Collection[str]) -> Route:
    """Find the shortest route from held weights, else from the nearest whole policy.

    Policies are identified by digest: two trainers may have published the same version, and a rollback leads to
    older ones.

    Args:
        load: reads a manifest by its prefix in the store, and optionally its file name.
        held: digests of weights.

    Raises NotFound, Corrupt (also for deltas without a whole policy), StoreError.
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
                lost = error  # held weights may be further back
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
            raise Corrupt(f"{deltas[0].root} is a delta to {base}, but {at.root} holds {digest_of(at)}")
    if from_whole is None:
        raise lost or Corrupt(f"{wanted.root}: {len(deltas)} deltas without a whole policy before them")
    return from_whole


def digest_of(policy: Manifest) -> str:
    """Return the digest in the policy's label."""
    return policy.digest_as("0" * 2 * DIGEST_BYTES)


FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
STAGED = ".staged"  # fetched deltas, and the other files of policies
APPLYING = ".applying"  # weights that are being overwritten


class Superseded(Exception):
    """Another policy is wanted now."""


@dataclass(frozen=True, slots=True)
class Staged:
    """Verified deltas that lead from an engine's weights to a policy.

    Attributes:
        deltas: files, in order.
        digests: of the weights before the first delta and after each.
        extras: folder of the files published with the weights.
    """

    deltas: list[Path]
    digests: list[str]
    extras: Path


class PolicyFolders:
    """A folder with a subfolder for each policy, named by its label.

    One thread may fetch or settle while another one stages.

    Args:
        store: the run's store.
        root: a folder that only this object uses.
    """

    def __init__(self, store: Store, root: Path) -> None:
        self._store = store
        self._root = root
        self.fetched_bytes = 0  # by the last `fetch` or `stage`
        self.fetching: Stage | None = None  # progress of a whole policy
        self._pool = ThreadPoolExecutor(delta.WORKERS, thread_name_prefix="weights")
        self.file_lock = threading.Lock()  # for changes of the file of weights
        # By prefix. Staged deltas may be removed from the store before they are applied to the file.
        self._known = dict[str, Manifest]()
        self._applied = list[Path]()  # staged deltas applied to the file

    def fetch(self, wanted: PolicyRef, is_wanted: Callable[[], bool]) -> Path:
        """Return the folder with the policy's verified files. An older policy may have been turned into it.

        Raises Superseded at the next part once `is_wanted` returns False, StoreError, and OSError if the files
        cannot be written, even after deleting older policies. Fetched parts stay for the next call: later policies
        may be deltas to the same whole policy, whose transfer may take longer than a step.
        """
        folder, sizes_bytes = self._root / wanted.label, list[int]()

        def check(size_bytes: int) -> None:
            sizes_bytes.append(size_bytes)
            if not is_wanted():
                raise Superseded

        with self.file_lock:
            try:
                if not folder.exists():
                    self._build(wanted, folder, check)
                self._delete_parts()
                self.fetched_bytes = sum(sizes_bytes)
            except OSError as error:
                raise OSError(self._free_up(error)) from error
        return folder

    def keep_only(self, folder: Path) -> None:
        """Delete all other policies and all staged files."""
        self._known.clear()
        for other in self._root.iterdir():
            if other != folder:
                shutil.rmtree(other, ignore_errors=True)

    def stage(self, wanted: PolicyRef, base: str, is_wanted: Callable[[], bool]) -> Staged | None:
        """Fetch and verify the deltas since the weights with the digest `base`, which an engine holds.

        Returns None if no deltas start there, or the disk has no space for them. Raises Superseded at the next
        part once `is_wanted` returns False, StoreError.
        """
        sizes_bytes = list[int]()

        def check(size_bytes: int) -> None:
            sizes_bytes.append(size_bytes)
            if not is_wanted():
                raise Superseded

        policy = self._manifest_of(wanted)
        route = route_to(self._load, policy, (base,))
        if route.whole is not None:
            return None
        try:
            deltas, extras = self._stage(route, policy, check)
        except (Corrupt, NotFound, OSError) as error:
            log.warning("deltas_not_staged", policy=wanted.label, reason=str(error))
            return None
        self.fetched_bytes = sum(sizes_bytes)
        self._known |= {known.root: known for known in [*route.deltas, policy]}
        return Staged(deltas, [base, *map(digest_of, route.deltas)], extras)

    def settle(self, wanted: PolicyRef, is_wanted: Callable[[], bool]) -> Path:
        """Update the file to a policy that an engine holds, and delete older policies and their deltas.

        Raises like `fetch`.
        """
        before = self._applied
        folder = self.fetch(wanted, is_wanted)
        spent = [path for path in before if path not in self._applied]
        for other in [path for path in self._root.glob("[!.]*") if path != folder] + spent:
            shutil.rmtree(other, ignore_errors=True)
        known = dict(self._known)  # a copy: another thread may add entries, whose deltas are staged already
        kept = {path.name for path in (self._root / STAGED).glob("*")}
        for root in [root for root, policy in known.items() if _delta_name(policy) not in kept]:
            self._known.pop(root, None)
        return folder

    def _build(self, wanted: PolicyRef, folder: Path, check: Progress) -> None:
        """Create the folder, from a held policy if possible. Raises StoreError, OSError."""
        policy = self._manifest_of(wanted)
        held = self._held()
        route = route_to(self._load, policy, held)
        if route.whole is None:
            try:
                self._overwrite(held[route.start], route, policy, folder, check)
            except (Corrupt, NotFound) as error:
                log.warning("deltas_not_applied", policy=wanted.label, deltas=len(route.deltas), reason=str(error))
                route = route_to(self._load, policy, ())
        if route.whole is not None:
            self._build_from_whole(route, policy, folder, check)
        log.info(
            "policy_fetched",
            policy=wanted.label,
            deltas=len(route.deltas),
            whole=route.whole.version if route.whole is not None else None,
        )

    def _manifest_of(self, wanted: PolicyRef) -> Manifest:
        policy = self._load(wanted.prefix)
        stored = PolicyRef(policy.version, wanted.prefix, policy.digest_as(wanted.digest))
        if stored != wanted:
            raise Corrupt(f"{wanted.prefix} holds policy {stored.label}, not {wanted.label}")
        return policy

    def _load(self, prefix: str, name: str = layout.MANIFEST) -> Manifest:
        known = self._known.get(prefix) if name == layout.MANIFEST else None
        return known or manifest.load(self._store, prefix, name)

    def _stage(self, route: Route, wanted: Manifest, check: Progress) -> tuple[list[Path], Path]:
        """Fetch and verify a route's deltas and the other files of the policy. Raises StoreError, OSError."""
        staged, deltas = self._root / STAGED, list[Path]()
        for step in route.deltas:
            path = staged / _delta_name(step) / delta.NAME
            deltas.append(path)
            try:
                delta.verify(path)
            except (FileNotFoundError, Corrupt):  # Corrupt: the file was damaged after an earlier fetch
                files = [file for file in step.files if file.name == delta.NAME]
                manifest.materialize(self._store, step.root, files, path.parent, check)
                delta.verify(path)
        extras = staged / f"{wanted.version}@{digest_of(wanted)}"
        if not extras.exists():
            files = [file for file in wanted.files if file.name not in (layout.MODEL, delta.NAME)]
            manifest.materialize(self._store, wanted.root, files, extras, check)
        return deltas, extras

    def _build_from_whole(self, route: Route, wanted: Manifest, folder: Path, check: Progress) -> None:
        """Fetch the whole policy, unless an earlier call has, and apply the route's deltas."""
        assert route.whole is not None
        start = self._root / f"{route.whole.version}@{digest_of(route.whole)}" if route.deltas else folder
        is_fuzzy = route.whole.meta.get(manifest.KIND) == manifest.FUZZY
        if is_fuzzy:  # not a policy until the deltas are applied
            start = start.with_name(f".{start.name}")
        if not start.exists():
            self._delete_parts(start)
            files = [file for file in route.whole.files if file.name != delta.NAME]
            progress = self._counted(sum(file.size_bytes for file in files), check)
            try:
                manifest.materialize(self._store, route.whole.root, files, start, progress)
            finally:
                self.fetching = None
            if manifest.WEIGHTS in route.whole.meta and not is_fuzzy:
                self._verify(start, digest_of(route.whole))
        if route.deltas:
            self._overwrite(start, route, wanted, folder, check)

    def _counted(self, total_bytes: int, check: Progress) -> Progress:
        """Extend `check` to report progress in `fetching`."""
        lock, self.fetching = threading.Lock(), Stage(POLICY, 0, total_bytes)

        def progress(size_bytes: int) -> None:
            with lock:
                if self.fetching is not None:
                    self.fetching = replace(self.fetching, done_bytes=self.fetching.done_bytes + size_bytes)
            check(size_bytes)

        return progress

    def _overwrite(self, start: Path, route: Route, wanted: Manifest, folder: Path, check: Progress) -> None:
        """Turn the policy in `start` into the wanted one. Raises StoreError, OSError.

        All files are fetched before the overwrite, which is never interrupted: a partial one loses the policy.
        """
        deltas, extras = self._stage(route, wanted, check)
        applying = self._root / APPLYING
        shutil.rmtree(applying, ignore_errors=True)
        start.rename(applying)
        weights = applying / layout.MODEL
        delta.apply(deltas, weights, digest_of_folder(start), self._pool)
        weights.rename(extras / layout.MODEL)
        self._verify(extras, digest_of(wanted))
        extras.rename(folder)
        self._applied = [path.parent for path in deltas]

    def _verify(self, folder: Path, digest: str) -> None:
        """Raise Corrupt, and delete the folder, unless its weights have that digest."""
        actual = safetensors.content_of(folder / layout.MODEL, self._pool)
        if actual != digest:
            shutil.rmtree(folder)
            raise Corrupt(f"{folder.name} holds weights {actual}, not {digest}")

    def _held(self) -> dict[str, Path]:
        """Return the folders of policies with all weights, by digest."""
        folders = [folder for folder in self._root.glob("[!.]*") if (folder / layout.MODEL).is_file()]
        return {digest: folder for folder in folders if (digest := digest_of_folder(folder))}

    def _delete_parts(self, folder: Path | None = None) -> None:
        """Delete partial downloads, except for staged files and the part of this folder."""
        kept = None if folder is None else manifest.part_of(folder)
        for part in self._root.glob(".*"):
            if part not in (kept, self._root / STAGED):
                shutil.rmtree(part, ignore_errors=True)

    def _free_up(self, error: OSError) -> str:
        """Delete all policies if the disk is full: vLLM does not need the files. Returns an error message."""
        if error.errno not in FULL:
            return f"{self._root}: {error.strerror or error}"
        before = _free_bytes(self._root)
        shutil.rmtree(self._root, ignore_errors=True)
        after = _free_bytes(self._root)
        log.warning("disk_full", folder=str(self._root), freed_mib=(after - before) >> 20, free_mib=after >> 20)
        return f"{self._root}: {error.strerror}; {after >> 20} MiB are free after deleting all older policies"


def _delta_name(policy: Manifest) -> str:
    """Return a folder name for a delta from its base and its result: two deltas may lead to the same weights."""
    return f"{policy.meta.get(manifest.BASE, '').partition('@')[2]}-{digest_of(policy)}"


def digest_of_folder(folder: Path) -> str:
    """Return the digest in a folder's name; empty without one."""
    return folder.name.partition("@")[2]


def _free_bytes(folder: Path) -> int:
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free
