"""Uploads, reads and verifies checkpoints: chunks, then a manifest, then an entry in the catalog."""

from __future__ import annotations

import contextlib
import functools
import secrets
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from blake3 import blake3

from checkpoint.store import layout
from checkpoint.store.codec import to_json
from checkpoint.store.document import OptionalDocument, Unreadable
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


# A checkpoint's weights as plain files in the store, for `from_pretrained` and for use without this project.
#
# The rest of the checkpoint, above all the optimizer, is left out. The document beside the folder is written last:
# an export without it was cut off, and is made again.

# What only a resumed trainer needs.
TRAINING_STATE = (".pt", ".pth", ".bin")
# The last three are DeepSpeed's.
TRAINING_FILES = frozenset(
    {"ref_model.safetensors", "detector.json", "run.json", "latest", "zero_to_fp32.py", "zero_to_torch.py"}
)


@dataclass(frozen=True, slots=True)
class Export:
    """The outcome of an export. `prefix` is empty if it failed for good, and `error` says why."""

    version: str  # PolicyVersion as text
    prefix: str
    error: str = ""


def export_weights(store: Store, version: PolicyVersion) -> Export:
    """Export a listed checkpoint, unless it is there already. Raises StoreError when the store fails."""
    document = export_of(version)
    done = document.read(store, Unreadable())
    if done is not None:
        return done
    prefix = layout.export(version)
    try:
        found = read_manifest(store, Catalog(store, "export").newest().find(version))
        wanted = [file for file in found.files if is_weights(file.name)]
        for file in wanted:
            store.put_parts(f"{prefix}/{file.name}", functools.partial(chunks.parts, store, found.root, file))
        store.secure([f"{prefix}/{file.name}" for file in wanted])
        export = Export(str(version), prefix)
    except (Corrupt, NotFound) as error:  # no further try can help
        export = Export(str(version), "", str(error))
    document.write(store, export)
    return export


def export_of(version: PolicyVersion) -> OptionalDocument[Export]:
    """What became of that version's export: absent, or damaged, while it is not done."""
    return OptionalDocument(f"{layout.export(version)}.json", Export)


def is_weights(name: str) -> bool:
    """Whether a checkpoint's file of that name is part of the model, and not of its training."""
    path = PurePosixPath(name)
    return path.suffix not in TRAINING_STATE and path.name not in TRAINING_FILES
