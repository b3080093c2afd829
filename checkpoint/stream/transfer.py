"""Upload, read and verify checkpoints: chunks, then a manifest, then an entry in the catalog."""

from __future__ import annotations

import contextlib
import secrets
from pathlib import Path, PurePosixPath

from blake3 import blake3

from grpo_orch.checkpoint.store import layout
from grpo_orch.checkpoint.store.codec import to_json
from grpo_orch.checkpoint.store.errors import Corrupt, NotFound
from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.checkpoint.stream import chunks, manifest
from grpo_orch.checkpoint.stream.catalog import Catalog, Checkpoint, Condemned, Revision
from grpo_orch.checkpoint.stream.chunks import Progress, send
from grpo_orch.checkpoint.stream.manifest import Manifest
from grpo_orch.policies.model.vocabulary import PolicyVersion

RECENT = 8  # revisions; older unlisted chunks are sent again


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
        # Read the catalog before the listing, so that the commit finds later condemnations.
        revision = catalog.newest()
        listed, stored = _reusable(store, catalog, revision)
        # Condemned names are never used again: their number is older than the revision that condemned them.
        sent = send(store, layout.BLOBS, files, stored=stored, suffix=f".{revision.number}", progress=progress)
        made = Manifest(manifest.SCHEMA, str(version), now_s, layout.BLOBS, sent, meta)
        key, data = layout.checkpoint(version, secrets.token_hex(4)), to_json(made)
        store.put(key, data)
        entry = Checkpoint(str(version), key, blake3(data).hexdigest(), now_s, made.size_bytes)
        objects = frozenset({key, *(f"{layout.BLOBS}/{chunk}" for chunk in made.chunks)})
        try:
            # Before a revision depends on them. Chunks of a listed checkpoint are already durable.
            store.secure(sorted(objects - {f"{layout.BLOBS}/{chunk}" for chunk in listed}))
            catalog.commit(now_s, entry, objects, revision.number)
        except (Condemned, NotFound):  # NotFound: condemned and already deleted
            continue
        return entry


def _reusable(store: Store, catalog: Catalog, revision: Revision) -> tuple[frozenset[str], dict[str, str]]:
    """Return the newest checkpoint's chunks, and the reusable chunks by digest.

    Reusable are the existing chunks of the newest checkpoint, and those of recently interrupted uploads. Existence
    is not sufficient: a late writer may have restored a chunk that was condemned, deleted and forgotten, and a
    late collector may delete it again.
    """
    existing = {name for entry in store.entries(layout.BLOBS) if (name := layout.chunk_of(entry.key))}
    listed: frozenset[str] = frozenset()
    if revision.checkpoints:
        with contextlib.suppress(NotFound, Corrupt):
            listed = read_manifest(store, revision.checkpoints[-1]).chunks
    oldest = revision.number - RECENT
    recent = {name: number for name in existing - listed if (number := _revision_in(name)) >= oldest}
    condemned = catalog.condemned_since(min(recent.values(), default=revision.number), revision)
    unusable = {*revision.suspect, *(key.removeprefix(f"{layout.BLOBS}/") for key in condemned)}
    reusable = (existing & listed | recent.keys()) - unusable
    return listed, {chunks.digest_of(name): name for name in sorted(reusable)}


def _revision_in(chunk: str) -> int:
    """Return the number of the revision that a chunk's writer had read."""
    return int(chunk.partition(".")[2])


def read_manifest(store: Store, checkpoint: Checkpoint) -> Manifest:
    """Return the manifest of a listed checkpoint. Raises NotFound, Corrupt, StoreError."""
    data = store.get(checkpoint.manifest)
    if blake3(data).hexdigest() != checkpoint.digest:
        what = f"{checkpoint.manifest}: its digest differs from the catalog's"
        raise Corrupt(what, "it was damaged after its upload")
    return manifest.decode(data, checkpoint.manifest)


def verify(store: Store, checkpoint: Checkpoint, *, progress: Progress = lambda _: None) -> list[str]:
    """Read every byte of a checkpoint; return one line per error, [] for an intact checkpoint.

    Raises StoreError when the store itself fails.
    """
    try:
        found = read_manifest(store, checkpoint)
    except (Corrupt, NotFound) as error:
        return [str(error)]
    return list(chunks.check(store, found.root, sorted(found.chunks), progress=progress).values())


# Files of a checkpoint that are needed only to resume training.
TRAINING_STATE = (".pt", ".pth", ".bin")
# The last three are DeepSpeed's.
TRAINING_FILES = frozenset(
    {"ref_model.safetensors", "detector.json", "run.json", "latest", "zero_to_fp32.py", "zero_to_torch.py"}
)


def is_weights(name: str) -> bool:
    """Whether a checkpoint's file belongs to the model, as opposed to the training state."""
    path = PurePosixPath(name)
    return path.suffix not in TRAINING_STATE and path.name not in TRAINING_FILES
