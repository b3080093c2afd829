"""Files in the store as chunks that are named by their content.

Every chunk is one object, written by one PUT: a killed process leaves no multipart upload behind, its finished
chunks are not sent again, and a file that is already stored, such as a frozen reference model, is not stored
twice. Transfers run in parallel; their number bounds the memory.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog
from blake3 import blake3

from grpo_orch.checkpoint.store.errors import Corrupt, NotFound
from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.policies.serving.joining import Stage

log = structlog.get_logger()

# Large enough to make a request's latency negligible at 100 MB/s, small enough to hold several in memory.
CHUNK_BYTES = 16 * 1024 * 1024
# Concurrent transfers: S3 serves 85 to 90 MB/s each (docs.aws.amazon.com, "Performance design patterns for Amazon
# S3"), and machines have about four times that bandwidth per core. Each holds a chunk in memory: up to 2 GiB.
TRANSFERS = min(128, max(8, 4 * (os.cpu_count() or 1)))
READS = 3  # attempts to read a chunk with wrong bytes; the network may have failed, not the store

Progress = Callable[[int], None]  # called with the size of each finished chunk, from any thread


@dataclass(frozen=True, slots=True)
class File:
    """A file of a manifest.

    `digest` is BLAKE3 in hex: of the bytes for a file of one chunk, else of its chunks' joined digests. `chunks`
    are object names below the manifest's root, each a digest, optionally followed by a dot and the writer's
    suffix.
    """

    name: str
    size_bytes: int
    digest: str
    chunks: list[str]


class DamagedChunk(Corrupt):
    """A stored chunk does not match the digest in its name, `chunk`."""

    def __init__(self, chunk: str, key: str) -> None:
        super().__init__(f"{key}: its digest differs from the manifest's", "it was damaged after its upload")
        self.chunk = chunk


def digest_of(chunk: str) -> str:
    """Return the digest in a chunk's name."""
    return chunk.partition(".")[0]


def matches(content: memoryview, chunk: str) -> bool:
    """Whether the bytes match the digest in a chunk's name."""
    return bool(blake3(content).hexdigest() == digest_of(chunk))


def parts(store: Store, root: str, file: File) -> Iterator[memoryview]:
    """Yield the bytes of a file, chunk by chunk, each verified. Raises DamagedChunk, NotFound, StoreError."""
    for chunk in file.chunks:
        yield verified(store, f"{root}/{chunk}")


def same(file: File, path: Path) -> bool:
    """Whether a local file has the size and content of `file`."""
    if not path.is_file() or path.stat().st_size != file.size_bytes:
        return False
    for chunk, offset, _ in places(file):
        with window(path, offset) as content:
            if not matches(content, chunk):
                return False
    return True


def check(store: Store, root: str, names: Iterable[str], *, progress: Progress = lambda _: None) -> dict[str, str]:
    """Read chunks; return the error of each missing or damaged chunk, by name. Raises StoreError."""

    def check_chunk(name: str) -> tuple[str, str] | None:
        try:
            progress(len(verified(store, f"{root}/{name}")))
        except (DamagedChunk, NotFound) as error:
            return name, str(error)
        return None

    with ThreadPoolExecutor(TRANSFERS, thread_name_prefix="check") as pool:
        return dict(found for found in pool.map(check_chunk, names) if found is not None)


def verified(store: Store, key: str) -> memoryview:
    """Return a chunk's verified bytes, with up to READS attempts. Raises DamagedChunk, NotFound, StoreError."""
    chunk = key.rpartition("/")[2]
    for read in range(1, READS + 1):
        data = memoryview(store.get_buffer(key))
        if matches(data, chunk):
            return data
        log.warning("chunk_digest_mismatch", key=key, read=read, of=READS)
    raise DamagedChunk(chunk, key)


@contextlib.contextmanager
def window(path: Path, offset: int) -> Iterator[memoryview]:
    """Map the bytes of one chunk of a file, so that only the store's client copies them."""
    with path.open("rb") as file:
        size_bytes = min(CHUNK_BYTES, os.fstat(file.fileno()).st_size - offset)
        with (
            mmap.mmap(file.fileno(), size_bytes, access=mmap.ACCESS_READ, offset=offset) as mapped,
            memoryview(mapped) as view,
        ):
            yield view


def offsets(size_bytes: int) -> range:
    """Return the offsets of the chunks of a file of that size."""
    return range(0, size_bytes, CHUNK_BYTES)


def places(file: File) -> Iterator[tuple[str, int, int]]:
    """Yield the name of each chunk of a file, its offset and its size in bytes."""
    for name, offset in zip(file.chunks, offsets(file.size_bytes), strict=True):
        yield name, offset, min(CHUNK_BYTES, file.size_bytes - offset)


