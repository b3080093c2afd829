"""When a trainer leaves its machine, by what it was told and has measured; its heartbeat and its fence."""

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
from grpo_orch.checkpoint.stream.spool import Seal, Spool
from grpo_orch.policies.control.leaving import MARGIN, NOTICE_S, is_worth_storing, leave_by_s
from grpo_orch.policies.detect.divergence import Health, Verdict
from grpo_orch.policies.model import exit_codes
from grpo_orch.policies.model.spec import CheckpointsSpec
from grpo_orch.policies.model.timelines import Fork
from grpo_orch.policies.tick.snapshot import Trainer
from grpo_orch.tasks.machine.leaving import DOWN, LeaveNow, Leaving, await_predecessor, stop_file
from grpo_orch.tasks.machine.node_env import NodeEnv
from grpo_orch.tasks.machine.spooling import make_spool
from grpo_orch.tasks.machine.trainer_machine import await_upload
from grpo_orch.tasks.storing.heartbeat import Fenced, Heartbeat
from tests.budget import HANG_S, until


def beat(
    *,
    node: str = "trainer-0-i1",
    attempt: int = 1,
    timeline: int = 0,
    activity: str = "training",
    leaving: bool = False,
) -> Trainer:
    return Trainer(node, attempt, timeline, 7, 40, activity, 0.0, leaving=leaving)


