"""The publisher's file of weights, in which each policy overwrites the previous one.

While overwriting, it compares the two and writes the changes to a delta. Besides the file's pages it needs memory
for the tensors in progress (AHEAD_BYTES or the largest tensor), never for a second model.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

import structlog
from blake3 import blake3

from grpo_orch.checkpoint.weights import delta, safetensors
from grpo_orch.checkpoint.weights.delta import DeltaWriter
from grpo_orch.checkpoint.weights.safetensors import Bytes, Layout, Placed

log = structlog.get_logger()

AHEAD_BYTES = 64 * 2**20  # of tensors in progress: enough to keep all threads busy with small ones
# A delta of half the weights saves half the transfer and costs a pass over all weights on every machine.
PAYS_BELOW = 0.5
JUDGED_AFTER = 1 / 64  # of the weights; if the delta is too large by then, the rest is not compared
# Fraction of the weights that may be sent as a delta before it is certain that the delta pays.
SPECULATIVE = 1 / 16

Grown = Callable[[Path, int], None]


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of the next weights. `content` is called once, in its turn, for its contiguous bytes."""

    dtype: str
    shape: tuple[int, ...]
    size_bytes: int
    content: Callable[[], Bytes]


@dataclass(frozen=True, slots=True)
class Written:
    """The weights that the file holds now, and the size of the delta to them, None without a delta.

    `dense`: too much has changed for a delta to pay.
    """

    digest: str
    size_bytes: int
    delta_bytes: int | None
    dense: bool = False


def rewrite(
    path: Path,
    tensors: Mapping[str, Tensor],
    base: str,
    delta: Path,
    pool: ThreadPoolExecutor,
    grown: Grown = lambda *_: None,
) -> Written:
    """Write the weights into the file at `path`, and the changes from those of digest `base` into `delta`.

    Writes no delta if `base` is empty, if the file has other tensors, or if a delta does not pay. After a failure
    the file holds neither the old nor the new weights. Raises OSError, Corrupt.

    Args:
        grown: called repeatedly with the file to send and the number of its first bytes that are final: the
            delta while it seems to pay, then the weights.
    """
    delta.unlink(missing_ok=True)
    layout = _matching_layout(path, tensors) if base else None
    writer = None if layout is None else DeltaWriter(delta)
    if layout is None:
        sizes = {name: (tensor.dtype, tensor.shape, tensor.size_bytes) for name, tensor in tensors.items()}
        layout = safetensors.create(path, sizes)
    with path.open("r+b") as file:
        work = _Rewrite(file.fileno(), path, layout, writer, pool, grown)
        try:
            for name, _ in sorted(layout.items(), key=lambda item: item[1].begin):
                work.begin(name, tensors[name].content())
            work.finish_all()
        except BaseException:
            work.abort()
            raise
    digest = safetensors.content_digest(
        (name, placed.dtype, placed.shape, work.digests[name]) for name, placed in layout.items()
    )
    size_bytes = sum(placed.size_bytes for placed in layout.values())
    if work.writer is None:
        return Written(digest, size_bytes, None, work.dense)
    try:
        work.writer.finish(base, digest)
    except OSError as error:
        work.drop_delta(error)
        return Written(digest, size_bytes, None)
    if work.writer.size_bytes > size_bytes * PAYS_BELOW:
        delta.unlink()
        return Written(digest, size_bytes, None, dense=True)
    return Written(digest, size_bytes, work.writer.size_bytes)


def _matching_layout(path: Path, tensors: Mapping[str, Tensor]) -> Layout | None:
    """Return the layout of a file with exactly these tensors; None for any other file."""
    layout = safetensors.layout_of(path)
    existing = {name: (placed.dtype, placed.shape) for name, placed in layout.items()}
    expected = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
    return layout if existing == expected else None


@dataclass(frozen=True, slots=True)
class _InProgress:
    """A tensor that is being written. `content` is cleared at the end, since threads may keep references to it."""

    name: str
    placed: Placed
    content: list[Bytes]
    digest: Future[str]
    pieces: list[Future[bytes]]


