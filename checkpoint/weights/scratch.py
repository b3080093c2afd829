"""The file in which a publisher keeps the weights that it published last, and writes the next over them.

While it does so it compares them, and writes down what has changed. Beside the file's pages it takes memory for
the tensors in hand, AHEAD_BYTES of them or the largest one: never for a second model.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

import structlog
from blake3 import blake3

from checkpoint.weights import delta, safetensors
from checkpoint.weights.delta import DeltaWriter
from checkpoint.weights.safetensors import Bytes, Layout, Placed

log = structlog.get_logger()

AHEAD_BYTES = 64 * 2**20  # of tensors that threads are at: enough for the smallest to keep them busy
# A delta of half the weights saves half the transfer and costs a pass over all of them on every machine.
PAYS_BELOW = 0.5
JUDGED_AFTER = 1 / 64  # of the weights; where so much of them has changed too much, the rest is not compared
# Of the weights; so many bytes of a delta may be sent in vain, before it is certain that it will pay.
VENTURED = 1 / 16

Grown = Callable[[Path, int], None]


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of the next weights. `content` is asked for its bytes, contiguous, once, when it is its turn."""

    dtype: str
    shape: tuple[int, ...]
    size_bytes: int
    content: Callable[[], Bytes]


@dataclass(frozen=True, slots=True)
class Written:
    """The weights that the file holds by now, and how large the delta to them is; None where there is none.
    With `dense` too much has changed for one to pay."""

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
    """Write the weights into the file at `path`, and what has changed of those of the digest `base` into `delta`.

    With an empty `base`, other tensors than the file's, or where it does not pay, there is no delta. If it ends in
    the middle the file holds neither the old weights nor the new ones. Raises OSError, Corrupt.

    Args:
        grown: told again and again which file is to travel and how many of its first bytes change no more. First
            of the delta, as long as it seems to pay, and from when it does not, of the weights.
    """
    delta.unlink(missing_ok=True)
    layout = _present(path, tensors) if base else None
    writer = None if layout is None else DeltaWriter(delta)
    if layout is None:
        sizes = {name: (one.dtype, one.shape, one.size_bytes) for name, one in tensors.items()}
        layout = safetensors.create(path, sizes)
    with path.open("r+b") as file:
        work = _Rewriting(file.fileno(), path, layout, writer, pool, grown)
        try:
            for name in sorted(layout, key=lambda one: layout[one].begin):
                work.begin(name, tensors[name].content())
            work.finish_all()
        except BaseException:
            work.give_up()
            raise
    digest = safetensors.content_digest((n, one.dtype, one.shape, work.digests[n]) for n, one in layout.items())
    size_bytes = sum(one.size_bytes for one in layout.values())
    if work.writer is None:
        return Written(digest, size_bytes, None, work.dense)
    try:
        work.writer.finish(base, digest)
    except OSError as error:
        work.do_without(error)
        return Written(digest, size_bytes, None)
    if work.writer.size_bytes > size_bytes * PAYS_BELOW:
        delta.unlink()
        return Written(digest, size_bytes, None, dense=True)
    return Written(digest, size_bytes, work.writer.size_bytes)


def _present(path: Path, tensors: Mapping[str, Tensor]) -> Layout | None:
    """The layout of a file with these very tensors; None of any other."""
    layout = safetensors.layout_of(path)
    held = {name: (one.dtype, one.shape) for name, one in layout.items()}
    return layout if held == {name: (one.dtype, one.shape) for name, one in tensors.items()} else None


@dataclass(frozen=True, slots=True)
class _InHand:
    """`content` is emptied at its end: a thread may hold on to what it has run until its next turn."""

    name: str
    placed: Placed
    content: list[Bytes]
    digest: Future[str]
    pieces: list[Future[bytes]]


class _Rewriting:
    """One pass over the file. `writer` is None where everything is written and nothing compared."""

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
        self._in_hand: deque[_InHand] = deque()
        self._ahead_bytes = self._done_bytes = 0
        self._size_bytes = sum(one.size_bytes for one in layout.values())
        self.writer = writer
        self.dense = False
        self.digests: dict[str, str] = {}

    def begin(self, name: str, new: Bytes) -> None:
        """Have threads write a tensor; return once there is room for the next one."""
        placed, compares = self._layout[name], self.writer is not None

        content = [new]

        def one(at: int, size_bytes: int) -> bytes:
            piece = content[0][at - placed.begin :][:size_bytes]
            return self._overwrite(at, piece, placed.item_bytes if compares else 0)

        pieces = [self._pool.submit(one, at, size_bytes) for at, size_bytes in placed.pieces]
        digest = self._pool.submit(lambda: _digest(content[0]))
        self._in_hand.append(_InHand(name, placed, content, digest, pieces))
        self._ahead_bytes += placed.size_bytes
        while self._ahead_bytes > AHEAD_BYTES:
            self._finish()

    def finish_all(self) -> None:
        """Return once all that was begun is written. Raises OSError, Corrupt."""
        while self._in_hand:
            self._finish()

    def give_up(self) -> None:
        """Return once no thread writes any more; there is no delta."""
        for one in self._in_hand:
            wait([one.digest])
            wait(one.pieces)
        self._abandon()

    def do_without(self, error: OSError) -> None:
        """Go on without a delta: that it cannot be written, as for want of room, is no reason not to publish."""
        log.warning("delta_not_written", why=str(error))
        self._abandon()

    def _finish(self) -> None:
        one = self._in_hand[0]
        changed = [piece.result() for piece in one.pieces]
        self.digests[one.name] = one.digest.result()
        self._in_hand.popleft().content.clear()
        self._ahead_bytes -= one.placed.size_bytes
        self._done_bytes += one.placed.size_bytes
        if self.writer is not None:
            try:
                self.writer.put(one.name, one.placed, changed)
            except OSError as error:
                self.do_without(error)
            else:
                self._judge(self.writer)
        if self.writer is None:
            self._grown(self._path, one.placed.begin + one.placed.size_bytes)

    def _judge(self, writer: DeltaWriter) -> None:
        """Give the delta up, or let it travel as far as it is written, or neither yet."""
        if (
            self._done_bytes > JUDGED_AFTER * self._size_bytes
            and writer.size_bytes > self._done_bytes * PAYS_BELOW
        ):
            self._abandon()
            self.dense = True
            return
        largest_bytes = writer.size_bytes + self._size_bytes - self._done_bytes
        if min(writer.size_bytes / VENTURED, largest_bytes / PAYS_BELOW) <= self._size_bytes:
            self._grown(writer.path, writer.size_bytes)

    def _abandon(self) -> None:
        if self.writer is not None:
            self.writer.abandon()
            self.writer = None

    def _overwrite(self, at: int, new: Bytes, item_bytes: int) -> bytes:
        """Write a piece; return what has changed in it, where elements of `item_bytes` are compared."""
        changed = b""
        if item_bytes:
            changed = delta.encode_piece(safetensors.read(self._file, at, len(new)), new, item_bytes)
            if not changed:
                return b""
        safetensors.write(self._file, at, new)
        return changed


def _digest(content: Bytes) -> str:
    return blake3(content.data).hexdigest()