class World:
    """A machine's working folder, and a clock that is told."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.now_s = 0.0
        self.store_s: float | None = None
        self.generated_s = 0.0
        self.leaving = Leaving(folder, 1, lambda: self.now_s)
        self.leaving.begin(lambda: self.store_s)

    def step(self, took_s: float, generating_s: float = 0.0) -> None:
        self.now_s += took_s
        self.generated_s += generating_s
        self.leaving.step_ended(self.generated_s)

    def measured(self, save_s: float, store_s: float) -> None:
        self.leaving.saved(save_s)
        self.store_s = store_s

    def noticed(self, lasts: str) -> None:
        (self.folder / "notice").write_text(lasts)

    def due(self) -> tuple[bool, bool]:
        """Between two steps, and in the middle of one."""
        return self.leaving.is_due(in_step=False), self.leaving.is_due(in_step=True)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


@pytest.mark.parametrize("how", ["signal", "down"])
def test_stop_request_ends_at_once(world: World, how: str) -> None:
    if how == "down":
        world.leaving.request_stop()
    else:
        stop_file(world.folder, 1).touch()
    assert (world.due(), world.leaving.is_leaving, world.leaving.is_stop_requested) == ((True, True), True, True)
    with pytest.raises(LeaveNow):
        world.leaving.check()
    assert not Leaving(world.folder, 2).is_leaving, "another attempt on the same machine was not asked"


def test_trainer_works_through_notice_while_a_checkpoint_fits(world: World) -> None:
    """120 s, steps of 20 s, 4 s to save and 20 to store: the last step has to end before 89."""
    world.measured(4.0, 20.0)
    world.step(20.0)
    assert (world.due(), world.leaving.is_leaving) == ((False, False), False)
    world.noticed("120")
    world.leaving.check()
    told_s = world.now_s
    while not world.leaving.is_due(in_step=False):
        world.step(20.0)
    assert world.now_s - told_s == 80.0
    world.now_s = told_s + 88.0
    assert not world.leaving.is_due(in_step=True)
    world.now_s = told_s + 89.5
    assert world.leaving.is_due(in_step=True)


def test_notice_too_short_for_a_checkpoint_is_trained_through(world: World) -> None:
    world.measured(30.0, 400.0)
    world.noticed("")
    for _ in range(10):
        world.step(5.0)
        assert world.due() == (False, False)
    assert world.leaving.is_leaving, "who comes in its place waits all the same"


def test_before_a_machine_is_taken_all_is_worth_storing(world: World) -> None:
    world.measured(10.0, 10.0)
    world.noticed("120")
    world.step(0.1)
    assert world.leaving.is_worth_storing()
    world.leaving.request_stop()
    assert world.leaving.is_worth_storing(), "asked to stop as well"


def test_a_notice_that_nothing_followed_is_over(world: World) -> None:
    world.noticed("0.0")
    assert (world.due(), world.leaving.is_leaving) == ((False, False), False)


@pytest.mark.parametrize(
    ("lasts_s", "closing_s", "leaves_at_s"),
    [
        (120.0, None, 1060.0),  # half, for what nobody has measured
        (120.0, 24.0, 1089.0),
        (NOTICE_S, 24.0, 1000.0),  # at once
        (NOTICE_S, 28.0, 1000.0),
        (NOTICE_S, 29.5, None),
        (120.0, 430.0, None),
    ],
)
def test_leaving_in_time(lasts_s: float, closing_s: float | None, leaves_at_s: float | None) -> None:
    assert leave_by_s(1000.0, lasts_s, closing_s) == leaves_at_s
    if closing_s is not None and leaves_at_s not in (None, 1000.0):
        assert leaves_at_s + MARGIN * closing_s < 1000.0 + lasts_s


@pytest.mark.parametrize(
    ("again_s", "closing_s", "machine_stays", "worth"),
    [
        (1.0, None, True, True),
        (1.0, 5.0, True, False),
        (5.0, 5.0, True, True),
        (0.1, 500.0, False, True),  # the machine is paid to its end anyway
    ],
)
def test_worthwhile_checkpoints(again_s: float, closing_s: float | None, machine_stays: bool, worth: bool) -> None:
    assert is_worth_storing(again_s, closing_s, machine_stays=machine_stays) is worth


def test_repeated_work_excludes_generation_since_checkpoint(world: World) -> None:
    world.leaving.request_stop()
    world.step(100.0)
    world.measured(1.0, 9.0)
    world.step(30.0, generating_s=24.0)
    assert not world.leaving.is_worth_storing(), "6 s of training against 10 of storing"
    world.step(30.0, generating_s=24.0)
    assert world.leaving.is_worth_storing()
    stop_file(world.folder, 1).write_text("")
    world.step(0.1)
    world.leaving.saved(1.0)
    assert world.leaving.is_worth_storing(), "by a signal: its machine goes"
    assert (world.folder / "stop-1").read_text() != DOWN


def test_machine_of_dead_trainer_waits_until_all_is_stored(tmp_path: Path) -> None:
    await_upload(tmp_path)  # before there is a spool
    spool: Spool = make_spool(tmp_path, CheckpointsSpec(spool=str(tmp_path / "memory")), 10)
    slot = spool.claim(5)
    assert slot is not None
    spool.seal(slot, Seal("0-5", 0.0))
    waiting = threading.Thread(target=await_upload, args=(tmp_path,))
    waiting.start()
    waiting.join(0.5)
    assert waiting.is_alive()
    spool.release(slot)
    waiting.join(HANG_S)
    assert not waiting.is_alive()
    spool.seal(slot, Seal("0-5", 0.0))
    await_upload(tmp_path, timeout_s=0.3)  # an uploader that does not come is not waited for


@pytest.mark.parametrize(
    ("said", "waits"),
    [
        (None, False),
        (beat(), False),
        (beat(leaving=True), True),
        (beat(leaving=True, activity="stopped"), False),
        (beat(leaving=True, timeline=1), False),  # a later timeline: the heartbeat ends this trainer
        (beat(leaving=True, node="trainer-0-i3"), False),
        (beat(leaving=True, node="trainer-0-i2", attempt=1), False),  # this machine's own, which is over
    ],
)
def test_new_trainer_waits_for_one_that_stores(said: Trainer | None, waits: bool, tmp_path: Path) -> None:
    store = Store(f"file://{tmp_path}/store")
    if said is not None:
        documents.TRAINER.write(store, said)
    env = NodeEnv(store.url, "trainer-0-i2", "secret", 2, 0, str(tmp_path), "127.0.0.1")
    waiting = threading.Thread(target=await_predecessor, args=(store, env, {"stopped"}, 60.0))
    waiting.start()
    waiting.join(1.5 if waits else 20.0)
    assert waiting.is_alive() is waits
    documents.TRAINER.write(store, beat(leaving=True, activity="stopped"))
    waiting.join(HANG_S)
    assert not waiting.is_alive()


def test_silent_predecessor_is_not_awaited(tmp_path: Path) -> None:
    store = Store(f"file://{tmp_path}/store")
    documents.TRAINER.write(store, beat(leaving=True))
    env = NodeEnv(store.url, "trainer-0-i2", "secret", 2, 0, str(tmp_path), "127.0.0.1")
    await_predecessor(store, env, {"stopped"}, silent_s=0.2)


# The trainer's heartbeat and its fence: what ends a trainer, and how.

BEGUN = "timeline 1 has started, and this trainer is on timeline 0"


def started(timeline: int = 0, attempt: int = 1) -> Trainer:
    return Trainer("trainer-0-i1", attempt, timeline, 0, 0, "starting", 0.0)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(f"file://{tmp_path}/store")


def test_a_trainer_of_an_older_timeline_does_not_begin(store: Store) -> None:
    write_fork(store, Fork(1, "0-10"))
    with pytest.raises(Fenced, match=BEGUN):
        Heartbeat(store, started()).start()
    assert documents.TRAINER.read(store) is None, "it must not speak in the other's place"


def test_a_trainer_of_the_newest_timeline_begins(store: Store) -> None:
    write_fork(store, Fork(1, "0-10"))
    heartbeat = Heartbeat(store, started(timeline=1))
    heartbeat.start()
    heartbeat.check()
    heartbeat.stop("done")
    said = documents.TRAINER.read(store)
    assert said is not None
    assert (said.timeline, said.activity) == (1, "done")


def test_a_timeline_that_begins_ends_a_wait(store: Store) -> None:
    ended: queue.Queue[int] = queue.Queue()
    heartbeat = Heartbeat(store, started(), end=ended.put, grace_s=0.0)
    heartbeat.start()
    write_fork(store, Fork(1, "0-10"))
    with pytest.raises(Fenced, match=BEGUN):
        heartbeat.wait(HANG_S)


def test_stop_request_ends_the_trainer_by_itself(store: Store) -> None:
    ended: queue.Queue[int] = queue.Queue()
    heartbeat, others = Heartbeat(store, started(), end=ended.put, grace_s=HANG_S), set(threading.enumerate())
    heartbeat.start()
    (thread,) = set(threading.enumerate()) - others
    newer = Heartbeat(store, started(attempt=2))
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
    heartbeat = Heartbeat(store, started())
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
    heartbeat = Heartbeat(store, started(), leaving=leaving, end=ended.put)
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
    heartbeat = Heartbeat(store, started(), leaving=Leaving(tmp_path, 1), end=ended.put)
    heartbeat.start()
    assert ended.get(timeout=HANG_S) == exit_codes.STOPPED
    heartbeat.stop("stopped")
