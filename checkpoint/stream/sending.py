"""An upload of files as chunks, which may begin while they grow."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path

from blake3 import blake3

from checkpoint.store.run_store import Store
from checkpoint.stream import chunks
from checkpoint.stream.chunks import File, Progress


class Sending:
    """An upload of files below `root`, which may begin while they grow; chunks that are there are skipped.

    A context manager: at its end, by an error too, nothing is read or sent any more.

    Args:
        stored: names of chunks that may be reused, by digest; what is uploaded is added.
        suffix: appended to the names of new chunks.
        progress: told of each chunk.
        content: gives a chunk's bytes, which may not change before it is left.
        transfers: so many at a time; TRANSFERS where not given.
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
        self._content = content or chunks.window
        self._begun: dict[Path, list[Future[str]]] = {}
        self._pool = ThreadPoolExecutor(transfers or chunks.TRANSFERS, thread_name_prefix="send")

    def __enter__(self) -> Sending:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def grown(self, path: Path, size_bytes: int) -> None:
        """Begin with the chunks among the first `size_bytes` of a file: those change no more."""
        begun = self._begun.setdefault(path, [])
        for number in range(len(begun), size_bytes // chunks.CHUNK_BYTES):
            begun.append(self._pool.submit(self._send, path, number * chunks.CHUNK_BYTES))

    def finish(self, files: Iterable[tuple[str, Path]]) -> list[File]:
        """Send what is left of these, `(name, path)`, which change no more; of others that have grown, nothing.

        Raises StoreError, OSError.
        """
        sent = list[tuple[str, int, list[Future[str]]]]()
        for name, path in files:
            size_bytes = path.stat().st_size
            begun = self._begun.setdefault(path, [])
            for at in chunks.offsets(size_bytes)[len(begun) :]:
                begun.append(self._pool.submit(self._send, path, at))
            sent.append((name, size_bytes, begun))
        chunks.all_or_first_error([future for _, _, futures in sent for future in futures], self._pool)
        return [_file(name, size_bytes, [one.result() for one in futures]) for name, size_bytes, futures in sent]

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
    """Upload files, `(name, path)`, which may not change meanwhile; see `Sending`. Raises StoreError, OSError."""
    with Sending(store, root, stored=stored, suffix=suffix, progress=progress) as sending:
        return sending.finish(files)


def _file(name: str, size_bytes: int, sent: list[str]) -> File:
    digests = [chunks.digest_of(chunk) for chunk in sent]
    digest = digests[0] if len(digests) == 1 else blake3("".join(digests).encode()).hexdigest()
    return File(name, size_bytes, digest, sent)
