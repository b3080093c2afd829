"""Upload spooled checkpoints, repair what they share, and delete what none needs.

All in a process of lowest priority and bounded memory.

The process may be killed at any point. Its successor reuses the chunks that it had sent, and a checkpoint is
listed only once it is complete.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import structlog

from grpo_orch.checkpoint.store import layout
from grpo_orch.checkpoint.store.errors import Corrupt, NotFound, StoreError
from grpo_orch.checkpoint.store.run_store import Entry, Store
from grpo_orch.checkpoint.stream import chunks, transfer
from grpo_orch.checkpoint.stream.catalog import Catalog, Checkpoint, Revision
from grpo_orch.checkpoint.stream.manifest import files_below
from grpo_orch.checkpoint.stream.spool import Seal, Spool, UploaderState
from grpo_orch.checkpoint.stream.transfer import read_manifest
from grpo_orch.policies.model.vocabulary import PolicyVersion

log = structlog.get_logger()

POLL_S = 0.2  # between checks for a sealed slot
RETRY_WAIT_S = 2.0
UPKEEP_S = 600.0  # between repairs of shared chunks, if no checkpoint is stored meanwhile
REPORT_S = 0.5

Retire = Callable[[Sequence[Checkpoint], Seal | None], Sequence[PolicyVersion]]
Tidy = Callable[[Sequence[Checkpoint]], object]


class Uploader:
    """Uploads slot after slot, deletes retired checkpoints, and repairs the chunks that all checkpoints share.

    Args:
        store: the run's store.
        spool: this machine's.
        writer: this node, for the catalog.
        retire: returns the versions to remove, from the listed checkpoints and the seal of the newest stored one.
        is_replaced: whether the run has continued without this version, so that it must not be listed.
        tidy: removes other objects that the listed checkpoints do not need.
    """

    def __init__(
        self,
        store: Store,
        spool: Spool,
        writer: str,
        retire: Retire,
        is_replaced: Callable[[PolicyVersion], bool],
        tidy: Tidy = lambda _: None,
    ) -> None:
        self._store = store
        self._spool = spool
        self._catalog = Catalog(store, writer)
        self._retire = retire
        self._is_replaced = is_replaced
        self._tidy = tidy
        self._newest: Seal | None = None
        self._upkeep = Upkeep(store, self._catalog)
        self._repaired_s = time.monotonic()
        self._collector = Collector(store, self._catalog, lambda listed: self._retire(listed, self._newest))
        self._state = UploaderState()

    def run(self) -> None:
        """Run until the process is killed. Failed uploads are retried."""
        while True:
            waiting = self._spool.sealed()
            if not waiting:
                if self._newest is not None and time.monotonic() - self._repaired_s > UPKEEP_S:
                    self._repair_shared(self._newest)
                time.sleep(POLL_S)
                continue
            try:
                self.store_one(*waiting[0])
            except (StoreError, OSError) as error:  # the latter: a frozen file is missing for now
                log.warning("checkpoint_upload_failed", checkpoint=waiting[0][0].version, error=str(error))
                self._spool.report(replace(self._state, error=str(error)))
                time.sleep(RETRY_WAIT_S)
                continue
            try:
                self._collector.collect(time.time())
                self._tidy(self._catalog.newest().checkpoints)
            except StoreError as error:  # the next collection continues
                log.warning("collection_failed", error=str(error))

    def store_one(self, seal: Seal, slot: Path) -> None:
        """Store one slot and release it. Raises StoreError, OSError."""
        if self._is_replaced(seal.at):
            log.warning("checkpoint_dropped", checkpoint=seal.version, reason="the run has continued without it")
            self._spool.release(slot)
            return
        files = [*files_below(slot), *((name, Path(path)) for name, path in sorted(seal.frozen.items()))]
        report = _Report(self._spool, replace(self._state, storing=seal.version, total_bytes=_size(files)))
        began_s = time.monotonic()
        self._repair_shared(seal)  # first, so that the upload can reuse repaired chunks
        transfer.upload(self._store, self._catalog, files, seal.at, seal.made_at_s, {}, progress=report.add)
        self._newest = seal
        took_s = round(time.monotonic() - began_s, 3)
        self._state = UploaderState(stored=seal.version, took_s=took_s)
        self._spool.report(self._state)
        self._spool.release(slot)
        log.info("checkpoint_stored", checkpoint=seal.version, size_bytes=_size(files), took_s=took_s)

    def _repair_shared(self, seal: Seal) -> None:
        """Repair the chunks that earlier checkpoints share with this one. A failure is only logged."""
        self._repaired_s = time.monotonic()
        try:
            self._upkeep.repair(time.time(), seal.frozen)
        except (StoreError, OSError) as error:
            log.warning("chunk_repair_failed", error=str(error))


class _Report:
    """Reports the progress of an upload to the trainer. Thread-safe."""

    def __init__(self, spool: Spool, state: UploaderState) -> None:
        self._spool = spool
        self._state = state
        self._reported_s = time.monotonic()
        self._lock = threading.Lock()
        spool.report(state)

    def add(self, size_bytes: int) -> None:
        with self._lock:
            self._state = replace(self._state, done_bytes=self._state.done_bytes + size_bytes)
            if time.monotonic() - self._reported_s > REPORT_S:
                self._reported_s = time.monotonic()
                self._spool.report(self._state)


def _size(files: list[tuple[str, Path]]) -> int:
    return sum(path.stat().st_size for _, path in files)


def yield_to_others() -> None:
    """Give this process the lowest CPU priority, so that it does not slow the trainer."""
    os.nice(19)


# Check and repair the chunks that all checkpoints share.
#
# A frozen base model is stored once, and each checkpoint refers to it: one lost object would break them all. While
# the trainer's machine exists, it has the files. A listing shows chunks that are missing or of a wrong size (64 GB
# are 4,000 chunks, five requests), but not wrong bytes. So each check reads a few chunks in turn: 128 MB a check,
# 64 GB in 500 checks.

CHUNKS_READ = 8  # per check


@dataclass(frozen=True, slots=True)
class _Source:
    """A chunk's bytes in a file of this machine."""

    path: Path
    offset: int
    size_bytes: int