class _Rewrite:
    """One pass over the file. `writer` is None to write without comparing."""

    def __init__(
        self,
        file: int,
        path: Path,
        layout: Layout,
        writer: DeltaWriter | None,
        pool: ThreadPoolExecutor,
        grown: Grown,
    ) -> None:
        self._file, self._path = file, path
        self._layout = layout
        self._pool = pool
        self._grown = grown
        self._in_progress: deque[_InProgress] = deque()
        self._ahead_bytes = self._done_bytes = 0
        self._size_bytes = sum(placed.size_bytes for placed in layout.values())
        self.writer = writer
        self.dense = False
        self.digests: dict[str, str] = {}

    def begin(self, name: str, new: Bytes) -> None:
        """Let threads write a tensor; return once the next one may start."""
        placed, compares = self._layout[name], self.writer is not None

        content = [new]

        def overwrite(at: int, size_bytes: int) -> bytes:
            piece = content[0][at - placed.begin :][:size_bytes]
            return self._overwrite(at, piece, placed.item_bytes if compares else 0)

        pieces = [self._pool.submit(overwrite, at, size_bytes) for at, size_bytes in placed.pieces]
        digest = self._pool.submit(lambda: _digest(content[0]))
        self._in_progress.append(_InProgress(name, placed, content, digest, pieces))
        self._ahead_bytes += placed.size_bytes
        while self._ahead_bytes > AHEAD_BYTES:
            self._finish()

    def finish_all(self) -> None:
        """Return once all tensors are written. Raises OSError, Corrupt."""
        while self._in_progress:
            self._finish()

    def abort(self) -> None:
        """Wait until no thread writes any more, and drop the delta."""
        for tensor in self._in_progress:
            wait([tensor.digest])
            wait(tensor.pieces)
        self._abandon()

    def drop_delta(self, error: OSError) -> None:
        """Continue without a delta, as when the disk is full: the weights are published anyway."""
        log.warning("delta_write_failed", error=str(error))
        self._abandon()

    def _finish(self) -> None:
        tensor = self._in_progress[0]
        changes = [piece.result() for piece in tensor.pieces]
        self.digests[tensor.name] = tensor.digest.result()
        self._in_progress.popleft().content.clear()
        self._ahead_bytes -= tensor.placed.size_bytes
        self._done_bytes += tensor.placed.size_bytes
        if self.writer is not None:
            try:
                self.writer.put(tensor.name, tensor.placed, changes)
            except OSError as error:
                self.drop_delta(error)
            else:
                self._judge(self.writer)
        if self.writer is None:
            self._grown(self._path, tensor.placed.begin + tensor.placed.size_bytes)

    def _judge(self, writer: DeltaWriter) -> None:
        """Drop the delta if it does not pay, or let its written part be sent if it probably will."""
        if (
            self._done_bytes > JUDGED_AFTER * self._size_bytes
            and writer.size_bytes > self._done_bytes * PAYS_BELOW
        ):
            self._abandon()
            self.dense = True
            return
        largest_bytes = writer.size_bytes + self._size_bytes - self._done_bytes
        if min(writer.size_bytes / SPECULATIVE, largest_bytes / PAYS_BELOW) <= self._size_bytes:
            self._grown(writer.path, writer.size_bytes)

    def _abandon(self) -> None:
        if self.writer is not None:
            self.writer.abandon()
            self.writer = None

    def _overwrite(self, at: int, new: Bytes, item_bytes: int) -> bytes:
        """Write a piece and return its encoded changes; with `item_bytes` 0, do not compare."""
        changed = b""
        if item_bytes:
            changed = delta.encode_piece(safetensors.read(self._file, at, len(new)), new, item_bytes)
            if not changed:
                return b""
        safetensors.write(self._file, at, new)
        return changed


def _digest(content: Bytes) -> str:
    return blake3(content.data).hexdigest()
