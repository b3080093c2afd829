"""Publishes a base model into the run's store, `python -m tasks.models.publishing MODEL REVISION FOLDER`.

Beside the trainer that has fetched it, and with the lowest priority: a node that comes before it is there asks the
hub, as that trainer did.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import structlog

from checkpoint.security.redaction import guard_output
from checkpoint.store.errors import StoreError
from checkpoint.store.run_store import Store
from checkpoint.stream.uploader import yield_to_others
from tasks.machine.node_env import read_node_env
from tasks.machine.processes.children import end_with_parent
from tasks.models import shared

log = structlog.get_logger()

STORE_RETRY_S = 600.0


def begin(model: str, revision: str | None, folder: Path) -> subprocess.Popen[bytes]:
    """Start publishing; it ends with this process, and the next one goes on."""
    argv = [sys.executable, "-m", "tasks.models.publishing", model, revision or "", str(folder)]
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
        published = shared.publish(store, model, revision or None, Path(folder), time.time())
    except (StoreError, OSError, ValueError) as error:
        log.warning("base_model_not_published", model=model, why=str(error))
        return 1
    if published:
        log.info("base_model_published", model=model, s=round(time.monotonic() - begun_s, 1))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
