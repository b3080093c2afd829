"""Deletes what no checkpoint needs any more, in three steps; a crash between them does no harm.

A catalog revision removes the checkpoints that retention retires and condemns their objects, along with every
unreferenced chunk. Then these are deleted. Then a revision forgets them. After a crash the next collection goes
on. An upload in progress elsewhere is safe: see `checkpoint.stream.catalog`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import structlog

from checkpoint.store import layout
from checkpoint.store.errors import Corrupt, NotFound
from checkpoint.store.run_store import Entry, Store
from checkpoint.stream.catalog import Catalog, Checkpoint, Revision
from checkpoint.stream.transfer import read_manifest
from policies.model.vocabulary import PolicyVersion

log = structlog.get_logger()

# An unreferenced chunk younger than this may belong to an upload in progress, which would have to send it again.
IN_FLIGHT_S = 3600.0

Retention = Callable[[Sequence[Checkpoint]], Sequence[PolicyVersion]]


@dataclass(frozen=True, slots=True)
class Collected:
    """What one collection did."""

    retired: tuple[str, ...]  # PolicyVersions as text
    deleted: int  # objects


class Collector:
    """Collects for one run. Remembers which chunks a listed manifest names; manifests never change.

    Args:
        store: the run's store.
        catalog: of the same run.
        retention: returns the versions that may go.
    """

    def __init__(self, store: Store, catalog: Catalog, retention: Retention) -> None:
        self._store = store
        self._catalog = catalog
        self._retention = retention
        self._chunks: dict[str, frozenset[str]] = {}  # by manifest

    def collect(self, now_s: float) -> Collected:
        """Retire, delete, forget.

        Raises Corrupt, NotFound (a listed manifest cannot be read: then nothing is deleted), StoreError.
        """
        retired: list[PolicyVersion] = []

        def condemn(present: Revision) -> Revision:
            # Listed anew at each try: a revision in between may have brought new objects.
            going = set(self._retention(present.checkpoints))
            kept = [one for one in present.checkpoints if one.at not in going]
            gone = [one for one in present.checkpoints if one.at in going]
            retired[:] = [one.at for one in gone]
            condemned = self._unneeded(kept, gone, now_s) | set(present.condemned)
            suspect = [name for name in present.suspect if f"{layout.BLOBS}/{name}" not in condemned]
            return replace(present, checkpoints=kept, condemned=sorted(condemned), suspect=suspect)

        for prefix in (layout.BLOBS, layout.POLICIES):
            self._store.sweep(prefix, IN_FLIGHT_S)
        revision = self._catalog.change(now_s, condemn)
        doomed = set(revision.condemned)
        if doomed:
            self._store.delete(sorted(doomed))
            self._catalog.change(now_s, lambda r: replace(r, condemned=sorted(set(r.condemned) - doomed)))
        self._chunks = {one.manifest: self._chunks[one.manifest] for one in revision.checkpoints}
        if doomed:
            log.info("collected", retired=[str(at) for at in retired], objects=len(doomed))
        return Collected(tuple(str(at) for at in retired), len(doomed))

    def _unneeded(self, kept: list[Checkpoint], gone: list[Checkpoint], now_s: float) -> set[str]:
        """Objects that no kept checkpoint refers to: those of retired ones, and what aborted uploads left."""
        needed = {one.manifest for one in kept}
        for one in kept:
            needed |= self._objects(one)
        unneeded = {one.manifest for one in gone}
        for one in gone:
            # Already collected, or damaged: its chunks go as unreferenced ones.
            with contextlib.suppress(NotFound, Corrupt):
                unneeded |= self._objects(one)
        for entry in [*self._store.entries(layout.BLOBS), *self._store.entries(layout.CHECKPOINTS)]:
            if _is_ours(entry) and now_s - entry.modified_at.timestamp() > IN_FLIGHT_S:
                unneeded.add(entry.key)
        return unneeded - needed

    def _objects(self, one: Checkpoint) -> frozenset[str]:
        if one.manifest not in self._chunks:
            found = read_manifest(self._store, one)
            self._chunks[one.manifest] = frozenset(f"{found.root}/{chunk}" for chunk in found.chunks)
        return self._chunks[one.manifest]


def _is_ours(entry: Entry) -> bool:
    """Whether this project names objects so; foreign objects in the prefix are left alone."""
    return layout.is_checkpoint(entry.key) or layout.chunk_of(entry.key) is not None
