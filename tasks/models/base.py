"""Fetch the base model to this machine: from the run's store if it is there, else from the hub.

Only runs with `cloud: sky` use the store. On one machine, the nodes share the hub's cache instead.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import structlog

from grpo_orch.checkpoint.store.errors import StoreError
from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.checkpoint.stream.chunks import TransferLog
from grpo_orch.checkpoint.stream.manifest import Manifest
from grpo_orch.policies.model.spec import RunSpec
from grpo_orch.policies.serving.joining import BASE_MODEL, Stage
from grpo_orch.tasks.machine.base_model import WEIGHTS
from grpo_orch.tasks.models import hub, shared

log = structlog.get_logger()

FOLDER = "base-model"  # in a machine's working folder
OUTLINE = "base-outline"  # the same files without weights


class BaseModelClosed(Exception):
    """Raised in the fetching thread after `BaseModel.close`."""


@dataclass(frozen=True, slots=True)
class Source:
    """A model of the hub. `is_shared`: it may be fetched from the store."""

    model: str
    revision: str | None = None
    cache: str | None = None
    is_shared: bool = False


def source_of(spec: RunSpec, settings: Mapping[str, Any], cache: str | None = None) -> Source | None:
    """Return the source of the run's base model; None for a folder or a model with its own Python code.

    The loading library fetches such a model automatically.

    Args:
        settings: loading options, named like the arguments of from_pretrained.
    """
    name = spec.trainer.model
    if name.startswith((".", "/", "~")) or Path(spec.workdir, name).is_dir() or settings.get("trust_remote_code"):
        return None
    return Source(name, settings.get("revision"), cache, spec.cloud == "sky")


class BaseModel:
    """Fetches the base model. Another thread may call `close` meanwhile.

    Args:
        store: store of the run.
        workdir: working folder of this machine.
        env: environment of the process that downloads from the hub.
        stall_timeout_s: how long a download from the hub may make no progress.
        report_progress: called with the progress.
    """

    def __init__(
        self,
        store: Store,
        source: Source,
        workdir: Path,
        env: Mapping[str, str],
        stall_timeout_s: float,
        report_progress: Callable[[Stage], None] = lambda _: None,
    ) -> None:
        self._store = store
        self._source = source
        self._workdir = workdir
        self._env = env
        self._limit_s = stall_timeout_s
        self._on_progress = report_progress
        self._closed = threading.Event()
        self._hub_folder: Path | None = None  # after a download, so later engines need no copy from the store

    def outline(self) -> Path | None:
        """Return a folder with the configuration and tokenizer from the store; None if it lacks them."""
        if (folder := self._local_folder()) is not None:
            return folder
        return self._from_store(self._workdir / OUTLINE, weights=False)

    def whole(self) -> Path | None:
        """Return a folder with the complete model, from the store or else the hub. Raises BaseModelClosed.

        None if both fail; loading the model then reports the error.
        """
        if (folder := self._local_folder()) is not None:
            return folder
        if (folder := self._from_store(self._workdir / FOLDER, weights=True)) is None:
            folder = self._hub_folder = self._from_hub()
        return folder

    def close(self) -> None:
        """Stop the fetch in progress."""
        self._closed.set()

    def _local_folder(self) -> Path | None:
        return self._hub_folder or found_here(self._workdir)

    def _from_store(self, folder: Path, *, weights: bool) -> Path | None:
        if not self._source.is_shared:
            return None
        try:
            manifest = shared.find(self._store, self._source.model, self._source.revision)
            if manifest is None:
                return None
            self._fetch(manifest, folder, weights=weights)
        except (StoreError, OSError) as error:
            log.warning("base_model_not_in_store", model=self._source.model, reason=str(error))
            return None
        log.info("base_model_from_store", model=self._source.model, weights=weights)
        return folder

    def _fetch(self, manifest: Manifest, folder: Path, *, weights: bool) -> None:
        total_bytes = sum(file.size_bytes for file in shared.files_of(manifest, weights=weights))
        transfer_log = TransferLog(BASE_MODEL, total_bytes, self._report)
        shared.download(self._store, manifest, folder, weights=weights, progress=transfer_log.add)

    def _from_hub(self) -> Path | None:
        source = self._source
        try:
            folder = hub.fetch(source.model, source.revision, source.cache, self._env, self._report, self._limit_s)
        except hub.DownloadFailed as error:
            log.warning("base_model_not_from_hub", model=source.model, reason=str(error))
            return None
        return folder if any(folder.glob(WEIGHTS)) else None  # otherwise its weights have another format

    def _report(self, stage: Stage) -> None:
        if self._closed.is_set():
            raise BaseModelClosed
        self._on_progress(stage)


def found_here(workdir: Path) -> Path | None:
    """Return the folder with the complete model if this machine fetched it from the store."""
    folder = workdir / FOLDER
    return folder if folder.is_dir() else None


def with_model(spec: RunSpec, folder: Path | None) -> RunSpec:
    """Return the specification for a machine that has the model in `folder`."""
    return spec if folder is None else replace(spec, trainer=replace(spec.trainer, model=str(folder)))
