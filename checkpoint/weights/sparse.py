"""What has changed in a piece of a tensor, as bytes: which elements, and what they are now.

Elements are words of 1, 2, 4 or 8 bytes, compared by their bits: NaN equals itself, and -0.0 is not 0.0. Sent are
the new values, not differences to the old ones, so that to overwrite twice is to overwrite once.

A piece that has changed is: the number of elements, the number of long gaps, the compressed sizes of its parts (4
bytes each, little endian), then the parts, each a zstd frame. They are: of each changed element the gap since the
one before, in a byte, 255 for all longer ones; the longer ones in 4 bytes; the values' first bytes, their second
bytes and so on, for bytes of the same significance are alike. Gaps of a hundredth changed take less than a byte.
"""

from __future__ import annotations

import struct
import threading
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray

from checkpoint.store.errors import Corrupt
from checkpoint.weights.safetensors import Bytes

LEVEL = 1  # more brings 1 % and takes three times as long: there is nothing to find but how often a byte occurs
LONG = 255
WORD_BYTES = 8  # compared first: most are equal

_threads = threading.local()  # zstd's contexts, which are slow to make


def encode(old: Bytes, new: Bytes, item_bytes: int) -> bytes:
    """What makes `old` into `new`, which are equally long and whole elements; nothing where they are equal."""
    at = changed(old, new, item_bytes)
    if not len(at):
        return b""
    gaps = np.diff(at, prepend=-1) - 1
    long = gaps[gaps >= LONG].astype("<u4")
    values = new.view(f"<u{item_bytes}")[at].view(np.uint8).reshape(-1, item_bytes)
    parts = [np.minimum(gaps, LONG).astype(np.uint8), long.view(np.uint8), *values.T]
    frames = [_compressor().compress(np.ascontiguousarray(part).data) for part in parts]
    return b"".join([struct.pack(f"<{2 + len(frames)}I", len(at), len(long), *map(len, frames)), *frames])


def decode(data: memoryview, piece: Bytes, item_bytes: int) -> None:
    """Overwrite what has changed in `piece`. Raises Corrupt before it writes anything."""
    elements = piece.view(f"<u{item_bytes}")
    places, values = read(data, len(elements), item_bytes)
    elements[places] = values


def read(data: memoryview, elements: int, item_bytes: int) -> tuple[NDArray[np.int64], NDArray[Any]]:
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


def changed(old: Bytes, new: Bytes, item_bytes: int) -> NDArray[np.int64]:
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
