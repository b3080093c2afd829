"""Which run a command means: a store URL, a run.yaml, a folder, or nothing at all."""

from __future__ import annotations

from pathlib import Path

from checkpoint import documents, layout
from checkpoint.documents import RunRecord
from checkpoint.errors import NotFound
from checkpoint.store import Store
from orchestrator.config.load import load_storage
from orchestrator.home import latest_run

PATIENCE_S = 5.0  # a person waits


class NoSuchRun(Exception):
    """The target names no run; the message says what was looked at."""


def store_url_of(target: str | None) -> str:
    """Return the store URL that a command's argument means.

    Without an argument: ./run.yaml, else the run that was last started or resumed on this machine.
    Raises NoSuchRun, ConfigError.
    """
    if target is None:
        latest = latest_run()
        if Path("run.yaml").exists():
            return load_storage(Path("run.yaml"))
        if latest is None:
            raise NoSuchRun("which run? name its store URL or its run.yaml (there is no ./run.yaml here)")
        return latest
    if "://" in target:
        return target.rstrip("/")
    path = Path(target)
    if (path / layout.RUN).is_file():
        return path.absolute().as_uri()
    if path.is_file():
        return load_storage(path)
    raise NoSuchRun(f"{target}: expected a store URL (s3://..., file://...), a run.yaml, or the folder of a run")


def open_run(target: str | None) -> tuple[Store, RunRecord]:
    """Return the store and the record of the run that the argument means. Raises NoSuchRun, StoreError."""
    store = Store(store_url_of(target), patience_s=PATIENCE_S)
    try:
        return store, documents.read_run(store)
    except NotFound as error:
        raise NoSuchRun(str(error)) from error
