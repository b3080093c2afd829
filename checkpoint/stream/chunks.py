"""Files in the store as chunks that are named by their content.

Every chunk is one object, written by one PUT: a killed process leaves no multipart upload behind, what it had
finished is not moved again, and a file that is already stored, such as a frozen reference model, is not stored
twice. Transfers run in parallel; their number bounds the memory.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog
from blake3 import blake3

from checkpoint.store.errors import Corrupt, NotFound
from checkpoint.store.run_store import Store

log = structlog.get_logger()

# Large enough that a request's latency hardly counts at 100 MB/s, small enough to hold several in memory.
CHUNK_BYTES = 16 * 1024 * 1024
# At a time: S3 gives each 85 to 90 MB/s (docs.aws.amazon.com, "Performance design patterns for Amazon S3"), and
# machines have about four times that much network for each core. Each holds a chunk in memory: up to 2 GiB.
TRANSFERS = min(128, max(8, 4 * (os.cpu_count() or 1)))
READS = 3  # of a chunk whose bytes are wrong; the wire may be at fault, not the store

Progress = Callable[[int], None]  # called with the size of each finished chunk, from any thread


@dataclass(frozen=True, slots=True)
class File:
    """One file of a manifest.

    `digest` is BLAKE3 in hex: of the bytes for a file of one chunk, else of its chunks' digests, joined. `chunks`
    are object names below the manifest's root, each a digest, then perhaps a dot and its writer's suffix.
    """

    name: str
    size_bytes: int
    digest: str
    chunks: list[str]


class DamagedChunk(Corrupt):
    """A stored chunk is not what its name says. `chunk` is that name."""

    def __init__(self, chunk: str, what: str) -> None:
        super().__init__(f"{what}: its digest is not the manifest's", "it was damaged after its upload")
        self.chunk = chunk


def digest_of(chunk: str) -> str:
    """The digest in a chunk's name."""
    return chunk.partition(".")[0]


def matches(content: memoryview, chunk: str) -> bool:
    """Whether these bytes are what a chunk's name says."""
    return bool(blake3(content).hexdigest() == digest_of(chunk))


def parts(store: Store, root: str, file: File) -> Iterator[memoryview]:
    """The bytes of a file, chunk by chunk, each verified. Raises DamagedChunk, NotFound, StoreError."""
    for chunk in file.chunks:
        yield verified(store, f"{root}/{chunk}")


def same(file: File, path: Path) -> bool:
    """Whether a local file holds what `file` describes."""
    if not path.is_file() or path.stat().st_size != file.size_bytes:
        return False
    for offset, chunk in zip(offsets(file.size_bytes), file.chunks, strict=True):
        with window(path, offset) as content:
            if not matches(content, chunk):
                return False
    return True


def check(store: Store, root: str, names: Iterable[str], *, progress: Progress = lambda _: None) -> dict[str, str]:
    """Read chunks; return what is wrong with each that is missing or damaged, by name. Raises StoreError."""

    def one(name: str) -> tuple[str, str] | None:
        try:
            progress(len(verified(store, f"{root}/{name}")))
        except (DamagedChunk, NotFound) as error:
            return name, str(error)
        return None

    with ThreadPoolExecutor(TRANSFERS, thread_name_prefix="check") as pool:
        return dict(found for found in pool.map(one, names) if found is not None)


def verified(store: Store, key: str) -> memoryview:
    """The chunk's bytes, read until they are what its name says. Raises DamagedChunk, NotFound, StoreError."""
    chunk = key.rpartition("/")[2]
    for read in range(1, READS + 1):
        data = memoryview(store.get_buffer(key))
        if matches(data, chunk):
            return data
        log.warning("wrong_bytes", key=key, read=read, of=READS)
    raise DamagedChunk(chunk, key)


@contextlib.contextmanager
def window(path: Path, offset: int) -> Iterator[memoryview]:
    """The bytes of one chunk of a file, mapped, so that only the client copies them."""
    with path.open("rb") as file:
        size_bytes = min(CHUNK_BYTES, os.fstat(file.fileno()).st_size - offset)
        with (
            mmap.mmap(file.fileno(), size_bytes, access=mmap.ACCESS_READ, offset=offset) as mapped,
            memoryview(mapped) as view,
        ):
            yield view


def offsets(size_bytes: int) -> range:
    """Where the chunks of a file of that size begin."""
    return range(0, size_bytes, CHUNK_BYTES)


def all_or_first_error(transfers: Sequence[Future[Any]], pool: ThreadPoolExecutor) -> None:
    """Wait for all transfers; at the first error cancel those that have not begun, and raise it."""
    try:
        wait(transfers, return_when="FIRST_EXCEPTION")
        for transfer in transfers:
            if transfer.done():
                transfer.result()
    finally:
        pool.shutdown(cancel_futures=True)
