"""Write samples in a background thread. Steps do not wait for it, and its errors do not reach the trainer."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

import structlog

from grpo_orch.checkpoint.records import samples
from grpo_orch.checkpoint.records.samples import Group, Head
from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.policies.model.vocabulary import Precedence

log = structlog.get_logger()

WAITING_MAX = 2  # steps in the queue, each with all its texts; while it is full, steps are skipped
FINISH_S = 10.0  # a finished trainer waits this long for the last samples

Build = Callable[[], tuple[Head, list[Group]]]


class SampleWriter:
    """Stores samples of steps for people to read, as fast as the store allows.

    Args:
        store: the run's store, used only by this writer, with short retries.
        by: the precedence of this trainer.
    """

    def __init__(self, store: Store, by: Precedence) -> None:
        self._store = store
        self._by = by
        self._waiting: queue.Queue[Build | None] = queue.Queue(WAITING_MAX)
        self._thread: threading.Thread | None = None

    def offer(self, build: Build) -> None:
        """Queue samples to be built and stored. They are skipped if the store is too slow."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="samples", daemon=True)
            self._thread.start()
        try:
            self._waiting.put_nowait(build)
        except queue.Full:
            log.warning("samples_not_kept", reason="samples of earlier steps are still being written")

    def finish(self, timeout_s: float = FINISH_S) -> None:
        """Wait until all queued samples are stored, at most `timeout_s`."""
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
            except Exception as error:  # noqa: BLE001  # training continues after any error
                log.warning("samples_not_kept", reason=repr(error)[:500])
