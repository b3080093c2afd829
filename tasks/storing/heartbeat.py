"""Write the trainer's heartbeat to the store, and stop a trainer that a newer one has replaced (fencing).

A separate thread writes it, so that a trainer in a long step does not look dead. The thread also detects a newer
trainer: the main thread then stops at its next check, or the process is ended after a grace period.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import structlog

from grpo_orch.checkpoint.records import documents
from grpo_orch.checkpoint.records.documents import newest_timeline
from grpo_orch.checkpoint.store.document import UnreadableDocuments
from grpo_orch.checkpoint.store.errors import StoreError
from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.policies.detect.divergence import Verdict
from grpo_orch.policies.model import exit_codes
from grpo_orch.policies.serving.joining import Stage
from grpo_orch.policies.tick.snapshot import BEFORE_TRAINING, Trainer
from grpo_orch.tasks.machine.leaving import Leaving

log = structlog.get_logger()

BEAT_S = 2.0
BEATS_APART_S = 0.25  # at least: steps may be shorter, and each beat reads and writes the store
# Time for a replaced trainer to reach a check. A step may take minutes, and a collective that has lost a process
# never ends; meanwhile the machine costs money and the run waits.
FENCED_GRACE_S = 20.0


class Fenced(Exception):
    """A newer trainer of this run or a newer timeline exists, so this trainer must stop."""


class Heartbeat:
    """Writes the trainer's status every BEAT_S and soon after each change, and detects a newer trainer.

    Args:
        store: the run's store with short retries: a late beat is worth less than the next one.
        first: the first beat; its node, attempt and timeline never change.
        leaving: receives stop requests for the run, and knows whether the trainer is leaving.
        end: ends this process with an exit code, immediately and from any thread.
        grace_s: time for the main thread to reach a check before `end` is called.
    """

    def __init__(
        self,
        store: Store,
        first: Trainer,
        *,
        leaving: Leaving | None = None,
        end: Callable[[int], object] = os._exit,
        grace_s: float = FENCED_GRACE_S,
    ) -> None:
        self._store = store
        self._beat = first
        self._leaving = leaving
        self._end = end
        self._grace_s = grace_s
        self._changed = threading.Event()
        self._ended = threading.Event()
        self._fenced = threading.Event()
        self._acknowledged = threading.Event()  # the main thread knows that it is fenced, or has called `stop`
        self._newer = ""  # describes the newer trainer or timeline
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> None:
        """Write the first beat, then continue in the background. Raises Fenced, StoreError."""
        self._write()
        self.check()
        self._thread.start()

    def stop(self, activity: str) -> None:
        """End the thread and write a last beat with `activity`. Raises StoreError."""
        self._ended.set()
        self._changed.set()
        self._acknowledged.set()
        self._thread.join()
        self._beat = replace(self._beat, activity=activity, stage=None)
        self._write()

    def update(
        self,
        activity: str | None = None,
        *,
        step: int | None = None,
        max_steps: int | None = None,
        kl: float | None = None,
        stored_step: int | None = None,
        store_slow: bool | None = None,
        verdict: Verdict | None = None,
        stage: Stage | None = None,
    ) -> None:
        """Update fields of the beat without waiting for the store.

        None leaves a field unchanged; a new activity clears the stage.
        """
        old = self._beat
        self._beat = replace(
            old,
            activity=old.activity if activity is None else activity,
            step=old.step if step is None else step,
            max_steps=old.max_steps if max_steps is None else max_steps,
            kl=old.kl if kl is None else kl,
            stored_step=old.stored_step if stored_step is None else stored_step,
            store_slow=old.store_slow if store_slow is None else store_slow,
            verdict=old.verdict if verdict is None else verdict,
            stage=old.stage if stage is None and activity is None else stage,
        )
        if replace(self._beat, stage=old.stage) != old:  # progress within a stage waits for the next beat
            self._changed.set()

    def check(self) -> None:
        """Raise Fenced if a newer trainer or timeline was seen."""
        if self._fenced.is_set():
            self._acknowledged.set()
            raise Fenced(self._newer)

    def wait(self, timeout_s: float) -> None:
        """Wait up to `timeout_s`. Raises Fenced as soon as a newer trainer or timeline is seen."""
        self._fenced.wait(timeout_s)
        self.check()

    def _run(self) -> None:
        while not self._ended.is_set() and not self._fenced.is_set():
            try:
                self._write()
                self._check_stop_request()
            except StoreError as error:
                log.warning("heartbeat_not_written", error=str(error))
            self._ended.wait(BEATS_APART_S)
            self._changed.wait(BEAT_S - BEATS_APART_S)
            self._changed.clear()
        if self._fenced.is_set() and not self._acknowledged.wait(self._grace_s):
            reason = f"{self._newer}, and the current step did not end within {self._grace_s:g} s"
            print(f"grpo-orch trainer: stopped: {reason}", file=sys.stderr, flush=True)
            self._end(exit_codes.FENCED)

    def _write(self) -> None:
        own = self._beat
        newer = self._find_newer(own)
        if newer:
            self._newer = newer
            self._fenced.set()
            return
        is_leaving = self._leaving is not None and self._leaving.is_leaving
        documents.TRAINER.write(self._store, replace(own, beat_at_s=time.time(), leaving=is_leaving))

    def _check_stop_request(self) -> None:
        """Pass a stop request to the main thread; end the process if it has nothing to store yet."""
        leaving, own = self._leaving, self._beat
        if leaving is None:
            return
        if not leaving.is_stop_requested and documents.is_stop_requested(self._store, own.node, own.attempt):
            leaving.request_stop()
            self._changed.set()
        if leaving.is_stop_requested and own.activity in BEFORE_TRAINING:
            print("grpo-orch trainer: stopped before training started", file=sys.stderr, flush=True)
            self._end(exit_codes.STOPPED)

    def _find_newer(self, own: Trainer) -> str:
        """Describe the timeline or trainer that is newer than this trainer; empty if it is the newest."""
        timeline = newest_timeline(self._store)
        if timeline > own.timeline:
            return f"timeline {timeline} has started, and this trainer is on timeline {own.timeline}"
        beat = documents.TRAINER.read(self._store, UnreadableDocuments())  # a damaged beat is overwritten
        if beat is not None and beat.precedence > own.precedence:
            return f"attempt {beat.attempt} on {beat.node}, timeline {beat.timeline}, has taken over"
        return ""
