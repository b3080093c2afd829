"""Find the run that a command's argument names: a store URL, a run.yaml, a folder, or nothing."""

from __future__ import annotations

import json
import os
from pathlib import Path

from grpo_orch.checkpoint.records import documents
from grpo_orch.checkpoint.records.documents import RunRecord
from grpo_orch.checkpoint.store import layout
from grpo_orch.checkpoint.store.errors import NotFound
from grpo_orch.checkpoint.store.run_store import OPTIONS_ENV, Store
from grpo_orch.orchestrator.config.load import Storage, load_storage
from grpo_orch.orchestrator.config.shorthand import PASSWORD, has_password, is_text
from grpo_orch.orchestrator.home import latest_run, save_store_options, saved_store_options

RETRY_S = 5.0  # short, because a person waits


class NoSuchRun(Exception):
    """The target names no run. The message names what was tried."""


def storage_of(argument: str | None) -> Storage:
    """Return the store that a command's argument names.

    Without an argument: ./run.yaml, else the run last started or resumed on this machine.
    Raises NoSuchRun, ConfigError.
    """
    if argument is None:
        latest = latest_run()
        if Path("run.yaml").exists():
            return load_storage(Path("run.yaml"))
        if latest is None:
            raise NoSuchRun("no run given; pass a store URL or a run.yaml (this folder has no run.yaml)")
        return Storage(latest)
    if "://" in argument:
        if has_password(argument):
            raise NoSuchRun(PASSWORD)
        return Storage(_require_utf8(argument.rstrip("/")))
    try:
        path = Path(os.path.abspath(argument))  # symbolic links stay, as in a run.yaml
        if (path / layout.RUN).is_file():
            return Storage(_require_utf8(f"file://{path}"))  # no percent-encoding, as in a run.yaml
        if path.is_file():
            return load_storage(Path(argument))
    except OSError as error:
        raise NoSuchRun(f"{argument}: {error.strerror}") from None
    missing = "" if path.exists() else "; there is no such file or folder"
    expected = "expected a store URL (s3://..., file://...), a run.yaml, or the folder of a run"
    raise NoSuchRun(f"{argument}: {expected}{missing}")


def _require_utf8(url: str) -> str:
    """Return the URL if it is valid UTF-8, as files and other processes need it. Raises NoSuchRun."""
    if not is_text(url):
        hint = "expected UTF-8; set a UTF-8 locale in this terminal, such as LC_ALL=C.UTF-8"
        raise NoSuchRun(f"{url!a}: {hint}")
    return url


def open_store(storage: Storage) -> Store:
    """Open the store, and pass its options to child processes through the environment.

    Options come from run.yaml, else from the environment, else from this machine's saved options for that URL.
    Raises StoreError.
    """
    options = storage.options
    if options is None and not os.environ.get(OPTIONS_ENV):
        options = saved_store_options(storage.url)
    if options:
        os.environ[OPTIONS_ENV] = json.dumps(options)
    return Store(storage.url, retry_s=RETRY_S)


def keep_options(storage: Storage) -> None:
    """Save a run.yaml's store options on this machine, so that later commands need only the store's URL."""
    if storage.options is not None:
        save_store_options(storage.url, storage.options)


def record_of(store: Store) -> RunRecord:
    """Return the record of the run in the store. Raises NoSuchRun, StoreError."""
    try:
        return documents.read_run(store)
    except NotFound as error:
        raise NoSuchRun(str(error)) from error


def open_run(argument: str | None) -> tuple[Store, RunRecord]:
    """Return the store and the record of the run that a command's argument names.

    Raises NoSuchRun, ConfigError, StoreError.
    """
    store = open_store(storage_of(argument))
    return store, record_of(store)
