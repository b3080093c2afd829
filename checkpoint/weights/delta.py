"""A file of what has changed from one policy's weights to the next's, and what applies it.

After eight bytes that say what it is come the changed pieces (as below), tensor by tensor in
the order of the weights' file; a compressed index; the index's lengths, as it is and before it was compressed; and
BLAKE3 of everything before. So it is written in one pass, and refused as a whole when a bit of it is wrong.
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

from checkpoint.store.codec import check_schema, from_json, to_json
from checkpoint.store.errors import Corrupt
from checkpoint.weights import safetensors
from checkpoint.weights.safetensors import Bytes, Layout, Placed

# What has changed in a piece of a tensor, as bytes: which elements, and what they are now.
#
# Elements are words of 1, 2, 4 or 8 bytes, compared by their bits: NaN equals itself, and -0.0 is not 0.0. Sent
# are the new values, not differences to the old ones, so that to overwrite twice is to overwrite once.
#
# A piece that has changed is: the number of elements, the number of long gaps, the compressed sizes of its parts
# (4 bytes each, little endian), then the parts, each a zstd frame. They are: of each changed element the gap since
# the one before, in a byte, 255 for all longer ones; the longer ones in 4 bytes; the values' first bytes, their
# second bytes and so on, for bytes of the same significance are alike. Gaps of a hundredth changed take less than
# a byte.

LEVEL = 1  # more brings 1 % and takes three times as long: there is nothing to find but how often a byte occurs
LONG = 255
WORD_BYTES = 8  # compared first: most are equal

_threads = threading.local()  # zstd's contexts, which are slow to make


def encode_piece(old: Bytes, new: Bytes, item_bytes: int) -> bytes:
    """What makes `old` into `new`, which are equally long and whole elements; nothing where they are equal."""
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
    """Overwrite what has changed in `piece`. Raises Corrupt before it writes anything."""
    elements = piece.view(f"<u{item_bytes}")
    places, values = read_piece(data, len(elements), item_bytes)
    elements[places] = values


def read_piece(data: memoryview, elements: int, item_bytes: int) -> tuple[NDArray[np.int64], NDArray[Any]]:
    """Which of so many elements have changed, in ascending order, and their new bits as unsigned words. Raises
    Corrupt."""
    head_bytes = 4 * (4 + item_bytes)
    if len(data) < head_bytes:
        raise Corrupt("a piece of a delta is cut off")
    count, longs, *sizes = struct.unpack_from(f"<{4 + item_bytes}I", data)
    if not 0 < count <= elements or longs > count or sum(sizes) + head_bytes != len(data):
        raise Corrupt("a piece of a delta is not as long as it says")
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
        raise Corrupt("a piece of a delta goes beyond its tensor")
    return places, np.stack(parts[2:], axis=1).view(f"<u{item_bytes}")[:, 0]


def changed_elements(old: Bytes, new: Bytes, item_bytes: int) -> NDArray[np.int64]:
    """Which elements' bits differ, in ascending order."""
    whole = len(old) - len(old) % WORD_BYTES
    before, after = old[:whole].view(np.uint64), new[:whole].view(np.uint64)
    words = np.flatnonzero(before != after)
    item, per_word = f"<u{item_bytes}", WORD_BYTES // item_bytes
    which = np.flatnonzero(before[words].view(item) != after[words].view(item))
    found = words[which // per_word] * per_word + which % per_word
    rest = np.flatnonzero(old[whole:].view(item) != new[whole:].view(item)) + whole // item_bytes
    return np.concatenate([found, rest]) if len(rest) else found


def compress(data: bytes) -> bytes:
    """One zstd frame that says how long its content is."""
    return _compressor().compress(data)


def _compressor() -> zstandard.ZstdCompressor:
    if not hasattr(_threads, "compressor"):
        _threads.compressor = zstandard.ZstdCompressor(level=LEVEL)
    found: zstandard.ZstdCompressor = _threads.compressor
    return found


def decompress(frame: memoryview, size_bytes: int) -> bytes:
    """The content of a frame, which is of that size. Raises Corrupt before it takes more memory than that."""
    try:
        if zstandard.frame_content_size(frame) != size_bytes:
            raise Corrupt("a part of a delta is not as long as it says")
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
# Bytes of an element by its type's name in safetensors, where they are whole words.
WIDTHS = {
    **dict.fromkeys(("F64", "I64", "U64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "I8", "U8", "BOOL"), 1),
}
WORKERS = min(8, os.cpu_count() or 1)  # numpy, zstd and BLAKE3 let other threads run


@dataclass(frozen=True, slots=True)
class Changed:
    """A tensor that has changed: of each of its pieces how many bytes of the file are about it, 0 for none."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    pieces: list[int]


@dataclass(frozen=True, slots=True)
class Index:
    """`base` and `weights` are the `content_digest` of the weights before and after."""

    schema: int
    piece_bytes: int
    base: str
    weights: str
    tensors: list[Changed]


class DeltaWriter:
    """Writes a delta; it is none before it is finished."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("wb")
        self._hasher = blake3()
        self._tensors: list[Changed] = []
        self.size_bytes = 0
        self._add(MAGIC)

    def put(self, name: str, placed: Placed, pieces: list[bytes]) -> None:
        """Add a tensor's pieces as `encode_piece` made them; the file then has them. Raises OSError."""
        if any(pieces):
            self._tensors.append(Changed(name, placed.dtype, placed.shape, [len(one) for one in pieces]))
            self._add(b"".join(pieces))
            self._file.flush()

    def finish(self, base: str, weights: str) -> None:
        """Write the rest and close. Raises OSError."""
        index = to_json(Index(SCHEMA, safetensors.PIECE_BYTES, base, weights, self._tensors))
        frame = compress(index)
        self._add(frame + len(frame).to_bytes(8, "little") + len(index).to_bytes(8, "little"))
        self._add(self._hasher.digest())
        self._file.close()

    def abandon(self) -> None:
        """Close, and leave no file."""
        with contextlib.suppress(OSError):  # what it had not yet written
            self._file.close()
        self.path.unlink(missing_ok=True)

    def _add(self, data: bytes) -> None:
        self._file.write(data)
        self._hasher.update(data)
        self.size_bytes += len(data)


def apply(deltas: Sequence[Path], weights: Path, base: str, pool: ThreadPoolExecutor) -> str:
    """Overwrite in the file `weights`, which are those of the digest `base`, what has changed by one delta after
    the other.

    In one pass however many they are: each of them touches nearly every page of the file.

    Returns the digest of what they are to be now; whether they are, `safetensors.content_of` says. Nothing is
    written before all deltas were found to be intact and to fit. Raises Corrupt, OSError: if it ends in the
    middle the file holds neither the old weights nor the new ones.
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

        def one(piece: _Piece, parts: list[_Part]) -> None:
            whole = safetensors.read(file, piece.at, piece.size_bytes)
            for part in parts:
                data = safetensors.read(part.file, part.at, part.size_bytes)
                decode_piece(data.data, whole, piece.item_bytes)
            safetensors.write(file, piece.at, whole)

        done = [pool.submit(one, piece, parts) for piece, parts in work.items()]
        wait(done)  # for all, also after an error: none may write once the file is closed
        for each in done:
            each.result()
    return base


@dataclass(frozen=True, slots=True)
class Changes:
    """What has changed in a tensor: flat places in ascending order, and the new bits there as unsigned words."""

    tensor: Changed
    places: NDArray[np.int64]
    values: NDArray[Any]


def changes_in(path: Path, base: str, weights: str, pool: ThreadPoolExecutor) -> Iterator[Changes]:
    """What a delta from the weights of digest `base` to those of `weights` changes, tensor by tensor.

    Raises Corrupt, OSError; before the first tensor if it is damaged or leads elsewhere.
    """
    with path.open("rb") as opened:
        file = opened.fileno()
        index = _index_in(file)
        if (index.base, index.weights) != (base, weights):
            raise Corrupt(f"{NAME} leads from {index.base} to {index.weights}, not from {base} to {weights}")
        at = len(MAGIC)
        for tensor in index.tensors:
            yield _changes(file, at, tensor, pool)
            at += sum(tensor.pieces)


def verify(path: Path) -> Index:
    """Read all of a delta and return its index. Raises Corrupt, OSError."""
    with path.open("rb") as opened:
        return _index_in(opened.fileno())


def _changes(file: int, at: int, tensor: Changed, pool: ThreadPoolExecutor) -> Changes:
    """Read what is about a tensor, from `at` in the open delta."""
    elements, item_bytes = math.prod(tensor.shape), WIDTHS[tensor.dtype]
    each = safetensors.PIECE_BYTES // item_bytes

    def one(number: int, begin: int, size_bytes: int) -> tuple[NDArray[np.int64], NDArray[Any]]:
        data = safetensors.read(file, begin, size_bytes).data
        places, values = read_piece(data, min(each, elements - number * each), item_bytes)
        return places + number * each, values

    begins = [at + before for before in accumulate([0, *tensor.pieces[:-1]])]
    parts = [(n, begin, size) for n, (begin, size) in enumerate(zip(begins, tensor.pieces, strict=True)) if size]
    found = list(pool.map(lambda part: one(*part), parts))
    places, values = (np.concatenate(column) for column in zip(*found, strict=True))
    return Changes(tensor, places, values)


def index_of(path: Path) -> Index:
    """What a delta is about, if it is intact, which this does not say. Raises Corrupt, OSError."""
    with path.open("rb") as opened:
        return _index_at_end(opened.fileno())


def _index_in(file: int) -> Index:
    """The index of a whole delta. Raises Corrupt."""
    size_bytes = os.fstat(file).st_size
    hasher = blake3(max_threads=blake3.AUTO)
    for at, length in safetensors.pieces_of(0, max(0, size_bytes - DIGEST_BYTES)):
        hasher.update(safetensors.read(file, at, length).data)
    if bytes(safetensors.read(file, max(0, size_bytes - DIGEST_BYTES), DIGEST_BYTES)) != hasher.digest():
        raise Corrupt("a delta of weights is damaged")
    return _index_at_end(file)


def _index_at_end(file: int) -> Index:
    size_bytes = os.fstat(file).st_size
    if size_bytes < len(MAGIC) + FOOT_BYTES or bytes(safetensors.read(file, 0, len(MAGIC))) != MAGIC:
        raise Corrupt("this is no delta of weights")
    foot = bytes(safetensors.read(file, size_bytes - FOOT_BYTES, FOOT_BYTES))
    length, index_bytes = int.from_bytes(foot[:8], "little"), int.from_bytes(foot[8:16], "little")
    if length > size_bytes - FOOT_BYTES:
        raise Corrupt("a delta of weights is shorter than its index")
    frame = safetensors.read(file, size_bytes - FOOT_BYTES - length, length)
    index = from_json(decompress(frame.data, index_bytes), Index, NAME)
    check_schema(index.schema, SCHEMA, NAME)
    if index.piece_bytes != safetensors.PIECE_BYTES:
        raise Corrupt(f"{NAME} is in pieces of {index.piece_bytes} bytes, not {safetensors.PIECE_BYTES}")
    return index


@dataclass(frozen=True, slots=True)
class _Piece:
    """A changed piece of the weights' file."""

    at: int
    size_bytes: int
    item_bytes: int


@dataclass(frozen=True, slots=True)
class _Part:
    """What an open delta says about a piece."""

    file: int
    at: int
    size_bytes: int


def _fitting(index: Index, layout: Layout) -> Iterator[tuple[_Piece, int, int]]:
    """The changed pieces, and where in the delta how many bytes are about each. Raises Corrupt where the weights'
    file has no such tensor."""
    part_at = len(MAGIC)
    for tensor in index.tensors:
        placed = layout.get(tensor.name)
        if placed is None or (placed.dtype, placed.shape) != (tensor.dtype, tensor.shape):
            raise Corrupt(f"{NAME} changes {tensor.name}, {tensor.dtype} {list(tensor.shape)}, which is not there")
        pieces = list(placed.pieces)
        if len(pieces) != len(tensor.pieces):
            raise Corrupt(f"{NAME} has {tensor.name} in {len(tensor.pieces)} pieces, not {len(pieces)}")
        for (at, size_bytes), part_bytes in zip(pieces, tensor.pieces, strict=True):
            if part_bytes:
                yield _Piece(at, size_bytes, placed.item_bytes), part_at, part_bytes
            part_at += part_bytes
