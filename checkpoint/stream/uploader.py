"""Upload spooled checkpoints, in a process of lowest priority and bounded memory.

The process may be killed at any point. Its successor reuses the chunks that it had sent, and a checkpoint is
listed only once it is complete.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import structlog

from grpo_orch.checkpoint.store.errors import StoreError
from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.checkpoint.stream import transfer
from grpo_orch.checkpoint.stream.catalog import Catalog, Checkpoint
from grpo_orch.checkpoint.stream.manifest import files_below
from grpo_orch.checkpoint.stream.spool import Seal, Spool, UploaderState
from grpo_orch.checkpoint.stream.upkeep import Collector, Upkeep
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
