"""The base model in the run's store: published by the first machine that fetched it, for all that come later.

Its files are chunks by content, as everything here, and a manifest that is created once makes them exist: half an
upload is never seen. Beside them is a table of the tensors, for nodes that need no weights of it.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

import msgspec
import structlog
from blake3 import blake3

from checkpoint.security.redaction import guard_output
from checkpoint.store import layout
from checkpoint.store.errors import AlreadyExists, Corrupt, NotFound, StoreError
from checkpoint.store.run_store import Store
from checkpoint.stream import chunks, manifest
from checkpoint.stream.chunks import Progress, send
from checkpoint.stream.manifest import Manifest
from checkpoint.stream.uploader import yield_to_others
from policies.model.vocabulary import PolicyVersion
from tasks.machine.base_model import FILES, NOT_FILES, TENSORS, WEIGHTS, tensors_in
from tasks.machine.children import end_with_parent
from tasks.machine.node_env import read_node_env

log = structlog.get_logger()

DIGEST_BYTES = 16
BEFORE_ALL = PolicyVersion(0, 0)


def place_of(model: str, revision: str | None) -> str:
    """Where the store has that model of the hub's."""
    name = f"{model}@{revision or ''}"
    return f"{layout.MODELS}/{blake3(name.encode()).hexdigest(DIGEST_BYTES)}"


def find(store: Store, model: str, revision: str | None) -> Manifest | None:
    """What the store has of it, None where nobody has published it whole. Raises Corrupt, StoreError."""
    try:
        return manifest.load(store, place_of(model, revision))
    except NotFound:
        return None


def bring(
    store: Store,
    found: Manifest,
    folder: Path,
    *,
    weights: bool,
    progress: Progress = lambda _: None,
) -> None:
    """Bring its files, every chunk verified, to `folder`, which is there only once they all are.

    Raises Corrupt, NotFound, StoreError, OSError.
    """
    if not folder.exists():
        manifest.materialize(store, found.root, files_of(found, weights=weights), folder, progress)


def files_of(found: Manifest, *, weights: bool) -> list[chunks.File]:
    """All of its files, or all but the weights."""
    return [file for file in found.files if weights or not fnmatch(file.name, WEIGHTS)]


def publish(store: Store, model: str, revision: str | None, folder: Path, now_s: float) -> bool:
    """Publish the model that was fetched to `folder`, unless the store has it. Returns whether it did.

    What a publisher that was killed has left is not sent again. Raises OSError, ValueError, StoreError.
    """
    place = place_of(model, revision)
    with contextlib.suppress(Corrupt):  # which nobody can use: let the error below say so
        if find(store, model, revision) is not None:
            return False
    tensors = tensors_in(folder)
    if not tensors:
        return False
    paths = [path for path in sorted(folder.iterdir()) if path.is_file() and is_wanted(path.name)]
    left = (entry.key.rpartition("/")[2] for entry in store.entries(place))
    stored = {name: name for name in left if name != layout.MANIFEST}
    with tempfile.TemporaryDirectory() as scratch:
        table = Path(scratch, TENSORS)
        table.write_bytes(msgspec.json.encode(tensors))
        given = [(path.name, path) for path in paths if path.name != TENSORS] + [(TENSORS, table)]
        files = send(store, place, given, stored=stored)
    store.secure(sorted({f"{place}/{chunk}" for file in files for chunk in file.chunks}))
    meta = {"model": model, "revision": revision or ""}
    try:
        manifest.publish_once(store, place, files, BEFORE_ALL, now_s, meta)
    except AlreadyExists:  # another was quicker
        return False
    return True


def is_wanted(name: str) -> bool:
    """Whether a file of the hub's is one of those that a run needs. Neither pickles nor Python are: what the store
    gives to nodes is data."""
    return any(fnmatch(name, one) for one in FILES) and not any(fnmatch(name, one) for one in NOT_FILES)


# Publishes a base model into the run's store, `python -m tasks.models.shared MODEL REVISION FOLDER`.
#
# Beside the trainer that has fetched it, and with the lowest priority: a node that comes before it is there asks
# the hub, as that trainer did.

STORE_RETRY_S = 600.0


def begin_publishing(model: str, revision: str | None, folder: Path) -> subprocess.Popen[bytes]:
    """Start publishing; it ends with this process, and the next one goes on."""
    argv = [sys.executable, "-m", "tasks.models.shared", model, revision or "", str(folder)]
    return subprocess.Popen(argv)


def main(argv: Sequence[str]) -> int:
    guard_output()
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    end_with_parent()
    yield_to_others()
    model, revision, folder = argv
    begun_s = time.monotonic()
    try:
        store = Store(read_node_env().run, retry_s=STORE_RETRY_S)
        published = publish(store, model, revision or None, Path(folder), time.time())
    except (StoreError, OSError, ValueError) as error:
        log.warning("base_model_not_published", model=model, why=str(error))
        return 1
    if published:
        log.info("base_model_published", model=model, s=round(time.monotonic() - begun_s, 1))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
