"""The trainer's heartbeat in the store, and its fence: a trainer that a newer one has replaced stops.

Written by a thread of its own, so that neither a long step nor a slow store makes one look like the other.
"""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import structlog

from checkpoint import documents
from checkpoint.errors import StoreError
from checkpoint.store import Store
from policies.snapshot import Trainer

log = structlog.get_logger()

BEAT_S = 2.0
CALM_S = 0.25  # between two beats at least: steps may be shorter, and each beat reads and writes the store


class Fenced(Exception):
    """A newer trainer of this run is at work: this one must stop."""


class Heartbeat:
    """Says every BEAT_S, and soon after each change, what the trainer does; watches for a newer one.

    Args:
        store: the run's store, with little patience: a late beat is worth less than the next one.
        first: the beat to begin with; its node, attempt and timeline stay.
    """

    def __init__(self, store: Store, first: Trainer) -> None:
        self._store = store
        self._beat = first
        self._changed = threading.Event()
        self._ended = threading.Event()
        self._fenced = threading.Event()
        self._newer: Trainer | None = None
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> None:
        """Write the first beat, then go on in the background. Raises Fenced, StoreError."""
        self._write()
        self.check()
        self._thread.start()

    def stop(self, activity: str) -> None:
        """End the thread and leave `activity` as the last word. Raises StoreError."""
        self._ended.set()
        self._changed.set()
        self._thread.join()
        self._beat = replace(self._beat, activity=activity)
        self._write()

    def say(
        self,
        activity: str | None = None,
        *,
        step: int | None = None,
        max_steps: int | None = None,
        kl: float | None = None,
        stored_step: int | None = None,
        store_slow: bool | None = None,
    ) -> None:
        """Change what the beat says; None leaves a field as it is. Never waits for the store."""
        old = self._beat
        self._beat = replace(
            old,
            activity=old.activity if activity is None else activity,
            step=old.step if step is None else step,
            max_steps=old.max_steps if max_steps is None else max_steps,
            kl=old.kl if kl is None else kl,
            stored_step=old.stored_step if stored_step is None else stored_step,
            store_slow=old.store_slow if store_slow is None else store_slow,
        )
        if self._beat != old:
            self._changed.set()

    def check(self) -> None:
        """Raise Fenced if a newer trainer was seen."""
        if self._newer is not None:
            newer = self._newer
            raise Fenced(f"attempt {newer.attempt} on {newer.node}, timeline {newer.timeline}, has taken over")

    def wait(self, timeout_s: float) -> None:
        """Wait, but not beyond the moment in which a newer trainer is seen. Raises Fenced."""
        self._fenced.wait(timeout_s)
        self.check()

    def _run(self) -> None:
        while not self._ended.is_set() and self._newer is None:
            try:
                self._write()
            except StoreError as error:
                log.warning("heartbeat_not_written", error=str(error))
            self._ended.wait(CALM_S)
            self._changed.wait(BEAT_S - CALM_S)
            self._changed.clear()

    def _write(self) -> None:
        seen, own = documents.read_trainer(self._store), self._beat
        if seen is not None and seen.precedence > own.precedence:
            self._newer = seen
            self._fenced.set()
            return
        documents.write_trainer(self._store, replace(own, beat_at_s=time.time()))
