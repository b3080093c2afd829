"""Files of tensors as safetensors lays them out, in pieces, and the digest that names their content.

A file is the length of a header in 8 bytes, the header as JSON, then every tensor's bytes without a gap. Nothing
here holds a whole tensor or maps the file, which may be as large as the memory.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from checkpoint.store.errors import Corrupt

HEADER_SIZE_MAX = 100 * 2**20  # which is safetensors' own limit
ALIGNMENT = 8  # of the first tensor, as safetensors writes it
DIGEST_BYTES = 16  # nodes tell policies apart by it alone: two of one digest must not arise
# A piece of a tensor that one thread has in hand: large enough that numpy's loops outweigh its calls.
PIECE_BYTES = 8 * 2**20

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Placed:
    """A tensor in a file: its type as safetensors names it, and where its bytes are."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    size_bytes: int

    @property
    def item_bytes(self) -> int:
        """Of one element; 1 where elements are not whole words, as those of fewer than 8 bits."""
        elements = math.prod(self.shape)
        size = self.size_bytes // elements if elements else 1
        return size if size in (1, 2, 4, 8) and size * elements == self.size_bytes else 1

    @property
    def pieces(self) -> Iterator[tuple[int, int]]:
        """Where its pieces begin in the file, and their sizes in bytes."""
        return pieces_of(self.begin, self.begin + self.size_bytes)


Layout = dict[str, Placed]  # by name


def pieces_of(begin: int, end: int) -> Iterator[tuple[int, int]]:
    """Where the pieces of a stretch begin, and their sizes in bytes."""
    return ((at, min(PIECE_BYTES, end - at)) for at in range(begin, end, PIECE_BYTES))


def layout_of(path: Path) -> Layout:
    """Where a file's tensors are. Raises Corrupt for what is no safetensors file, OSError."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > HEADER_SIZE_MAX:
            raise Corrupt(f"{path.name} is no safetensors file")
        head = file.read(length)
        size_bytes = os.fstat(file.fileno()).st_size
    try:
        header = json.loads(head)
        header.pop("__metadata__", None)
        found = {name: _placed(one, 8 + length) for name, one in header.items()}
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        raise Corrupt(f"{path.name} is no safetensors file: {error}") from error
    if any(one.size_bytes < 0 or one.begin + one.size_bytes > size_bytes for one in found.values()):
        raise Corrupt(f"{path.name} is cut off")
    return found


def _placed(one: Mapping[str, object], data: int) -> Placed:
    match one:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [int(begin), int(end)]}:
            return Placed(dtype, tuple(int(size) for size in shape), data + begin, end - begin)
    raise ValueError("a tensor without a type, a shape or a place")


def create(path: Path, tensors: Mapping[str, tuple[str, tuple[int, ...], int]]) -> Layout:
    """Write a file for tensors of these types, shapes and sizes in bytes, its bytes still zero. Raises OSError.

    Those of the widest elements come first, so that each is aligned to its own.
    """
    bare = {name: Placed(dtype, shape, 0, size) for name, (dtype, shape, size) in tensors.items()}
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offsets, end = dict[str, int](), 0
    for name in sorted(bare, key=lambda one: (-bare[one].item_bytes, one)):
        one = bare[name]
        offsets[name], end = end, end + one.size_bytes
        header[name] = {"dtype": one.dtype, "shape": one.shape, "data_offsets": [offsets[name], end]}
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        file.truncate(8 + len(head) + end)
    data = 8 + len(head)
    return {name: Placed(one.dtype, one.shape, data + offsets[name], one.size_bytes) for name, one in bare.items()}


def read(file: int, at: int, size_bytes: int) -> Bytes:
    """Bytes of an open file. Raises Corrupt where it ends before, OSError."""
    piece = np.empty(size_bytes, np.uint8)
    done = 0
    while done < size_bytes:
        got = os.preadv(file, [piece.data[done:]], at + done)
        if got == 0:
            raise Corrupt("a file of tensors is cut off")
        done += got
    return piece


def write(file: int, at: int, piece: Bytes) -> None:
    """Write bytes into an open file. Raises OSError."""
    view, done = piece.data, 0
    while done < len(view):
        done += os.pwrite(file, view[done:], at + done)


def content_digest(tensors: Iterable[tuple[str, str, tuple[int, ...], str]]) -> str:
    """The name of weights: 128 bits in hex of BLAKE3 over name, type, shape and BLAKE3 of the bytes of each.

    In the order of their names, wherever in a file they are.
    """
    lines = (json.dumps([name, dtype, list(shape), digest]) for name, dtype, shape, digest in sorted(tensors))
    return blake3("".join(f"{line}\n" for line in lines).encode()).hexdigest(DIGEST_BYTES)


def content_of(path: Path, pool: ThreadPoolExecutor) -> str:
    """The `content_digest` of a file, every byte read. Raises Corrupt, OSError."""
    layout = layout_of(path)
    with path.open("rb") as file:
        digests = pool.map(lambda one: _digest(file.fileno(), one), layout.values())
        return content_digest(
            (name, one.dtype, one.shape, digest)
            for (name, one), digest in zip(layout.items(), digests, strict=True)
        )


def _digest(file: int, placed: Placed) -> str:
    hasher = blake3()
    for at, size_bytes in placed.pieces:
        hasher.update(read(file, at, size_bytes).data)
    return hasher.hexdigest()
