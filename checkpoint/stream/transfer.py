"""Uploads, reads and verifies checkpoints: chunks, then a manifest, then an entry in the catalog."""

from __future__ import annotations

import contextlib
import secrets
from pathlib import Path

from blake3 import blake3

from checkpoint.store import layout
from checkpoint.store.codec import to_json
from checkpoint.store.errors import Corrupt, NotFound
from checkpoint.store.run_store import Store
from checkpoint.stream import chunks, manifest
from checkpoint.stream.catalog import Catalog, Checkpoint, Condemned, Revision
from checkpoint.stream.chunks import Progress, send
from checkpoint.stream.manifest import Manifest
from policies.model.vocabulary import PolicyVersion

RECENT = 8  # revisions; chunks that an earlier upload has left are sent again


def upload(
    store: Store,
    catalog: Catalog,
    files: list[tuple[str, Path]],
    version: PolicyVersion,
    now_s: float,
    meta: dict[str, str],
    *,
    progress: Progress = lambda _: None,
) -> Checkpoint:
    """Store files as a checkpoint, which exists once the catalog lists it.

    Chunks that the store has are not sent again. Raises StoreError, OSError.
    """
    while True:
        # The catalog before the listing: what is condemned later is found at the commit.
        present = catalog.newest()
        listed, stored = _reusable(store, catalog, present)
        # A condemned name is never used again: its number is older than the revision that condemned it.
        sent = send(store, layout.BLOBS, files, stored=stored, suffix=f".{present.number}", progress=progress)
        made = Manifest(manifest.SCHEMA, str(version), now_s, layout.BLOBS, sent, meta)
        key, data = layout.checkpoint(version, secrets.token_hex(4)), to_json(made)
        store.put(key, data)
        entry = Checkpoint(str(version), key, blake3(data).hexdigest(), now_s, made.size_bytes)
        objects = frozenset({key, *(f"{layout.BLOBS}/{chunk}" for chunk in made.chunks)})
        try:
            # Before a revision relies on them. Those that a listed checkpoint names were secured for it.
            store.secure(sorted(objects - {f"{layout.BLOBS}/{chunk}" for chunk in listed}))
            catalog.commit(now_s, entry, objects, present.number)
        except (Condemned, NotFound):  # the latter: condemned, and deleted already
            continue
        return entry


def _reusable(store: Store, catalog: Catalog, present: Revision) -> tuple[frozenset[str], dict[str, str]]:
    """The chunks that the newest checkpoint names; and by digest those that a new one may reuse: of the former
    what is there, and what uploads have left that were cut off recently.

    A chunk is not reusable merely because it is there. It may have been condemned, deleted and forgotten, and be
    back because a writer was late; a collector that is late, too, then deletes it again.
    """
    there = {name for entry in store.entries(layout.BLOBS) if (name := layout.chunk_of(entry.key))}
    named: frozenset[str] = frozenset()
    if present.checkpoints:
        with contextlib.suppress(NotFound, Corrupt):
            named = read_manifest(store, present.checkpoints[-1]).chunks
    recent = {name: number for name in there - named if (number := _number_in(name)) >= present.number - RECENT}
    condemned = catalog.condemned_since(min(recent.values(), default=present.number), present)
    unusable = {*present.suspect, *(key.removeprefix(f"{layout.BLOBS}/") for key in condemned)}
    return named, {chunks.digest_of(name): name for name in sorted((there & named | recent.keys()) - unusable)}


def _number_in(chunk: str) -> int:
    """The revision that a chunk's writer had read."""
    return int(chunk.partition(".")[2])


def read_manifest(store: Store, checkpoint: Checkpoint) -> Manifest:
    """The manifest of a listed checkpoint. Raises NotFound, Corrupt, StoreError."""
    data = store.get(checkpoint.manifest)
    if blake3(data).hexdigest() != checkpoint.digest:
        raise Corrupt(f"{checkpoint.manifest}: its digest is not the catalog's", "it was damaged after its upload")
    return manifest.decode(data, checkpoint.manifest)


def verify(store: Store, checkpoint: Checkpoint, *, progress: Progress = lambda _: None) -> list[str]:
    """Read every byte of a checkpoint; return what is wrong with it, a line each, nothing for a whole one.

    Raises StoreError when the store itself fails.
    """
    try:
        found = read_manifest(store, checkpoint)
    except (Corrupt, NotFound) as error:
        return [str(error)]
    return list(chunks.check(store, found.root, sorted(found.chunks), progress=progress).values())