def all_or_first_error(transfers: Sequence[Future[Any]], pool: ThreadPoolExecutor) -> None:
    """Wait for all transfers; at the first error cancel those that have not started, and raise it."""
    try:
        wait(transfers, return_when="FIRST_EXCEPTION")
        for transfer in transfers:
            if transfer.done():
                transfer.result()
    finally:
        pool.shutdown(cancel_futures=True)


class ChunkUpload:
    """An upload of files below `root`, which may start while they grow. Stored chunks are skipped.

    A context manager: on exit, also by an error, reading and sending has ended.

    Args:
        stored: names of chunks that may be reused, by digest; uploaded chunks are added.
        suffix: appended to the names of new chunks.
        progress: called for each chunk.
        content: returns a context manager of a chunk's bytes, which must not change inside it.
        transfers: the number of concurrent transfers, by default TRANSFERS.
    """

    def __init__(
        self,
        store: Store,
        root: str,
        *,
        stored: dict[str, str],
        suffix: str = "",
        progress: Progress = lambda _: None,
        content: Callable[[Path, int], AbstractContextManager[memoryview]] | None = None,
        transfers: int | None = None,
    ) -> None:
        self._store, self._root = store, root
        self._stored, self._suffix, self._progress = stored, suffix, progress
        self._content = content or window
        self._sent: dict[Path, list[Future[str]]] = {}  # chunk names, by file
        self._pool = ThreadPoolExecutor(transfers or TRANSFERS, thread_name_prefix="send")

    def __enter__(self) -> ChunkUpload:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def send_prefix(self, path: Path, size_bytes: int) -> None:
        """Start sending the chunks in the first `size_bytes` of a file, which must not change any more."""
        sent = self._sent.setdefault(path, [])
        for number in range(len(sent), size_bytes // CHUNK_BYTES):
            sent.append(self._pool.submit(self._send, path, number * CHUNK_BYTES))

    def finish(self, files: Iterable[tuple[str, Path]]) -> list[File]:
        """Send the rest of these files, `(name, path)`, which must not change any more, and return them.

        Raises StoreError, OSError.
        """
        transfers = list[tuple[str, int, list[Future[str]]]]()
        for name, path in files:
            size_bytes = path.stat().st_size
            sent = self._sent.setdefault(path, [])
            for offset in offsets(size_bytes)[len(sent) :]:
                sent.append(self._pool.submit(self._send, path, offset))
            transfers.append((name, size_bytes, sent))
        all_or_first_error([future for _, _, sent in transfers for future in sent], self._pool)
        return [
            _file(name, size_bytes, [chunk.result() for chunk in sent]) for name, size_bytes, sent in transfers
        ]

    def _send(self, path: Path, offset: int) -> str:
        with self._content(path, offset) as content:
            digest = blake3(content).hexdigest()
            name = self._stored.get(digest)
            if name is None:
                name = digest + self._suffix
                self._store.put(f"{self._root}/{name}", content)
                self._stored[digest] = name
            self._progress(len(content))
            return name


def send(
    store: Store,
    root: str,
    files: Iterable[tuple[str, Path]],
    *,
    stored: dict[str, str],
    suffix: str = "",
    progress: Progress = lambda _: None,
) -> list[File]:
    """Upload files, `(name, path)`, which must not change meanwhile; see `ChunkUpload`. Raises as it does."""
    with ChunkUpload(store, root, stored=stored, suffix=suffix, progress=progress) as sending:
        return sending.finish(files)


def _file(name: str, size_bytes: int, sent: list[str]) -> File:
    digests = [digest_of(chunk) for chunk in sent]
    digest = digests[0] if len(digests) == 1 else blake3("".join(digests).encode()).hexdigest()
    return File(name, size_bytes, digest, sent)


# The progress of long transfers.

LOG_S = 5.0


class TransferLog:
    """Logs a transfer's progress every LOG_S and passes each change to `report`.

    `add` may be called from any thread. A transfer faster than LOG_S is not logged.
    """

    def __init__(self, name: str, total_bytes: int = 0, report: Callable[[Stage], None] = lambda _: None) -> None:
        self._name = name
        self._total_bytes = total_bytes
        self._report = report
        self._done_bytes = 0
        self._logged_at_s = time.monotonic()
        self._lock = threading.Lock()

    def add(self, size_bytes: int) -> None:
        """Add transferred bytes."""
        with self._lock:
            self.at(self._done_bytes + size_bytes, self._total_bytes)

    def at(self, done_bytes: int, total_bytes: int) -> None:
        """Set the total of transferred bytes."""
        self._done_bytes = done_bytes
        self._report(Stage(self._name, done_bytes, total_bytes))
        if time.monotonic() - self._logged_at_s > LOG_S:
            self._logged_at_s = time.monotonic()
            log.info(self._name, done_mib=done_bytes >> 20, of_mib=total_bytes >> 20)