class Upkeep:
    """Repairs the stored copies of files that this machine has unchanged.

    Args:
        store: the run's store.
        catalog: of the same run.
    """

    def __init__(self, store: Store, catalog: Catalog) -> None:
        self._store = store
        self._catalog = catalog
        self._turn = 0

    def repair(self, now_s: float, frozen: Mapping[str, str]) -> list[str]:
        """Store the damaged chunks of `frozen`, path by name as in a seal, again; return their names.

        Under the same names they repair every checkpoint that refers to them. A chunk that is no longer needed
        when it arrives is collected as unreferenced. Raises StoreError, OSError.
        """
        revision = self._catalog.newest()
        sources = self._sources(revision, frozen)
        if not sources:
            return []
        damaged = self._damaged(revision, sources)
        repaired = [name for name in damaged if self._send(name, sources[name])]
        self._store.secure([f"{layout.BLOBS}/{name}" for name in repaired])
        cleared = set(repaired) & set(revision.suspect)
        if cleared:
            self._catalog.change(
                now_s, lambda r: replace(r, suspect=[name for name in r.suspect if name not in cleared])
            )
        if damaged:
            log.warning("shared_chunks_damaged", damaged=len(damaged), repaired=len(repaired))
        return repaired

    def _sources(self, revision: Revision, frozen: Mapping[str, str]) -> dict[str, _Source]:
        """Return the chunks of listed checkpoints that this machine has, by name."""
        sources = dict[str, _Source]()
        for checkpoint in revision.checkpoints if frozen else ():
            try:
                files = read_manifest(self._store, checkpoint).files
            except (NotFound, Corrupt) as error:  # retired at this moment, or damaged: its chunks are unknown
                log.warning("checkpoint_unreadable", checkpoint=checkpoint.version, error=str(error))
                continue
            for file in files:
                if file.name in frozen:
                    path = Path(frozen[file.name])
                    sources |= {name: _Source(path, at, size) for name, at, size in chunks.places(file)}
        return sources

    def _damaged(self, revision: Revision, sources: Mapping[str, _Source]) -> list[str]:
        stored = {entry.key: entry.size_bytes for entry in self._store.entries(layout.BLOBS)}
        damaged = {
            name
            for name, source in sources.items()
            if stored.get(f"{layout.BLOBS}/{name}") != source.size_bytes or name in revision.suspect
        }
        others = sorted(set(sources) - damaged)
        read = [others[(self._turn + index) % len(others)] for index in range(min(CHUNKS_READ, len(others)))]
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


