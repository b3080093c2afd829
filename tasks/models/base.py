"""The base model on this machine: from the run's store where it is there, else from the hub.

Of a run of `cloud: sky`. On one machine the nodes share the hub's cache, and nothing goes through the store.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import structlog

from checkpoint.store.errors import StoreError
from checkpoint.store.run_store import Store
from checkpoint.stream.manifest import Manifest
from policies.model.spec import RunSpec
from policies.serving.joining import BASE_MODEL, Stage
from tasks.machine.base_model import WEIGHTS
from tasks.machine.transfer_log import TransferLog
from tasks.models import hub, shared

log = structlog.get_logger()

FOLDER = "base-model"  # of a machine's working folder
OUTLINE = "base-outline"  # the same without weights


class Closed(Exception):
    """Nobody waits for the model any more."""


@dataclass(frozen=True, slots=True)
class Source:
    """A model of the hub's, and whether it may come through the store."""

    model: str
    revision: str | None = None
    cache: str | None = None
    is_shared: bool = False


def source_of(spec: RunSpec, settings: Mapping[str, Any], cache: str | None = None) -> Source | None:
    """Where the run's base model comes from; None where that is a folder, or has Python of its own, which what
    loads it fetches by itself.

    Args:
        settings: of what loads it, by the names of from_pretrained's arguments.
    """
    name = spec.trainer.model
    if name.startswith((".", "/", "~")) or Path(spec.workdir, name).is_dir() or settings.get("trust_remote_code"):
        return None
    return Source(name, settings.get("revision"), cache, spec.cloud == "sky")


class BaseModel:
    """Brings it. While one thread does, another may close it.

    Args:
        store: the run's.
        workdir: this machine's.
        env: in which the hub is asked.
        limit_of_silence_s: how long the hub may give nothing.
        say: told how far it is.
    """

    def __init__(
        self,
        store: Store,
        source: Source,
        workdir: Path,
        env: Mapping[str, str],
        limit_of_silence_s: float,
        say: Callable[[Stage], None] = lambda _: None,
    ) -> None:
        self._store = store
        self._source = source
        self._workdir = workdir
        self._env = env
        self._limit_s = limit_of_silence_s
        self._tell = say
        self._closed = threading.Event()
        self._of_hub: Path | None = None  # once the hub gave it: a later engine needs no second one from the store

    def outline(self) -> Path | None:
        """A folder with its configuration and tokenizer, from the store; None where that has not got it."""
        if (folder := self._here()) is not None:
            return folder
        return self._from_store(self._workdir / OUTLINE, weights=False)

    def whole(self) -> Path | None:
        """A folder with all of it, from the store, else from the hub; None where neither gives it: then what loads
        it says why. Raises Closed."""
        if (folder := self._here()) is not None:
            return folder
        if (folder := self._from_store(self._workdir / FOLDER, weights=True)) is None:
            folder = self._of_hub = self._from_hub()
        return folder

    def close(self) -> None:
        """End what is under way."""
        self._closed.set()

    def _here(self) -> Path | None:
        return self._of_hub or found_here(self._workdir)

    def _from_store(self, folder: Path, *, weights: bool) -> Path | None:
        if not self._source.is_shared:
            return None
        try:
            found = shared.find(self._store, self._source.model, self._source.revision)
            if found is None:
                return None
            self._bring(found, folder, weights=weights)
        except (StoreError, OSError) as error:
            log.warning("base_model_not_in_store", model=self._source.model, why=str(error))
            return None
        log.info("base_model_from_store", model=self._source.model, weights=weights)
        return folder

    def _bring(self, found: Manifest, folder: Path, *, weights: bool) -> None:
        total_bytes = sum(file.size_bytes for file in shared.files_of(found, weights=weights))
        told = TransferLog(BASE_MODEL, total_bytes, self._say)
        shared.bring(self._store, found, folder, weights=weights, progress=told.add)

    def _from_hub(self) -> Path | None:
        one = self._source
        try:
            folder = hub.fetch(one.model, one.revision, one.cache, self._env, self._say, self._limit_s)
        except hub.NotFetched as error:
            log.warning("base_model_not_from_hub", model=one.model, why=str(error))
            return None
        return folder if any(folder.glob(WEIGHTS)) else None  # else its weights are in another format

    def _say(self, stage: Stage) -> None:
        if self._closed.is_set():
            raise Closed
        self._tell(stage)


def found_here(workdir: Path) -> Path | None:
    """The folder with all of it, if this machine has got it from the store."""
    folder = workdir / FOLDER
    return folder if folder.is_dir() else None


def with_model(spec: RunSpec, folder: Path | None) -> RunSpec:
    """The specification on a machine that has the model in `folder`."""
    return spec if folder is None else replace(spec, trainer=replace(spec.trainer, model=str(folder)))
