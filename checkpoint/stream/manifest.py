"""Folders in the store, for policy weights and checkpoints: chunks, then a manifest.

A folder exists once it has a manifest. Chunks without one belong to an interrupted upload and are never listed; a
chunk whose digest differs from its name is never used.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from blake3 import blake3

from grpo_orch.checkpoint.store import layout
from grpo_orch.checkpoint.store.codec import check_schema, from_json, to_json
from grpo_orch.checkpoint.store.errors import AlreadyExists, Corrupt, NotFound
from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.checkpoint.stream import chunks
from grpo_orch.checkpoint.stream.chunks import File, Progress, send
from grpo_orch.policies.model.vocabulary import PolicyVersion

SCHEMA = 2  # 1 stored unchunked files
# Nodes identify policies only by the digest, so collisions must be infeasible, by accident or on purpose.
DIGEST_BYTES = 16

# Keys of a published policy's `meta`.
KIND = "kind"
# All weights, optionally with a delta next to them; only a delta; a LoRA adapter for base weights that nodes have.
WHOLE, DELTA, ADAPTER = "whole", "delta", "adapter"
# All weights of this policy, which may include later changes. After applying all deltas from here to a policy that
# names this one under SNAPSHOT, they are that policy's weights.
FUZZY = "fuzzy"
SNAPSHOT = "snapshot"  # the prefix of the policy with such weights
WEIGHTS = "weights"  # `checkpoint.weights.safetensors.content_digest`, independent of the transport
BASE, BASE_PREFIX = "base", "base_prefix"  # the label and the prefix of the policy that the delta overwrites


@dataclass(frozen=True, slots=True)
class Manifest:
    """The content of a folder. Written by the trainer's machine after all chunks.

    `version` is a PolicyVersion as text; `root` the prefix of its chunks; `meta` is defined by the writer.
    """

    schema: int
    version: str
    created_at_s: float  # seconds since the epoch
    root: str
    files: list[File]
    meta: dict[str, str] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        """Return 128 bits, in hex, of BLAKE3 over the names and digests of all files."""
        lines = "".join(f"{file.name} {file.digest}\n" for file in sorted(self.files, key=lambda f: f.name))
        return blake3(lines.encode()).hexdigest(DIGEST_BYTES)

    def digest_as(self, wanted: str) -> str:
        """Return the digest of the weights, as in a policy's label; "" if `wanted` is "", which means any."""
        return self.meta.get(WEIGHTS, self.digest) if wanted else ""

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)

    @property
    def chunks(self) -> frozenset[str]:
        """Return the names of all chunks, below `root`."""
        return frozenset(chunk for file in self.files for chunk in file.chunks)


