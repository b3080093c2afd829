"""Write and apply deltas: files with the changes from one policy's weights to the next's.

A delta consists of 8 magic bytes; the changed pieces (see below), tensor by tensor in the order of the weights'
file; a compressed index; the index's length compressed and uncompressed; and the BLAKE3 digest of everything
before. So it is written in one pass, and rejected as a whole if any bit is wrong.
"""

from __future__ import annotations

import contextlib
import math
import os
import struct
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import zstandard
from blake3 import blake3
from numpy.typing import NDArray

from grpo_orch.checkpoint.store.codec import check_schema, from_json, to_json
from grpo_orch.checkpoint.store.errors import Corrupt
from grpo_orch.checkpoint.weights import safetensors
from grpo_orch.checkpoint.weights.safetensors import Bytes, Layout, Placed

# The encoding of the changes in a piece of a tensor: the changed elements and their new values.
#
# Elements are words of 1, 2, 4 or 8 bytes, compared by their bits: NaN equals itself, and -0.0 is not 0.0. The new
# values are encoded, not differences from the old ones, which makes applying idempotent.
#
# A changed piece is: the number of changed elements, the number of long gaps, the compressed sizes of its parts (4
# bytes each, little endian), then the parts, each a zstd frame. The parts are: the gap between each changed
# element and the previous one, in a byte, 255 for all longer gaps; the longer gaps in 4 bytes; the values' first
# bytes, their second bytes and so on, since bytes of the same significance compress well together. With 1 % of
# elements changed, a gap takes less than a byte.

LEVEL = 1  # higher levels save 1 % and take three times as long: only byte frequencies are compressible
LONG = 255
WORD_BYTES = 8  # compared first: most are equal

_threads = threading.local()  # zstd's contexts, which are slow to create


def encode_piece(old: Bytes, new: Bytes, item_bytes: int) -> bytes:
    """Encode the changes from `old` to `new`, of equal length and complete elements; b"" if they are equal."""
    at = changed_elements(old, new, item_bytes)
    if not len(at):
        return b""
    gaps = np.diff(at, prepend=-1) - 1
    long = gaps[gaps >= LONG].astype("<u4")
    values = new.view(f"<u{item_bytes}")[at].view(np.uint8).reshape(-1, item_bytes)
    parts = [np.minimum(gaps, LONG).astype(np.uint8), long.view(np.uint8), *values.T]
    frames = [_compressor().compress(np.ascontiguousarray(part).data) for part in parts]
    return b"".join([struct.pack(f"<{2 + len(frames)}I", len(at), len(long), *map(len, frames)), *frames])


def decode_piece(data: memoryview, piece: Bytes, item_bytes: int) -> None:
    """Apply encoded changes to `piece`. Raises Corrupt before it writes anything."""
    elements = piece.view(f"<u{item_bytes}")
    places, values = read_piece(data, len(elements), item_bytes)
    elements[places] = values


def read_piece(data: memoryview, elements: int, item_bytes: int) -> tuple[NDArray[np.int64], NDArray[Any]]:
    """Return the indices of the changed elements, of `elements` in total, and their new bits as unsigned words.

    Indices are in ascending order. Raises Corrupt.
    """
    head_bytes = 4 * (4 + item_bytes)
    if len(data) < head_bytes:
        raise Corrupt("a piece of a delta is truncated")
    count, longs, *sizes = struct.unpack_from(f"<{4 + item_bytes}I", data)
    if not 0 < count <= elements or longs > count or sum(sizes) + head_bytes != len(data):
        raise Corrupt("a piece of a delta differs from its declared size")
    wanted, parts, at = [count, 4 * longs, *[count] * item_bytes], list[Bytes](), head_bytes
    for size, part_bytes in zip(sizes, wanted, strict=True):
        parts.append(np.frombuffer(decompress(data[at : at + size], part_bytes), np.uint8))
        at += size
    gaps = parts[0].astype(np.int64)
    is_long = gaps == LONG
    if np.count_nonzero(is_long) != longs:
        raise Corrupt("a piece of a delta lacks gaps")
    gaps[is_long] = parts[1].view("<u4")
    places = np.cumsum(gaps + 1) - 1
    if places[-1] >= elements:
        raise Corrupt("a piece of a delta exceeds its tensor")
    return places, np.stack(parts[2:], axis=1).view(f"<u{item_bytes}")[:, 0]


