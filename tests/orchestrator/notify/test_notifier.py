"""Everything is told at least once, in order, whoever dies; nothing waits for it."""

from __future__ import annotations

import itertools
import threading
from dataclasses import replace

import pytest

from grpo_orch.checkpoint import journal
from grpo_orch.checkpoint.journal import Journal, Record
from grpo_orch.checkpoint.records import documents
from grpo_orch.checkpoint.records.documents import RunRecord
from grpo_orch.checkpoint.store.errors import StoreError
from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.orchestrator.home import all_secrets, secrets_for
from grpo_orch.orchestrator.notify import DeliveryFailed, Message, Notifier, start_notifier
from grpo_orch.policies.model.events import BudgetNeared, CapacityShortage, Event, RunCreated, RunMoved
from grpo_orch.policies.model.spec import Notify
from grpo_orch.policies.model.vocabulary import Role, RunPhase
from tests.budget import HANG_S
from tests.stand_ins.world import spec

names = itertools.count()
TRAINS = RunMoved(RunPhase.TRAINING, "the trainer sent its first heartbeat")
NEAR = BudgetNeared(80.0, 100.0)
WAITS = CapacityShortage("rollout", 5.0, "no rollout machine for 60 min")
DONE = RunMoved(RunPhase.FINISHED, "the trainer reached its last step")


class Told:
    """A channel that keeps what it is told; while `broken` it refuses."""

    name = "service"

    def __init__(self, name: str = "service") -> None:
        self.name = name
        self.kinds: list[str] = []
        self.ids: list[str] = []
        self.broken = False
        self.tried = threading.Semaphore(0)
        self.arrived = threading.Event()

    def deliver(self, message: Message, _limit_s: float) -> None:
        try:
            if self.broken:
                raise DeliveryFailed("broken")
            self.kinds.append(message.kind)
            self.ids.append(message.id)
            self.arrived.set()
        finally:
            self.tried.release()

    def wait(self, tries: int = 1) -> None:
        for _ in range(tries):
            assert self.tried.acquire(timeout=HANG_S)


class Run:
    """A journal, and notifiers over it."""

    def __init__(self) -> None:
        self.store = Store(f"memory://notify-{next(names)}")
        self.journal = Journal(self.store, "here/1")
        self.journal.take_over(1.0, "here", 1, "up")
        self.happens(RunCreated("demo", "demo-1"), TRAINS)

    def happens(self, *events: Event) -> None:
        self.journal.append(2.0, events)

    def notifier(self, *channels: Told, **options: float) -> Notifier:
        return Notifier(self.store, "demo", "demo-1", channels, **options)


def test_messages_are_sent_once_and_next_daemon_continues() -> None:
    run, told = Run(), Told()
    first = run.notifier(told)
    run.happens(NEAR)
    first.wake()
    told.wait()
    run.happens(WAITS, DONE)
    first.close(drain_s=HANG_S)
    assert told.kinds == ["budget_neared", "no_capacity", "finished"]
    assert told.ids == ["demo-1/3.0", "demo-1/4.0", "demo-1/4.1"]
    run.notifier(told).close(drain_s=HANG_S)
    assert len(told.kinds) == 3


def test_parking_and_resuming_are_notified_and_no_other_start() -> None:
    run, told = Run(), Told()
    run.happens(TRAINS, RunMoved(RunPhase.PARKED, "no rollout node can be had"))
    run.happens(RunMoved(RunPhase.STARTING, "rollout-0-i7 has a machine", 5400.0), TRAINS)
    run.happens(RunMoved(RunPhase.STARTING, "resumed"), DONE)
    run.notifier(told).close(drain_s=HANG_S)
    assert told.kinds == ["parked", "unparked", "finished"]


def test_unsent_messages_are_retried_in_order_per_channel() -> None:
    run, slack, command = Run(), Told(), Told("command")
    slack.broken = True
    first = run.notifier(slack, command)
    run.happens(NEAR)
    first.wake()
    command.wait()
    slack.wait()
    run.happens(DONE)
    first.close(drain_s=HANG_S)
    assert (slack.kinds, command.kinds) == ([], ["budget_neared", "finished"])
    slack.broken = False
    run.notifier(slack, command).close(drain_s=HANG_S)
    assert (slack.kinds, command.kinds) == (["budget_neared", "finished"], ["budget_neared", "finished"])


