"""Store the base model in the run's store: the first machine that fetched it publishes it for later machines.

Its files are content-addressed chunks, published by creating a manifest once, so partial uploads stay invisible.
A table of the tensors is stored next to them, for nodes that do not need the weights.
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

from grpo_orch.checkpoint.security.redaction import guard_output
from grpo_orch.checkpoint.store import layout
from grpo_orch.checkpoint.store.errors import AlreadyExists, Corrupt, NotFound, StoreError
from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.checkpoint.stream import chunks, manifest
from grpo_orch.checkpoint.stream.chunks import Progress, send
from grpo_orch.checkpoint.stream.manifest import Manifest
from grpo_orch.checkpoint.stream.uploader import yield_to_others
from grpo_orch.policies.model.vocabulary import PolicyVersion
from grpo_orch.tasks.machine.base_model import FILES, NOT_FILES, TENSORS, WEIGHTS, tensors_in
from grpo_orch.tasks.machine.children import end_with_parent
from grpo_orch.tasks.machine.node_env import read_node_env

log = structlog.get_logger()

DIGEST_BYTES = 16
BEFORE_ALL = PolicyVersion(0, 0)


def place_of(model: str, revision: str | None) -> str:
    """Return the store prefix of a model of the hub."""
    name = f"{model}@{revision or ''}"
    return f"{layout.MODELS}/{blake3(name.encode()).hexdigest(DIGEST_BYTES)}"


def find(store: Store, model: str, revision: str | None) -> Manifest | None:
    """Return the model's manifest; None if it is not published completely. Raises Corrupt, StoreError."""
    try:
        return manifest.load(store, place_of(model, revision))
    except NotFound:
        return None


def download(
    store: Store,
    shared: Manifest,
    folder: Path,
    *,
    weights: bool,
    progress: Progress = lambda _: None,
) -> None:
    """Fetch the files to `folder` and verify every chunk. The folder appears once all files are complete.

    Raises Corrupt, NotFound, StoreError, OSError.
    """
    if not folder.exists():
        manifest.materialize(store, shared.root, files_of(shared, weights=weights), folder, progress)


def files_of(shared: Manifest, *, weights: bool) -> list[chunks.File]:
    """Return all files of the model, or all but the weights."""
    return [file for file in shared.files if weights or not fnmatch(file.name, WEIGHTS)]


def publish(store: Store, model: str, revision: str | None, folder: Path, now_s: float) -> bool:
    """Publish the model in `folder` unless the store has it. Return whether it was published.

    Chunks that a killed publisher uploaded are not sent again. Raises OSError, ValueError, StoreError.
    """
    place = place_of(model, revision)
    with contextlib.suppress(Corrupt):  # a corrupt manifest is unusable: the error below reports it
        if find(store, model, revision) is not None:
            return False
    tensors = tensors_in(folder)
    if not tensors:
        return False
    paths = [path for path in sorted(folder.iterdir()) if path.is_file() and is_wanted(path.name)]
    names = (entry.key.rpartition("/")[2] for entry in store.entries(place))
    stored = {name: name for name in names if name != layout.MANIFEST}
    with tempfile.TemporaryDirectory() as scratch:
        table = Path(scratch, TENSORS)
        table.write_bytes(msgspec.json.encode(tensors))
        sources = [(path.name, path) for path in paths if path.name != TENSORS] + [(TENSORS, table)]
        files = send(store, place, sources, stored=stored)
    store.secure(sorted({f"{place}/{chunk}" for file in files for chunk in file.chunks}))
    meta = {"model": model, "revision": revision or ""}
    try:
        manifest.publish_once(store, place, files, BEFORE_ALL, now_s, meta)
    except AlreadyExists:  # another publisher was faster
        return False
    return True


def is_wanted(name: str) -> bool:
    """Return whether a run needs this file of the hub.

    Pickles and Python code are excluded: nodes get only data from the store.
    """
    is_listed = any(fnmatch(name, pattern) for pattern in FILES)
    return is_listed and not any(fnmatch(name, pattern) for pattern in NOT_FILES)


# `python -m tasks.models.shared MODEL REVISION FOLDER` publishes a base model into the run's store.
#
# It runs next to the trainer that fetched the model, with the lowest priority. Nodes that start before it finishes
# fetch from the hub, as that trainer did.

STORE_RETRY_S = 600.0


def begin_publishing(model: str, revision: str | None, folder: Path) -> subprocess.Popen[bytes]:
    """Start publishing in a process that ends with this one. The next publisher continues its work."""
    argv = [sys.executable, "-m", "grpo_orch.tasks.models.shared", model, revision or "", str(folder)]
    return subprocess.Popen(argv)


def main(argv: Sequence[str]) -> int:
    guard_output()
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    end_with_parent()
    yield_to_others()
    model, revision, folder = argv
    started_s = time.monotonic()
    try:
        store = Store(read_node_env().run, retry_s=STORE_RETRY_S)
        published = publish(store, model, revision or None, Path(folder), time.time())
    except (StoreError, OSError, ValueError) as error:
        log.warning("base_model_not_published", model=model, reason=str(error))
        return 1
    if published:
        log.info("base_model_published", model=model, s=round(time.monotonic() - started_s, 1))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
