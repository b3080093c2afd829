"""Writes samples in a thread of its own: a step waits for none of it, and no error of it reaches the trainer."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

import structlog

from checkpoint.records import samples
from checkpoint.records.samples import Group, Head
from checkpoint.store.run_store import Store
from policies.model.vocabulary import Precedence

log = structlog.get_logger()

WAITING_MAX = 2  # each holds the texts of a step; what comes while these wait is left out
FINISH_S = 10.0  # a trainer that is done waits so long for the last ones

Build = Callable[[], tuple[Head, list[Group]]]


class SampleWriter:
    """Stores what people read of a step, as long as that is possible beside training.

    Args:
        store: the run's, of this writer alone, which soon gives up.
        by: the precedence of this trainer.
    """

    def __init__(self, store: Store, by: Precedence) -> None:
        self._store = store
        self._by = by
        self._waiting: queue.Queue[Build | None] = queue.Queue(WAITING_MAX)
        self._thread: threading.Thread | None = None

    def offer(self, build: Build) -> None:
        """Have it built and stored soon; returns at once. It is left out where the store is too slow."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="samples", daemon=True)
            self._thread.start()
        try:
            self._waiting.put_nowait(build)
        except queue.Full:
            log.warning("samples_not_kept", why="those of earlier steps are still being written")

    def finish(self, timeout_s: float = FINISH_S) -> None:
        """Return once all that was offered is stored, or after `timeout_s`."""
        if self._thread is None:
            return
        try:
            self._waiting.put(None, timeout=timeout_s)
        except queue.Full:
            return
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while (build := self._waiting.get()) is not None:
            try:
                samples.write_samples(self._store, *build(), self._by)
            except Exception as error:  # noqa: BLE001  # whatever it is, training goes on
                log.warning("samples_not_kept", why=repr(error)[:500])