def changed_elements(old: Bytes, new: Bytes, item_bytes: int) -> NDArray[np.int64]:
    """Return the indices of the elements whose bits differ, in ascending order."""
    whole = len(old) - len(old) % WORD_BYTES
    before, after = old[:whole].view(np.uint64), new[:whole].view(np.uint64)
    words = np.flatnonzero(before != after)
    item, per_word = f"<u{item_bytes}", WORD_BYTES // item_bytes
    which = np.flatnonzero(before[words].view(item) != after[words].view(item))
    found = words[which // per_word] * per_word + which % per_word
    rest = np.flatnonzero(old[whole:].view(item) != new[whole:].view(item)) + whole // item_bytes
    return np.concatenate([found, rest]) if len(rest) else found


def compress(data: bytes) -> bytes:
    """Compress into a zstd frame with its content size."""
    return _compressor().compress(data)


def _compressor() -> zstandard.ZstdCompressor:
    if not hasattr(_threads, "compressor"):
        _threads.compressor = zstandard.ZstdCompressor(level=LEVEL)
    found: zstandard.ZstdCompressor = _threads.compressor
    return found


def decompress(frame: memoryview, size_bytes: int) -> bytes:
    """Decompress a frame of that content size. Raises Corrupt before it allocates more memory than that."""
    try:
        if zstandard.frame_content_size(frame) != size_bytes:
            raise Corrupt("a part of a delta differs from its declared size")
        if not hasattr(_threads, "decompressor"):
            _threads.decompressor = zstandard.ZstdDecompressor()
        content: bytes = _threads.decompressor.decompress(frame)
    except zstandard.ZstdError as error:
        raise Corrupt(f"a part of a delta is damaged: {error}") from error
    return content


NAME = "delta.bin"
MAGIC = b"GRPODLT1"
SCHEMA = 1
DIGEST_BYTES = 32
FOOT_BYTES = 8 + 8 + DIGEST_BYTES
# Bytes per element by safetensors' type name, for types of complete words.
WIDTHS = {
    **dict.fromkeys(("F64", "I64", "U64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "I8", "U8", "BOOL"), 1),
}
WORKERS = min(8, os.cpu_count() or 1)  # numpy, zstd and BLAKE3 release the GIL


@dataclass(frozen=True, slots=True)
class Changed:
    """A changed tensor. `pieces` has the encoded size of each piece in bytes, 0 for an unchanged one."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    pieces: list[int]


@dataclass(frozen=True, slots=True)
class Index:
    """The index of a delta. `base` and `weights` are the `content_digest` of the weights before and after."""

    schema: int
    piece_bytes: int
    base: str
    weights: str
    tensors: list[Changed]


class DeltaWriter:
    """Writes a delta, which is valid only after `finish`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("wb")
        self._hasher = blake3()
        self._tensors: list[Changed] = []
        self.size_bytes = 0
        self._add(MAGIC)

    def put(self, name: str, placed: Placed, pieces: list[bytes]) -> None:
        """Add a tensor's pieces from `encode_piece` and flush them to the file. Raises OSError."""
        if any(pieces):
            self._tensors.append(Changed(name, placed.dtype, placed.shape, [len(piece) for piece in pieces]))
            self._add(b"".join(pieces))
            self._file.flush()

    def finish(self, base: str, weights: str) -> None:
        """Write index and digest, and close the file. Raises OSError."""
        index = to_json(Index(SCHEMA, safetensors.PIECE_BYTES, base, weights, self._tensors))
        frame = compress(index)
        self._add(frame + len(frame).to_bytes(8, "little") + len(index).to_bytes(8, "little"))
        self._add(self._hasher.digest())
        self._file.close()

    def abandon(self) -> None:
        """Close and delete the file."""
        with contextlib.suppress(OSError):  # flushing buffered data may fail
            self._file.close()
        self.path.unlink(missing_ok=True)

    def _add(self, data: bytes) -> None:
        self._file.write(data)
        self._hasher.update(data)
        self.size_bytes += len(data)


def apply(deltas: Sequence[Path], weights: Path, base: str, pool: ThreadPoolExecutor) -> str:
    """Apply deltas, one after the other, to the file `weights`, whose digest is `base`.

    Makes one pass for all deltas, since each of them touches nearly every page of the file.

    Returns the expected digest of the new weights; verify it with `safetensors.content_of`. Checks that all deltas
    are intact and fit before it writes. Raises Corrupt, OSError; after a failure while writing, the file holds
    neither the old nor the new weights.
    """
    with contextlib.ExitStack() as opened:
        file = opened.enter_context(weights.open("r+b")).fileno()
        layout = safetensors.layout_of(weights)
        work: dict[_Piece, list[_Part]] = {}
        for delta in deltas:
            changes = opened.enter_context(delta.open("rb")).fileno()
            index = _index_in(changes)
            if index.base != base:
                raise Corrupt(f"{NAME} is for weights {index.base}, not {base}")
            for piece, at, size_bytes in _fitting(index, layout):
                work.setdefault(piece, []).append(_Part(changes, at, size_bytes))
            base = index.weights

        def overwrite(piece: _Piece, parts: list[_Part]) -> None:
            content = safetensors.read(file, piece.at, piece.size_bytes)
            for part in parts:
                data = safetensors.read(part.file, part.at, part.size_bytes)
                decode_piece(data.data, content, piece.item_bytes)
            safetensors.write(file, piece.at, content)

        writes = [pool.submit(overwrite, piece, parts) for piece, parts in work.items()]
        wait(writes)  # for all, also after an error: none may write once the file is closed
        for write in writes:
            write.result()
    return base


@dataclass(frozen=True, slots=True)
class Changes:
    """The changes of a tensor: flat indices in ascending order, and the new bits as unsigned words."""

    tensor: Changed
    places: NDArray[np.int64]
    values: NDArray[Any]


def changes_in(path: Path, base: str, weights: str, pool: ThreadPoolExecutor) -> Iterator[Changes]:
    """Yield the changes of a delta from the weights of digest `base` to those of `weights`, tensor by tensor.

    Raises Corrupt, OSError; before the first tensor if the delta is damaged or is for other weights.
    """
    with path.open("rb") as opened:
        file = opened.fileno()
        index = _index_in(file)
        if (index.base, index.weights) != (base, weights):
            raise Corrupt(f"{NAME} is from {index.base} to {index.weights}, not from {base} to {weights}")
        at = len(MAGIC)
        for tensor in index.tensors:
            yield _changes(file, at, tensor, pool)
            at += sum(tensor.pieces)


def verify(path: Path) -> Index:
    """Verify a complete delta and return its index. Raises Corrupt, OSError."""
    with path.open("rb") as opened:
        return _index_in(opened.fileno())


def _changes(file: int, at: int, tensor: Changed, pool: ThreadPoolExecutor) -> Changes:
    """Read the changes of a tensor, from offset `at` of the open delta."""
    elements, item_bytes = math.prod(tensor.shape), WIDTHS[tensor.dtype]
    per_piece = safetensors.PIECE_BYTES // item_bytes

    def read_part(number: int, begin: int, size_bytes: int) -> tuple[NDArray[np.int64], NDArray[Any]]:
        data = safetensors.read(file, begin, size_bytes).data
        places, values = read_piece(data, min(per_piece, elements - number * per_piece), item_bytes)
        return places + number * per_piece, values

    begins = [at + before for before in accumulate([0, *tensor.pieces[:-1]])]
    parts = [(n, begin, size) for n, (begin, size) in enumerate(zip(begins, tensor.pieces, strict=True)) if size]
    changes = list(pool.map(lambda part: read_part(*part), parts))
    places, values = (np.concatenate(column) for column in zip(*changes, strict=True))
    return Changes(tensor, places, values)


def index_of(path: Path) -> Index:
    """Return a delta's index without verifying the delta. Raises Corrupt, OSError."""
    with path.open("rb") as opened:
        return _index_at_end(opened.fileno())


def _index_in(file: int) -> Index:
    """Verify a delta and return its index. Raises Corrupt."""
    size_bytes = os.fstat(file).st_size
    hasher = blake3(max_threads=blake3.AUTO)
    for at, length in safetensors.pieces_of(0, max(0, size_bytes - DIGEST_BYTES)):
        hasher.update(safetensors.read(file, at, length).data)
    if bytes(safetensors.read(file, max(0, size_bytes - DIGEST_BYTES), DIGEST_BYTES)) != hasher.digest():
        raise Corrupt("a weight delta is damaged")
    return _index_at_end(file)


def _index_at_end(file: int) -> Index:
    size_bytes = os.fstat(file).st_size
    if size_bytes < len(MAGIC) + FOOT_BYTES or bytes(safetensors.read(file, 0, len(MAGIC))) != MAGIC:
        raise Corrupt("this file is not a weight delta")
    foot = bytes(safetensors.read(file, size_bytes - FOOT_BYTES, FOOT_BYTES))
    length, index_bytes = int.from_bytes(foot[:8], "little"), int.from_bytes(foot[8:16], "little")
    if length > size_bytes - FOOT_BYTES:
        raise Corrupt("a weight delta is shorter than its index")
    frame = safetensors.read(file, size_bytes - FOOT_BYTES - length, length)
    index = from_json(decompress(frame.data, index_bytes), Index, NAME)
    check_schema(index.schema, SCHEMA, NAME)
    if index.piece_bytes != safetensors.PIECE_BYTES:
        raise Corrupt(f"{NAME} has pieces of {index.piece_bytes} bytes, not {safetensors.PIECE_BYTES}")
    return index


@dataclass(frozen=True, slots=True)
class _Piece:
    """A changed piece of the weights' file."""

    at: int
    size_bytes: int
    item_bytes: int


@dataclass(frozen=True, slots=True)
class _Part:
    """A piece's changes in an open delta."""

    file: int
    at: int
    size_bytes: int


def _fitting(index: Index, layout: Layout) -> Iterator[tuple[_Piece, int, int]]:
    """Yield the changed pieces, each with the offset and size in bytes of its changes in the delta.

    Raises Corrupt if the weights' file lacks a tensor.
    """
    part_at = len(MAGIC)
    for tensor in index.tensors:
        placed = layout.get(tensor.name)
        if placed is None or (placed.dtype, placed.shape) != (tensor.dtype, tensor.shape):
            description = f"{tensor.name}, {tensor.dtype} {list(tensor.shape)}"
            raise Corrupt(f"{NAME} changes {description}, which the weights lack")
        pieces = list(placed.pieces)
        if len(pieces) != len(tensor.pieces):
            raise Corrupt(f"{NAME} has {tensor.name} in {len(tensor.pieces)} pieces, not {len(pieces)}")
        for (at, size_bytes), part_bytes in zip(pieces, tensor.pieces, strict=True):
            if part_bytes:
                yield _Piece(at, size_bytes, placed.item_bytes), part_at, part_bytes
            part_at += part_bytes