def test_failed_notification_is_retried_automatically() -> None:
    run, told = Run(), Told()
    told.broken = True
    one = run.notifier(told, retry_s=0.001)
    run.happens(NEAR)
    one.wake()
    told.wait(3)
    told.broken = False
    assert told.arrived.wait(HANG_S)
    one.close(drain_s=0.0)
    assert told.kinds == ["budget_neared"]


def test_message_sent_but_not_recorded_repeats_with_same_id() -> None:
    run, told = Run(), Told()
    run.happens(DONE)
    run.notifier(told).close(drain_s=HANG_S)
    documents.NOTIFIED.drop(run.store)
    run.notifier(told).close(drain_s=HANG_S)
    assert told.ids == 2 * ["demo-1/3.0"]


def test_channel_missing_in_one_daemon_keeps_its_place() -> None:
    run, service, command = Run(), Told(), Told("command")
    run.happens(NEAR)
    run.notifier(service, command).close(drain_s=HANG_S)
    run.happens(WAITS)
    run.notifier(command).close(drain_s=HANG_S)  # on a machine without the URL
    run.notifier(service, command).close(drain_s=HANG_S)
    assert service.kinds == ["budget_neared", "no_capacity"]


class Looks:
    """The journal's reader; while `away` the store does not answer. `looked` counts looks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.away, self.looked = False, threading.Semaphore(0)
        self._read = journal.read
        monkeypatch.setattr(journal, "read", self.read)

    def read(self, store: Store, after: int) -> list[Record]:
        away = self.away
        self.looked.release()
        if away:
            raise StoreError("away")
        return self._read(store, after)


def test_events_journalled_during_outage_are_sent_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run, told = Run(), Told()
    looks = Looks(monkeypatch)
    one = run.notifier(told, retry_s=0.001)
    assert looks.looked.acquire(timeout=HANG_S)
    looks.away = True
    run.happens(NEAR)
    one.wake()
    assert looks.looked.acquire(timeout=HANG_S)
    looks.away = False
    assert told.arrived.wait(HANG_S)
    one.close(drain_s=0.0)


def test_store_outage_is_polled_slowly_while_a_message_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run, told = Run(), Told()
    told.broken = True
    run.happens(NEAR)
    looks = Looks(monkeypatch)
    one = run.notifier(told, retry_max_s=0.0)  # its channel's next try is due at once
    told.wait()
    looks.away = True
    looks.looked = threading.Semaphore(0)  # however often it looked before
    told_again = 0
    while looks.looked.acquire(timeout=0.3):  # the one at which it is found away is the last for RETRY_S
        told_again += 1
        assert told_again < 1000
    one.close(drain_s=0.0)


def test_broken_channel_is_retried_slowly_and_blocks_no_other() -> None:
    class Bug(Told):
        def deliver(self, message: Message, _limit_s: float) -> None:
            super().deliver(message, _limit_s)
            raise RuntimeError("a bug")

    run, bug, command = Run(), Bug(), Told("command")
    run.happens(NEAR)
    one = run.notifier(bug, command)
    command.wait()
    bug.wait()
    assert not bug.tried.acquire(timeout=0.3)
    one.close(drain_s=0.0)


def test_the_url_stays_with_the_daemon() -> None:
    run = Run()
    wanted = RunRecord(1, "demo-1", 0.0, replace(spec(), notify=Notify(url_env=("SLACK",), command=("true",))))
    environment = {"SLACK": "json://127.0.0.1:1/secret", "HOME": "/"}
    assert all_secrets(wanted.spec, environment) == {"SLACK": environment["SLACK"]}  # what a log blanks
    assert [secrets_for(wanted.spec, role, environment) for role in Role] == [{}, {}]
    start_notifier(run.store, wanted, environment).close(drain_s=0.0)
    assert environment == {"HOME": "/"}
    start_notifier(run.store, wanted, environment).close(drain_s=0.0)  # a missing one is no error
    assert not any(b"127.0.0.1" in run.store.get(entry.key) for entry in run.store.entries(""))
