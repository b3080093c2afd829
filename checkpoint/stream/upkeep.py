"""Checks what all checkpoints share while its source is at hand, and stores damaged chunks again.

A frozen base model is stored once, and each checkpoint refers to it: one lost object would break them all. While
the trainer's machine lives, the files are still there. A listing shows what is missing or of a wrong size: 64 GB
are 4,000 chunks, five requests. It does not show wrong bytes, so each check reads a few chunks in turn: 128 MB a
check, 64 GB in 500 checks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import structlog

from checkpoint.store import layout
from checkpoint.store.errors import Corrupt, NotFound
from checkpoint.store.run_store import Entry, Store
from checkpoint.stream import chunks
from checkpoint.stream.catalog import Catalog, Checkpoint, Revision
from checkpoint.stream.chunks import File
from checkpoint.stream.transfer import read_manifest
from policies.model.vocabulary import PolicyVersion

log = structlog.get_logger()

READ_AT_A_CHECK = 8  # chunks


@dataclass(frozen=True, slots=True)
class _Source:
    """Where a chunk's bytes are on this machine."""

    path: Path
    offset: int
    size_bytes: int


class Upkeep:
    """Repairs the stored copies of files that lie unchanged on this machine.

    Args:
        store: the run's store.
        catalog: of the same run.
    """

    def __init__(self, store: Store, catalog: Catalog) -> None:
        self._store = store
        self._catalog = catalog
        self._names: frozenset[str] = frozenset()  # of what lies here
        self._files: dict[str, list[File]] = {}  # those of them that a manifest has; manifests never change
        self._turn = 0

    def repair(self, now_s: float, frozen: Mapping[str, str]) -> list[str]:
        """Store the damaged chunks of `frozen`, path by name as in a seal, again; return their names.

        They keep their names, so that every checkpoint that refers to them is whole again. One that is no longer
        needed when it arrives is collected as unreferenced. Raises StoreError, OSError.
        """
        present = self._catalog.newest()
        wanted = self._wanted(present, frozen)
        if not wanted:
            return []
        damaged = self._damaged(present, wanted)
        repaired = [name for name in damaged if self._send(name, wanted[name])]
        self._store.secure([f"{layout.BLOBS}/{name}" for name in repaired])
        cleared = set(repaired) & set(present.suspect)
        if cleared:
            self._catalog.change(
                now_s, lambda r: replace(r, suspect=[one for one in r.suspect if one not in cleared])
            )
        if damaged:
            log.warning("shared_chunks_damaged", damaged=len(damaged), stored_again=len(repaired))
        return repaired

    def _wanted(self, present: Revision, frozen: Mapping[str, str]) -> dict[str, _Source]:
        """The chunks of listed checkpoints whose bytes are here."""
        known = self._files if frozen.keys() == self._names else {}
        self._files, self._names = {}, frozenset(frozen)
        same = {_identity(file): file for files in known.values() for file in files}
        for one in present.checkpoints:
            if one.manifest in known:
                self._files[one.manifest] = known[one.manifest]
                continue
            try:
                files = [file for file in read_manifest(self._store, one).files if file.name in frozen]
            except (NotFound, Corrupt) as error:  # retired at this moment, or damaged: its chunks are unknown
                log.warning("checkpoint_unreadable", checkpoint=one.version, error=str(error))
                continue
            # A thousand checkpoints may name the same thousands of chunks: they are remembered once.
            self._files[one.manifest] = [same.setdefault(_identity(file), file) for file in files]
        distinct = {id(file): file for files in self._files.values() for file in files}
        return {
            chunk: _Source(Path(frozen[file.name]), offset, min(chunks.CHUNK_BYTES, file.size_bytes - offset))
            for file in distinct.values()
            for offset, chunk in zip(chunks.offsets(file.size_bytes), file.chunks, strict=True)
        }

    def _damaged(self, present: Revision, wanted: Mapping[str, _Source]) -> list[str]:
        stored = {entry.key: entry.size_bytes for entry in self._store.entries(layout.BLOBS)}
        damaged = {
            name
            for name, source in wanted.items()
            if stored.get(f"{layout.BLOBS}/{name}") != source.size_bytes or name in present.suspect
        }
        sound = sorted(set(wanted) - damaged)
        read = [sound[(self._turn + place) % len(sound)] for place in range(min(READ_AT_A_CHECK, len(sound)))]
        self._turn += len(read)
        return sorted(damaged | set(chunks.check(self._store, layout.BLOBS, read)))

    def _send(self, name: str, source: _Source) -> bool:
        """Store one chunk, unless the file has changed. Raises StoreError, OSError."""
        if source.path.is_file() and source.path.stat().st_size >= source.offset + source.size_bytes:
            with chunks.window(source.path, source.offset) as content:
                if chunks.matches(content, name):
                    self._store.put(f"{layout.BLOBS}/{name}", content)
                    return True
        log.warning("source_changed", file=str(source.path), chunk=name)
        return False


def _identity(file: File) -> tuple[str, ...]:
    return (file.name, *file.chunks)


def missing_objects(store: Store, listed: Sequence[Checkpoint]) -> dict[str, list[str]]:
    """Return a line for each object that is missing or of a wrong size, by version; none for whole checkpoints.

    Reads no chunk: only `transfer.verify` finds wrong bytes. Raises StoreError.
    """
    stored = {entry.key: entry.size_bytes for entry in store.entries(layout.BLOBS)}
    return {one.version: list(_absent(store, one, stored)) for one in listed}


def _absent(store: Store, one: Checkpoint, stored: Mapping[str, int]) -> Iterator[str]:
    try:
        found = read_manifest(store, one)
    except (NotFound, Corrupt) as error:
        yield str(error)
        return
    for file in found.files:
        for offset, chunk in zip(chunks.offsets(file.size_bytes), file.chunks, strict=True):
            key, wanted_bytes = f"{found.root}/{chunk}", min(chunks.CHUNK_BYTES, file.size_bytes - offset)
            if (size_bytes := stored.get(key)) is None:
                yield f"{key} of {file.name} is missing"
            elif size_bytes != wanted_bytes:
                yield f"{key} of {file.name} has {size_bytes} bytes, not {wanted_bytes}"


# Deletes what no checkpoint needs any more, in three steps; a crash between them does no harm.
#
# A catalog revision removes the checkpoints that retention retires and condemns their objects, along with every
# unreferenced chunk. Then these are deleted. Then a revision forgets them. After a crash the next collection goes
# on. An upload in progress elsewhere is safe: see `checkpoint.stream.catalog`.

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
