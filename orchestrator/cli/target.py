"""Which run a command means, and with what its store is reached: a store URL, a run.yaml, a folder, or nothing."""

from __future__ import annotations

import json
import os
from pathlib import Path

from checkpoint.records import documents
from checkpoint.records.documents import RunRecord
from checkpoint.store import layout
from checkpoint.store.errors import NotFound
from checkpoint.store.run_store import OPTIONS_ENV, Store
from orchestrator.config.load import Storage, load_storage
from orchestrator.config.shorthand import PASSWORD, has_password, is_text
from orchestrator.home import keep_store_options, kept_store_options, latest_run

RETRY_S = 5.0  # a person waits


class NoSuchRun(Exception):
    """The target names no run; the message says what was looked at."""


def storage_of(argument: str | None) -> Storage:
    """Return the store that a command's argument means.

    Without an argument: ./run.yaml, else the run that was last started or resumed on this machine.
    Raises NoSuchRun, ConfigError.
    """
    if argument is None:
        latest = latest_run()
        if Path("run.yaml").exists():
            return load_storage(Path("run.yaml"))
        if latest is None:
            raise NoSuchRun("which run? name its store URL or its run.yaml (there is no ./run.yaml here)")
        return Storage(latest)
    if "://" in argument:
        if has_password(argument):
            raise NoSuchRun(PASSWORD)
        return Storage(_told(argument.rstrip("/")))
    try:
        path = Path(os.path.abspath(argument))  # not `resolve`, as in a run.yaml
        if (path / layout.RUN).is_file():
            return Storage(_told(f"file://{path}"))  # as a run.yaml has it: nothing in it is quoted
        if path.is_file():
            return load_storage(Path(argument))
    except OSError as error:
        raise NoSuchRun(f"{argument}: {error.strerror}") from None
    raise NoSuchRun(f"{argument}: expected a store URL (s3://..., file://...), a run.yaml, or the folder of a run")


def _told(url: str) -> str:
    """The URL, which is written down and given to other processes. Raises NoSuchRun."""
    if not is_text(url):
        hint = "expected text in UTF-8; has this terminal a locale of it, as LC_ALL=C.UTF-8?"
        raise NoSuchRun(f"{url!a}: {hint}")
    return url


def open_store(storage: Storage) -> Store:
    """Open the store, and have every process that this one starts open it with the same options.

    The options of a run.yaml come first, then those in the environment, then, for a store that was named by its
    URL alone, those that this machine keeps. Raises StoreError.
    """
    options = storage.options
    if options is None and not os.environ.get(OPTIONS_ENV):
        options = kept_store_options(storage.url)
    if options:
        os.environ[OPTIONS_ENV] = json.dumps(options)
    return Store(storage.url, retry_s=RETRY_S)


def keep_options(storage: Storage) -> None:
    """Keep a run.yaml's options on this machine, so that the store's URL is enough from now on."""
    if storage.options is not None:
        keep_store_options(storage.url, storage.options)


def record_of(store: Store) -> RunRecord:
    """Return the record of the run that the store holds. Raises NoSuchRun, StoreError."""
    try:
        return documents.read_run(store)
    except NotFound as error:
        raise NoSuchRun(str(error)) from error


def open_run(argument: str | None) -> tuple[Store, RunRecord]:
    """Return the store and the record of the run that a command's argument means.

    Raises NoSuchRun, ConfigError, StoreError.
    """
    store = open_store(storage_of(argument))
    return store, record_of(store)
