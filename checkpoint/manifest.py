"""Folders in the store: files first, then a manifest that makes them exist.

Checkpoints and policy weights are both this. A prefix without a manifest is an upload that was cut off, and is
never listed; a file whose digest differs from the manifest's is never used.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path

from blake3 import blake3

from checkpoint import layout
from checkpoint.codec import from_json, to_json
from checkpoint.errors import Corrupt
from checkpoint.store import Store
from policies.vocabulary import PolicyVersion

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class File:
    """One file of a folder; `digest` is BLAKE3 in hex."""

    name: str
    size_bytes: int
    digest: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a folder holds. `version` is a PolicyVersion as text; `meta` is the writer's own."""

    schema: int
    version: str
    created_at_s: float
    files: list[File]
    meta: dict[str, str] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        """Names the content: twelve hex digits of BLAKE3 over the names and digests of all files."""
        lines = "".join(f"{file.name} {file.digest}\n" for file in sorted(self.files, key=lambda f: f.name))
        return blake3(lines.encode()).hexdigest()[:12]

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)


def digest_of(path: Path) -> str:
    """BLAKE3 of a file, in hex, read through a memory map."""
    hasher = blake3()
    hasher.update_mmap(path)
    return hasher.hexdigest()


def publish(
    store: Store,
    prefix: str,
    folder: Path,
    version: PolicyVersion,
    now_s: float,
    meta: dict[str, str] | None = None,
) -> Manifest:
    """Upload every file below `folder`, then the manifest. Publishing the same again replaces it whole."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    files = []
    for path in paths:
        name = path.relative_to(folder).as_posix()
        files.append(File(name, path.stat().st_size, digest_of(path)))
        store.put_file(f"{prefix}/{name}", path)
    manifest = Manifest(SCHEMA, str(version), now_s, files, meta or {})
    store.put(f"{prefix}/{layout.MANIFEST}", to_json(manifest))
    return manifest


def load(store: Store, prefix: str) -> Manifest:
    """Read a manifest. Raises NotFound (nothing committed there) or Corrupt."""
    key = f"{prefix}/{layout.MANIFEST}"
    manifest = from_json(store.get(key), Manifest, key)
    if manifest.schema > SCHEMA:
        raise Corrupt(f"{key}: schema {manifest.schema}", f"this grpo-orch reads up to {SCHEMA}; use a newer one")
    return manifest


def fetch(store: Store, prefix: str, folder: Path) -> Manifest:
    """Download what the manifest names into `folder`, which appears only when every digest held.

    Raises NotFound, Corrupt.
    """
    manifest = load(store, prefix)
    part = folder.with_name(f".{folder.name}.part-{os.getpid()}")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    try:
        for file in manifest.files:
            path = part / file.name
            if not path.resolve().is_relative_to(part.resolve()):
                raise Corrupt(f"{prefix}: file name {file.name!r} leaves its folder")
            store.get_file(f"{prefix}/{file.name}", path)
            if path.stat().st_size != file.size_bytes or digest_of(path) != file.digest:
                raise Corrupt(
                    f"{prefix}/{file.name}: its digest is not the manifest's", "it was damaged after its upload"
                )
        shutil.rmtree(folder, ignore_errors=True)
        part.rename(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return manifest


def committed(store: Store, root: str, *, after: str | None = None) -> list[PolicyVersion]:
    """Return the versions below `root` (layout.CHECKPOINTS or layout.POLICIES) that have a manifest, in order.

    With `after`, a manifest's key, only versions beyond that one are listed.
    """
    found = []
    for entry in store.entries(root, after=after):
        if entry.key.endswith(f"/{layout.MANIFEST}"):
            try:
                found.append(layout.version_of(entry.key))
            except ValueError:
                continue  # a foreign file in the prefix
    return sorted(found)


def remove(store: Store, prefix: str) -> None:
    """Delete a folder, its manifest first, so that no half of it is ever listed."""
    keys = [entry.key for entry in store.entries(prefix)]
    store.delete(sorted(keys, key=lambda key: not key.endswith(f"/{layout.MANIFEST}")))
