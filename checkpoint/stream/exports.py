"""A checkpoint's weights as plain files in the store, for `from_pretrained` and for use without this project.

The rest of the checkpoint, above all the optimizer, is left out. The document beside the folder is written last:
an export without it was cut off, and is made again.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import PurePosixPath

from checkpoint.store import layout
from checkpoint.store.document import OptionalDocument, Unreadable
from checkpoint.store.errors import Corrupt, NotFound
from checkpoint.store.run_store import Store
from checkpoint.stream import chunks
from checkpoint.stream.catalog import Catalog
from checkpoint.stream.transfer import read_manifest
from policies.model.vocabulary import PolicyVersion

# What only a resumed trainer needs.
TRAINING_STATE = (".pt", ".pth", ".bin")
# The last three are DeepSpeed's.
TRAINING_FILES = frozenset(
    {"ref_model.safetensors", "resume_state.json", "run.json", "latest", "zero_to_fp32.py", "zero_to_torch.py"}
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