# Deletes unneeded objects in three steps; a crash between them is harmless.
#
# A catalog revision removes the retired checkpoints and condemns their objects and all unreferenced chunks. Then
# these objects are deleted. Then another revision removes them from `condemned`. After a crash the next collection
# continues. An upload in progress elsewhere is safe: see `checkpoint.stream.catalog`.

# An unreferenced chunk younger than this may belong to an upload in progress, which would have to repeat it.
IN_FLIGHT_S = 3600.0

Retention = Callable[[Sequence[Checkpoint]], Sequence[PolicyVersion]]


class Collector:
    """Deletes one run's unneeded objects. Caches the chunks of listed manifests, which never change.

    Args:
        store: the run's store.
        catalog: of the same run.
        retention: returns the versions to delete.
    """

    def __init__(self, store: Store, catalog: Catalog, retention: Retention) -> None:
        self._store = store
        self._catalog = catalog
        self._retention = retention
        self._chunks: dict[str, frozenset[str]] = {}  # by manifest

    def collect(self, now_s: float) -> None:
        """Retire checkpoints and delete unneeded objects.

        Raises StoreError, among them Corrupt and NotFound for an unreadable listed manifest: then nothing is
        deleted.
        """
        retired: list[PolicyVersion] = []

        def condemn(revision: Revision) -> Revision:
            # Repeated for each attempt: a revision in between may have added objects.
            unwanted = set(self._retention(revision.checkpoints))
            kept = [checkpoint for checkpoint in revision.checkpoints if checkpoint.at not in unwanted]
            removed = [checkpoint for checkpoint in revision.checkpoints if checkpoint.at in unwanted]
            retired[:] = [checkpoint.at for checkpoint in removed]
            condemned = self._unneeded(kept, removed, now_s) | set(revision.condemned)
            suspect = [name for name in revision.suspect if f"{layout.BLOBS}/{name}" not in condemned]
            return replace(revision, checkpoints=kept, condemned=sorted(condemned), suspect=suspect)

        for prefix in (layout.BLOBS, layout.POLICIES):
            self._store.sweep(prefix, IN_FLIGHT_S)
        revision = self._catalog.change(now_s, condemn)
        condemned = set(revision.condemned)
        if condemned:
            self._store.delete(sorted(condemned))
            self._catalog.change(now_s, lambda r: replace(r, condemned=sorted(set(r.condemned) - condemned)))
        self._chunks = {listed.manifest: self._chunks[listed.manifest] for listed in revision.checkpoints}
        if condemned:
            log.info("checkpoints_collected", retired=[str(at) for at in retired], objects=len(condemned))

    def _unneeded(self, kept: list[Checkpoint], removed: list[Checkpoint], now_s: float) -> set[str]:
        """Return the objects that no kept checkpoint refers to, including those of interrupted uploads."""
        needed = {checkpoint.manifest for checkpoint in kept}
        for checkpoint in kept:
            needed |= self._objects(checkpoint)
        unneeded = {checkpoint.manifest for checkpoint in removed}
        for checkpoint in removed:
            # Already collected, or damaged: its chunks count as unreferenced.
            with contextlib.suppress(NotFound, Corrupt):
                unneeded |= self._objects(checkpoint)
        for entry in [*self._store.entries(layout.BLOBS), *self._store.entries(layout.CHECKPOINTS)]:
            if _is_ours(entry) and now_s - entry.modified_at.timestamp() > IN_FLIGHT_S:
                unneeded.add(entry.key)
        return unneeded - needed

    def _objects(self, checkpoint: Checkpoint) -> frozenset[str]:
        if checkpoint.manifest not in self._chunks:
            manifest = read_manifest(self._store, checkpoint)
            self._chunks[checkpoint.manifest] = frozenset(f"{manifest.root}/{chunk}" for chunk in manifest.chunks)
        return self._chunks[checkpoint.manifest]


def _is_ours(entry: Entry) -> bool:
    """Whether the object has a name of this project; foreign objects in the prefix are never deleted."""
    return layout.is_checkpoint(entry.key) or layout.chunk_of(entry.key) is not None
