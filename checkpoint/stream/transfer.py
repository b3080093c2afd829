"""A checkpoint on its way into the store and back: chunks, then a manifest, then a line in the catalog."""

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
from checkpoint.stream.chunks import Progress
from checkpoint.stream.manifest import Manifest
from policies.model.vocabulary import PolicyVersion

LATELY = 8  # revisions; what an upload began before them has left is sent anew


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
    """Store files as a checkpoint; it exists when this returns, and not a moment earlier.

    Chunks that the store has are not sent, whoever sent them. Raises StoreError, OSError.
    """
    while True:
        # The catalog before the listing: what is condemned later is found when the commit is tried.
        present = catalog.newest()
        listed, stored = _reliable(store, catalog, present)
        # A name that was condemned is not used again: the number in it is older than the revision that did so.
        sent = chunks.send(
            store, layout.BLOBS, files, stored=stored, suffix=f".{present.number}", progress=progress
        )
        made = Manifest(manifest.SCHEMA, str(version), now_s, layout.BLOBS, sent, meta)
        key, data = layout.checkpoint(version, secrets.token_hex(4)), to_json(made)
        store.put(key, data)
        entry = Checkpoint(str(version), key, blake3(data).hexdigest(), now_s, made.size_bytes)
        objects = frozenset({key, *(f"{layout.BLOBS}/{chunk}" for chunk in made.chunks)})
        try:
            # Before a revision says that they are there; what a listed checkpoint names has been already.
            store.secure(sorted(objects - {f"{layout.BLOBS}/{chunk}" for chunk in listed}))
            catalog.commit(now_s, entry, objects, present.number)
        except (Condemned, NotFound):  # the latter: condemned, and deleted already
            continue
        return entry


def _reliable(store: Store, catalog: Catalog, present: Revision) -> tuple[frozenset[str], dict[str, str]]:
    """What the newest checkpoint names; and by digest what a new one may refer to: as much of that as is there,
    and what uploads that were cut off lately have left.

    A chunk that is merely there may not be relied upon. It can have been condemned, deleted and forgotten, and be
    there again because some writer was late; a collector that is late, too, then deletes it once more.
    """
    there = {name for entry in store.entries(layout.BLOBS) if (name := layout.chunk_of(entry.key))}
    named: frozenset[str] = frozenset()
    if present.checkpoints:
        with contextlib.suppress(NotFound, Corrupt):
            named = read_manifest(store, present.checkpoints[-1]).chunks
    late = {name: number for name in there - named if (number := _number_in(name)) >= present.number - LATELY}
    condemned = catalog.condemned_since(min(late.values(), default=present.number), present)
    unusable = {*present.suspect, *(key.removeprefix(f"{layout.BLOBS}/") for key in condemned)}
    return named, {chunks.digest_of(name): name for name in sorted((there & named | late.keys()) - unusable)}


def _number_in(chunk: str) -> int:
    """The revision that a chunk's writer had read before."""
    return int(chunk.partition(".")[2])


def read_manifest(store: Store, checkpoint: Checkpoint) -> Manifest:
    """The manifest that the catalog means. Raises NotFound, Corrupt, StoreError."""
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
