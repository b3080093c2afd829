"""The trainer's heartbeat in the store, and its fence: a trainer that a newer one has replaced stops.

A thread of its own writes it, so that a long step does not look like a dead trainer. The same thread sees the
fence: the main thread stops at its next check, and if it comes to none the process is ended.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import structlog

from checkpoint.records import documents
from checkpoint.records.documents import newest_timeline
from checkpoint.store.document import Unreadable
from checkpoint.store.errors import StoreError
from checkpoint.store.run_store import Store
from policies.detect.divergence import Verdict
from policies.model import exit_codes
from policies.serving.joining import Stage
from policies.tick.snapshot import BEFORE_TRAINING, Trainer
from tasks.machine.leaving import Leaving

log = structlog.get_logger()

BEAT_S = 2.0
BEATS_APART_S = 0.25  # between two beats at least: steps may be shorter, and each beat reads and writes the store
# How long a replaced trainer has to stop by itself. A step may take minutes, and a collective that has lost a
# partner does not end; meanwhile the machine is paid for, and the run waits.
FENCED_GRACE_S = 20.0


class Fenced(Exception):
    """A newer trainer of this run, or a newer timeline, is there: this one must stop."""


class Heartbeat:
    """Says every BEAT_S, and soon after each change, what the trainer does; watches for a newer one.

    Args:
        store: the run's store, which soon gives up: a late beat is worth less than the next one.
        first: the beat to begin with; its node, attempt and timeline stay.
        leaving: told when the run is asked to stop, and asked whether the trainer is to end.
        end: ends this process with an exit code, at once and from any thread.
        grace_s: how long the main thread has to come to a check before that.
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
        self._told = threading.Event()  # the main thread knows that it is fenced, or has ended the heartbeat
        self._newer = ""  # what has taken over, in words
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> None:
        """Write the first beat, then go on in the background. Raises Fenced, StoreError."""
        self._write()
        self.check()
        self._thread.start()

    def stop(self, activity: str) -> None:
        """End the thread and write `activity` as the last. Raises StoreError."""
        self._ended.set()
        self._changed.set()
        self._told.set()
        self._thread.join()
        self._beat = replace(self._beat, activity=activity, stage=None)
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
        verdict: Verdict | None = None,
        stage: Stage | None = None,
    ) -> None:
        """Change what the beat says; None leaves a field as it is, but for the stage, which ends with an activity.
        Never waits for the store."""
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
        if replace(self._beat, stage=old.stage) != old:  # how far a stage is can wait for the next beat
            self._changed.set()

    def check(self) -> None:
        """Raise Fenced if a newer trainer or timeline was seen."""
        if self._fenced.is_set():
            self._told.set()
            raise Fenced(self._newer)

    def wait(self, timeout_s: float) -> None:
        """Wait, but not beyond the moment in which a newer trainer or timeline is seen. Raises Fenced."""
        self._fenced.wait(timeout_s)
        self.check()

    def _run(self) -> None:
        while not self._ended.is_set() and not self._fenced.is_set():
            try:
                self._write()
                self._look_for_a_stop()
            except StoreError as error:
                log.warning("heartbeat_not_written", error=str(error))
            self._ended.wait(BEATS_APART_S)
            self._changed.wait(BEAT_S - BEATS_APART_S)
            self._changed.clear()
        if self._fenced.is_set() and not self._told.wait(self._grace_s):
            why = f"{self._newer}, and its present step does not end"
            print(f"grpo-orch trainer: stopped: {why}", file=sys.stderr, flush=True)
            self._end(exit_codes.FENCED)

    def _write(self) -> None:
        own = self._beat
        newer = self._taken_over(own)
        if newer:
            self._newer = newer
            self._fenced.set()
            return
        leaving = self._leaving is not None and self._leaving.told
        documents.TRAINER.write(self._store, replace(own, beat_at_s=time.time(), leaving=leaving))

    def _look_for_a_stop(self) -> None:
        """Tell the main thread when the run is asked to stop; end the process while it has nothing to store."""
        leaving, own = self._leaving, self._beat
        if leaving is None:
            return
        if not leaving.asked and documents.is_asked_to_stop(self._store, own.node, own.attempt):
            leaving.ask()
            self._changed.set()
        if leaving.asked and own.activity in BEFORE_TRAINING:
            print("grpo-orch trainer: told to end before it trained", file=sys.stderr, flush=True)
            self._end(exit_codes.STOPPED)

    def _taken_over(self, own: Trainer) -> str:
        """What is newer than this trainer, in words; empty while it is the newest."""
        timeline = newest_timeline(self._store)
        if timeline > own.timeline:
            return f"timeline {timeline} has begun, and this is timeline {own.timeline}"
        seen = documents.TRAINER.read(self._store, Unreadable())  # one that is damaged is written over
        if seen is not None and seen.precedence > own.precedence:
            return f"attempt {seen.attempt} on {seen.node}, timeline {seen.timeline}, has taken over"
        return ""
