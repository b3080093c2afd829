"""All weights of a policy, stored while its successors are published, so that no step waits for them.

The file of the weights is overwritten meanwhile, so each chunk is of this policy or of a later one, or of two: a
fuzzy snapshot, as databases take them. Deltas overwrite with values. So whoever applies all that follow this
policy, up to one that was published after the last chunk was read, has that one's weights whatever he began with,
and proves it by their digest.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from checkpoint.store import layout
from checkpoint.store.run_store import Store
from checkpoint.stream import chunks, manifest
from checkpoint.stream.chunks import Sending
from checkpoint.stream.manifest import Manifest
from checkpoint.weights import safetensors
from policies.serving.wire import PolicyRef, labelled_version

TRANSFERS = 4  # at a time, each with a chunk in memory: 65 GB in 3 minutes at S3's 90 MB/s for each


class Stopped(Exception):
    """Nobody needs the snapshot any more, or the process ends."""


class Snapshot:
    """Stores the weights in a file as they were when `of` was published, or later.

    Args:
        of: the policy that the file holds now.
        idle: set while nothing is published: publications go before.
    """

    def __init__(self, store: Store, of: PolicyRef, weights: Path, idle: threading.Event) -> None:
        self.of = of
        self._store = store
        self._weights = weights
        self._idle = idle
        self._size_bytes = weights.stat().st_size
        self._stopped = False
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="snapshot")
        self.stored: Future[Manifest] = self._pool.submit(self._run)

    def stop(self) -> None:
        """What is not sent yet need not be: the weights are no longer what deltas follow."""
        self._stopped = True
        self._pool.shutdown(wait=False)

    def _run(self) -> Manifest:
        """Raises Stopped, StoreError (Corrupt: another has begun the file anew), OSError."""
        with Sending(
            self._store, self.of.prefix, stored={}, content=self._content, transfers=TRANSFERS
        ) as sending:
            files = sending.finish([(layout.MODEL, self._weights)])
        meta = {manifest.KIND: manifest.FUZZY, manifest.WEIGHTS: self.of.digest}
        version = labelled_version(self.of.label)
        return manifest.publish_once(
            self._store, self.of.prefix, files, version, time.time(), meta, layout.SNAPSHOT
        )

    @contextmanager
    def _content(self, path: Path, offset: int) -> Iterator[memoryview]:
        """A copy of a chunk, for the file may change while it is hashed and sent."""
        while not self._idle.wait(timeout=1.0):
            self._go_on()
        self._go_on()
        with path.open("rb") as file:
            size_bytes = min(chunks.CHUNK_BYTES, self._size_bytes - offset)  # Corrupt where it is shorter by now
            yield safetensors.read(file.fileno(), offset, size_bytes).data

    def _go_on(self) -> None:
        # A process that ends waits for its pools' threads: they end at the next chunk.
        if self._stopped or not threading.main_thread().is_alive():
            raise Stopped
