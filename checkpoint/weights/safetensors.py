"""Read and write safetensors files in pieces, and compute the digest of their content.

A file is the length of a header in 8 bytes, the header as JSON, then every tensor's bytes without gaps. This
module never holds a complete tensor or maps the file, which may be as large as the memory.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from grpo_orch.checkpoint.store.errors import Corrupt

HEADER_SIZE_MAX = 100 * 2**20  # safetensors' own limit
ALIGNMENT = 8  # of the first tensor, as in files that safetensors writes
DIGEST_BYTES = 16  # nodes identify policies only by it: collisions must be infeasible
# The part of a tensor that a thread processes: large enough to make numpy's call overhead negligible.
PIECE_BYTES = 8 * 2**20

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Placed:
    """A tensor in a file: its type by safetensors' name, shape, offset and size."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    size_bytes: int

    @property
    def item_bytes(self) -> int:
        """Return the bytes per element; 1 if an element is not a word, such as types of fewer than 8 bits."""
        elements = math.prod(self.shape)
        size = self.size_bytes // elements if elements else 1
        return size if size in (1, 2, 4, 8) and size * elements == self.size_bytes else 1

    @property
    def pieces(self) -> Iterator[tuple[int, int]]:
        """Return the offsets of its pieces in the file, and their sizes in bytes."""
        return pieces_of(self.begin, self.begin + self.size_bytes)


Layout = dict[str, Placed]  # by name


def pieces_of(begin: int, end: int) -> Iterator[tuple[int, int]]:
    """Return the offsets of the pieces between `begin` and `end`, and their sizes in bytes."""
    return ((at, min(PIECE_BYTES, end - at)) for at in range(begin, end, PIECE_BYTES))


def layout_of(path: Path) -> Layout:
    """Return the tensors of a file. Raises Corrupt if it is not a safetensors file, OSError."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > HEADER_SIZE_MAX:
            raise Corrupt(f"{path.name} is not a safetensors file")
        head = file.read(length)
        size_bytes = os.fstat(file.fileno()).st_size
    try:
        header = json.loads(head)
        header.pop("__metadata__", None)
        layout = {name: _placed(entry, 8 + length) for name, entry in header.items()}
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        raise Corrupt(f"{path.name} is not a safetensors file: {error}") from error
    if any(tensor.size_bytes < 0 or tensor.begin + tensor.size_bytes > size_bytes for tensor in layout.values()):
        raise Corrupt(f"{path.name} is truncated")
    return layout


def _placed(entry: Mapping[str, object], data: int) -> Placed:
    match entry:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [int(begin), int(end)]}:
            return Placed(dtype, tuple(int(size) for size in shape), data + begin, end - begin)
    raise ValueError("a tensor without dtype, shape or data_offsets")


def create(path: Path, tensors: Mapping[str, tuple[str, tuple[int, ...], int]]) -> Layout:
    """Write a file of zeros for tensors of these types, shapes and sizes in bytes. Raises OSError.

    Tensors with the widest elements come first, so that all are aligned.
    """
    unplaced = {name: Placed(dtype, shape, 0, size) for name, (dtype, shape, size) in tensors.items()}
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offsets, end = dict[str, int](), 0
    for name in sorted(unplaced, key=lambda name: (-unplaced[name].item_bytes, name)):
        tensor = unplaced[name]
        offsets[name], end = end, end + tensor.size_bytes
        header[name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [offsets[name], end]}
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        file.truncate(8 + len(head) + end)
    data = 8 + len(head)
    return {name: replace(tensor, begin=data + offsets[name]) for name, tensor in unplaced.items()}


def read(file: int, at: int, size_bytes: int) -> Bytes:
    """Read bytes of an open file. Raises Corrupt if it is too short, OSError."""
    piece = np.empty(size_bytes, np.uint8)
    done = 0
    while done < size_bytes:
        got = os.preadv(file, [piece.data[done:]], at + done)
        if got == 0:
            raise Corrupt("a tensor file is truncated")
        done += got
    return piece


def write(file: int, at: int, piece: Bytes) -> None:
    """Write bytes into an open file. Raises OSError."""
    view, done = piece.data, 0
    while done < len(view):
        done += os.pwrite(file, view[done:], at + done)


def content_digest(tensors: Iterable[tuple[str, str, tuple[int, ...], str]]) -> str:
    """Return the digest of weights: 128 bits, in hex, of BLAKE3 over each tensor's name, type, shape and digest.

    Tensors are hashed in the order of their names, independent of their place in a file.
    """
    lines = (json.dumps([name, dtype, list(shape), digest]) for name, dtype, shape, digest in sorted(tensors))
    return blake3("".join(f"{line}\n" for line in lines).encode()).hexdigest(DIGEST_BYTES)


def content_of(path: Path, pool: ThreadPoolExecutor) -> str:
    """Read a file completely and return its `content_digest`. Raises Corrupt, OSError."""
    layout = layout_of(path)
    with path.open("rb") as file:
        digests = pool.map(lambda tensor: _digest(file.fileno(), tensor), layout.values())
        return content_digest(
            (name, tensor.dtype, tensor.shape, digest)
            for (name, tensor), digest in zip(layout.items(), digests, strict=True)
        )


def _digest(file: int, placed: Placed) -> str:
    hasher = blake3()
    for at, size_bytes in placed.pieces:
        hasher.update(read(file, at, size_bytes).data)
    return hasher.hexdigest()
