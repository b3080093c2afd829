"""The trainer's heartbeat and its fence: what ends a trainer, and how."""

from __future__ import annotations

import queue
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from grpo_orch.checkpoint.records import documents
from grpo_orch.checkpoint.records.documents import write_fork
from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.policies.detect.divergence import Health, Verdict
from grpo_orch.policies.model import exit_codes
from grpo_orch.policies.model.timelines import Fork
from grpo_orch.policies.tick.snapshot import Trainer
from grpo_orch.tasks.machine.leaving import Leaving
from grpo_orch.tasks.storing.heartbeat import Fenced, Heartbeat
from tests.budget import HANG_S, until

BEGUN = "timeline 1 has started, and this trainer is on timeline 0"


def beat(timeline: int = 0, attempt: int = 1) -> Trainer:
    return Trainer("trainer-0-i1", attempt, timeline, 0, 0, "starting", 0.0)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(f"file://{tmp_path}/store")


def test_a_trainer_of_an_older_timeline_does_not_begin(store: Store) -> None:
    write_fork(store, Fork(1, "0-10"))
    with pytest.raises(Fenced, match=BEGUN):
        Heartbeat(store, beat()).start()
    assert documents.TRAINER.read(store) is None, "it must not speak in the other's place"


def test_a_trainer_of_the_newest_timeline_begins(store: Store) -> None:
    write_fork(store, Fork(1, "0-10"))
    heartbeat = Heartbeat(store, beat(timeline=1))
    heartbeat.start()
    heartbeat.check()
    heartbeat.stop("done")
    said = documents.TRAINER.read(store)
    assert said is not None
    assert (said.timeline, said.activity) == (1, "done")


def test_a_timeline_that_begins_ends_a_wait(store: Store) -> None:
    ended: queue.Queue[int] = queue.Queue()
    heartbeat = Heartbeat(store, beat(), end=ended.put, grace_s=0.0)
    heartbeat.start()
    write_fork(store, Fork(1, "0-10"))
    with pytest.raises(Fenced, match=BEGUN):
        heartbeat.wait(HANG_S)


def test_stop_request_ends_the_trainer_by_itself(store: Store) -> None:
    ended: queue.Queue[int] = queue.Queue()
    heartbeat, others = Heartbeat(store, beat(), end=ended.put, grace_s=HANG_S), set(threading.enumerate())
    heartbeat.start()
    (thread,) = set(threading.enumerate()) - others
    newer = Heartbeat(store, beat(attempt=2))
    newer.start()
    with pytest.raises(Fenced, match="attempt 2 on trainer-0-i1, timeline 0, has taken over"):
        heartbeat.wait(HANG_S)
    thread.join(HANG_S / 2)
    assert not thread.is_alive(), "it waits for the end of its grace"
    assert ended.empty()
    newer.stop("done")


HANGS = """
import sys, time
from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.policies.tick.snapshot import Trainer
from grpo_orch.tasks.storing.heartbeat import Heartbeat
Heartbeat(Store(sys.argv[1]), Trainer("trainer-0-i1", 1, 0, 0, 0, "training", 0.0), grace_s=0.1).start()
time.sleep(600)  # a collective whose partner is gone
"""


def test_a_process_that_hangs_is_really_gone(store: Store) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", HANGS, store.url], cwd=Path(__file__).parents[3], stderr=subprocess.PIPE, text=True
    )
    try:
        until("its beat", lambda: documents.TRAINER.read(store))
        write_fork(store, Fork(1, "0-10"))
        _, said = process.communicate(timeout=HANG_S)
        assert process.returncode == exit_codes.FENCED
        assert said.splitlines()[-1].startswith(f"grpo-orch trainer: stopped: {BEGUN}")
    finally:
        process.kill()


def test_guards_verdict_is_in_the_heartbeat(store: Store) -> None:
    heartbeat = Heartbeat(store, beat())
    heartbeat.start()
    verdict = Verdict(Health.TRIPPED, 40, onset_step=30, tripped_step=40, evidence=("kl is 9.1, was 0.02",))
    heartbeat.update(verdict=verdict)
    heartbeat.update(step=40)
    heartbeat.stop("diverged")
    said = documents.TRAINER.read(store)
    assert said is not None
    assert (said.verdict, said.step, said.activity) == (verdict, 40, "diverged")


def test_stop_request_reaches_main_thread_and_heartbeat(store: Store, tmp_path: Path) -> None:
    ended: queue.Queue[int] = queue.Queue()
    leaving = Leaving(tmp_path, 1)
    heartbeat = Heartbeat(store, beat(), leaving=leaving, end=ended.put)
    heartbeat.update("training", step=3)
    heartbeat.start()
    documents.request_stop(store, "trainer-0-i1", 2, 0.0)  # another attempt
    heartbeat.update(step=4)
    said = until("the step", lambda: (one := documents.TRAINER.read(store)) and one.step == 4 and one)
    assert (said.leaving, leaving.is_stop_requested) == (False, False)
    documents.request_stop(store, "trainer-0-i1", 1, 0.0)
    until("that it leaves", lambda: (one := documents.TRAINER.read(store)) and one.leaving)
    assert leaving.is_stop_requested
    assert ended.empty(), "it has something to store"
    heartbeat.stop("stopped")


def test_stop_request_before_training_ends_the_process(store: Store, tmp_path: Path) -> None:
    ended: queue.Queue[int] = queue.Queue()
    documents.request_stop(store, "trainer-0-i1", 1, 0.0)
    heartbeat = Heartbeat(store, beat(), leaving=Leaving(tmp_path, 1), end=ended.put)
    heartbeat.start()
    assert ended.get(timeout=HANG_S) == exit_codes.STOPPED
    heartbeat.stop("stopped")
