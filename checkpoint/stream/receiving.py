"""A download of files in chunks: side by side, each verified, with a bound on the bytes in memory."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath

from checkpoint.store.errors import Corrupt, StoreError
from checkpoint.store.run_store import Store
from checkpoint.stream import chunks
from checkpoint.stream.chunks import File, Progress
from checkpoint.stream.elsewhere import Download, Job, Jobs
from checkpoint.stream.room import Room
from checkpoint.stream.side_by_side import all_or_first_error

# Of a download, whoever sends them: what 128 transfers from S3 take, 92 Gbit/s. With others beside the store there
# are twice as many transfers, most of which wait: without a bound they could hold 4 GiB on 32 cores.
IN_FLIGHT_BYTES = 2 << 30


def receive(
    store: Store,
    root: str,
    files: Iterable[File],
    folder: Path,
    *,
    progress: Progress = lambda _: None,
    download: Download | None = None,
) -> None:
    """Bring files into `folder`, every chunk verified; what an earlier try left there is verified and kept.

    Args:
        progress: called with 0 as well while others are waited for.
        download: others that may have chunks.

    Raises DamagedChunk, Corrupt, NotFound, StoreError, OSError.
    """
    jobs = Jobs(_jobs(root, files, folder), download.expects if download is not None else lambda _: False)

    def still() -> None:
        jobs.check()
        progress(0)

    sides = (False,) if download is None else (False, True)
    # Each has its own: those that wait for a slow store take nothing from those that peers could serve.
    rooms = {expected: Room(IN_FLIGHT_BYTES // len(sides)) for expected in sides}

    def work(*, expected: bool) -> None:
        try:
            while (job := jobs.take(expected=expected)) is not None:
                with rooms[expected].place(job.size_bytes) as room:
                    _receive(store, root, job, download, still, room)
                    progress(job.size_bytes)
        except BaseException:
            jobs.drop()
            raise

    with ThreadPoolExecutor(chunks.TRANSFERS * len(sides), thread_name_prefix="receive") as pool:
        futures = [pool.submit(work, expected=expected) for expected in sides for _ in range(chunks.TRANSFERS)]
        all_or_first_error(futures, pool)


def _jobs(root: str, files: Iterable[File], folder: Path) -> list[Job]:
    """What is to be brought; the files get their sizes. Raises Corrupt, OSError."""
    found = []
    for file in files:
        path = _below(folder, file.name, root)
        places = chunks.offsets(file.size_bytes)
        if file.size_bytes < 0 or len(places) != len(file.chunks):
            raise Corrupt(f"{root}: {file.name} has {file.size_bytes} bytes in {len(file.chunks)} chunks")
        path.parent.mkdir(parents=True, exist_ok=True)
        begun = path.exists()
        with path.open("ab") as out:
            out.truncate(file.size_bytes)
        for offset, chunk in zip(places, file.chunks, strict=True):
            size_bytes = min(chunks.CHUNK_BYTES, file.size_bytes - offset)
            found.append(Job(chunk, file.name, path, offset, size_bytes, begun))
    return found


def _below(folder: Path, name: str, root: str) -> Path:
    """Where a file of a manifest goes. Raises Corrupt for a name that leads elsewhere."""
    parts = PurePosixPath(name).parts
    if not parts or ".." in parts or name.startswith("/") or "\0" in name:
        raise Corrupt(f"{root}: file name {name!r} leaves its folder")
    return folder / name


def _receive(
    store: Store,
    root: str,
    job: Job,
    download: Download | None,
    still: Callable[[], None],
    room: Callable[[], None],
) -> None:
    if not (job.begun and _is_there(job)):
        data = _brought(store, root, job, download, still, room)
        if len(data) != job.size_bytes:
            raise Corrupt(f"{root}/{job.chunk}: {len(data)} bytes where the manifest needs {job.size_bytes}")
        with job.path.open("r+b") as out:
            written = os.pwrite(out.fileno(), data, job.offset)
        if written != job.size_bytes:  # the disk is full
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(job.path))
    if download is not None:
        download.put(job.chunk, job.name, job.offset, job.size_bytes)


def _is_there(job: Job) -> bool:
    with chunks.window(job.path, job.offset) as content:
        return chunks.matches(content, job.chunk)


def _brought(
    store: Store,
    root: str,
    job: Job,
    download: Download | None,
    still: Callable[[], None],
    room: Callable[[], None],
) -> memoryview:
    """The chunk's bytes, from others or from the store. Raises DamagedChunk, NotFound, StoreError."""
    if download is None:
        room()
        return chunks.verified(store, f"{root}/{job.chunk}")
    data = download.get(job.chunk, job.size_bytes, still, room)
    if data is not None:
        if chunks.matches(data, job.chunk):
            return data
        download.blame(job.chunk)
        data = None
    room()
    try:
        return chunks.verified(store, f"{root}/{job.chunk}")
    except StoreError:
        data = download.get_at_once(job.chunk, job.size_bytes, still, room)
        if data is None or not chunks.matches(data, job.chunk):
            raise
        return data