def files_below(folder: Path) -> list[tuple[str, Path]]:
    """Return every file below the folder as `(name relative to it, path)`, in name order."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return [(path.relative_to(folder).as_posix(), path) for path in paths]


def publish(
    store: Store,
    prefix: str,
    folder: Path,
    version: PolicyVersion,
    now_s: float,
    meta: dict[str, str] | None = None,
) -> Manifest:
    """Upload every file below `folder` to `prefix`, then write or replace the manifest. Raises StoreError."""
    files = send(store, prefix, files_below(folder), stored={})
    manifest = Manifest(SCHEMA, str(version), now_s, prefix, files, meta or {})
    store.put(f"{prefix}/{layout.MANIFEST}", to_json(manifest))
    return manifest


def publish_once(
    store: Store,
    prefix: str,
    files: list[File],
    version: PolicyVersion,
    now_s: float,
    meta: dict[str, str],
    name: str = layout.MANIFEST,
) -> Manifest:
    """Create the manifest of files sent to `prefix`. It is never replaced, since others may depend on it.

    Raises AlreadyExists, StoreError.
    """
    manifest = Manifest(SCHEMA, str(version), now_s, prefix, files, meta)
    key, data = f"{prefix}/{name}", to_json(manifest)
    try:
        store.create(key, data)
    except AlreadyExists:
        if store.get(key) != data:  # equal: our own, after a lost response
            raise
    return manifest


def load(store: Store, prefix: str, name: str = layout.MANIFEST) -> Manifest:
    """Read the manifest of a published folder. Raises NotFound if nothing was published there, and Corrupt."""
    key = f"{prefix}/{name}"
    return decode(store.get(key), key)


def decode(data: bytes, key: str) -> Manifest:
    """Decode a manifest. Raises Corrupt naming `key`."""
    manifest = from_json(data, Manifest, key)
    check_schema(manifest.schema, SCHEMA, key)
    return manifest


def part_of(folder: Path) -> Path:
    """Return the temporary path of a folder during its download."""
    return folder.with_name(f".{folder.name}.part")


def materialize(
    store: Store,
    root: str,
    files: list[File],
    folder: Path,
    progress: Progress = lambda _: None,
) -> None:
    """Download files of a manifest into `folder`, which appears once every chunk is verified.

    Only one process at a time may fill a folder. Chunks that a killed process left next to it are reused.

    Raises NotFound, Corrupt, StoreError, OSError.
    """
    part = part_of(folder)
    part.mkdir(parents=True, exist_ok=True)
    wanted = {file.name for file in files}
    for name, path in files_below(part):  # left by the download of another manifest
        if name not in wanted:
            path.unlink()
    try:
        receive(store, root, files, part, progress)
    except (Corrupt, NotFound):  # a retry would fail as well
        shutil.rmtree(part, ignore_errors=True)
        raise
    shutil.rmtree(folder, ignore_errors=True)
    part.rename(folder)


def receive(
    store: Store, root: str, files: Iterable[File], folder: Path, progress: Progress = lambda _: None
) -> None:
    """Download files into `folder`, concurrently, and verify them. Valid chunks of an earlier attempt stay.

    Holds at most `chunks.TRANSFERS` chunks in memory. Raises DamagedChunk, Corrupt, NotFound, StoreError, OSError.
    """
    wanted = [chunk for file in files for chunk in _wanted_chunks(root, file, folder)]
    with ThreadPoolExecutor(chunks.TRANSFERS, thread_name_prefix="receive") as pool:
        futures = [pool.submit(chunk.receive, store, root, progress) for chunk in wanted]
        chunks.all_or_first_error(futures, pool)


@dataclass(frozen=True, slots=True)
class _WantedChunk:
    """A chunk and its offset in a file. `may_exist`: an earlier download may have written it."""

    name: str
    path: Path
    offset: int
    size_bytes: int
    may_exist: bool

    def receive(self, store: Store, root: str, progress: Progress) -> None:
        """Write the verified chunk into the file. Raises DamagedChunk, Corrupt, NotFound, StoreError, OSError."""
        if not (self.may_exist and self._exists()):
            data = chunks.verified(store, f"{root}/{self.name}")
            if len(data) != self.size_bytes:
                raise Corrupt(f"{root}/{self.name}: {len(data)} bytes, but the manifest has {self.size_bytes}")
            with self.path.open("r+b") as out:
                written = os.pwrite(out.fileno(), data, self.offset)
            if written != self.size_bytes:  # the disk is full
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
        progress(self.size_bytes)

    def _exists(self) -> bool:
        with chunks.window(self.path, self.offset) as content:
            return chunks.matches(content, self.name)


def _wanted_chunks(root: str, file: File, folder: Path) -> Iterator[_WantedChunk]:
    """Set the file's size and yield its chunks. Raises Corrupt, OSError."""
    path = _path_below(folder, file.name, root)
    if file.size_bytes < 0 or len(chunks.offsets(file.size_bytes)) != len(file.chunks):
        raise Corrupt(f"{root}: {file.name} has {file.size_bytes} bytes in {len(file.chunks)} chunks")
    path.parent.mkdir(parents=True, exist_ok=True)
    may_exist = path.exists()
    with path.open("ab") as out:
        out.truncate(file.size_bytes)
    for name, offset, size_bytes in chunks.places(file):
        yield _WantedChunk(name, path, offset, size_bytes, may_exist)


def _path_below(folder: Path, name: str, root: str) -> Path:
    """Return the path of a manifest's file. Raises Corrupt for a name outside the folder."""
    parts = PurePosixPath(name).parts
    if not parts or ".." in parts or name.startswith("/") or "\0" in name:
        raise Corrupt(f"{root}: file name {name!r} is outside the folder")
    return folder / name


def remove(store: Store, prefix: str) -> None:
    """Delete a published folder, its manifest first, so that an incomplete folder is never valid."""
    keys = {entry.key for entry in store.entries(prefix)}
    store.delete([f"{prefix}/{layout.MANIFEST}"])
    store.delete(sorted(keys - {f"{prefix}/{layout.MANIFEST}"}))
