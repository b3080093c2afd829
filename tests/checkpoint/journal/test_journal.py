"""What the journal's writer is told and keeps, and how long nobody journalled anything by the store's clock."""

from __future__ import annotations

import math
import os
import time
from pathlib import Path
from typing import Any

import pytest

from grpo_orch.checkpoint import journal
from grpo_orch.checkpoint.journal import Fenced, Journal
from grpo_orch.checkpoint.store import layout
from grpo_orch.checkpoint.store.errors import Corrupt, StoreUnavailable
from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.policies.model.events import BudgetSet, ControllerTookOver, RunCreated


def test_event_that_could_not_be_read_back_is_never_written(store: Store) -> None:
    """JSON has no NaN. Entries are never deleted, so that such an entry would end the run for good."""
    writer = Journal(store, "a/1")
    writer.take_over(1.0, "a", 1, "up")
    with pytest.raises(Corrupt, match="usd"):
        writer.append(2.0, (BudgetSet(math.nan),))
    assert writer.settle(3.0) is None
    writer.append(4.0, (BudgetSet(5.0),))
    assert journal.recover(store).state.money.cap_usd == 5.0


def test_late_take_over_after_another_epoch_is_refused(store: Store) -> None:
    Journal(store, "a").take_over(1.0, "h", 1, "up", 0)
    Journal(store, "b").take_over(2.0, "h", 2, "resume", 1)
    with pytest.raises(Fenced, match="epoch 2 instead of 1"):
        Journal(store, "c").take_over(3.0, "h", 3, "resume", 1)
    assert [record.epoch for record in journal.read(store)] == [1, 2]
    Journal(store, "d").take_over(4.0, "h", 4, "resume")


def test_an_event_of_a_newer_version_is_one_clear_line(store: Store) -> None:
    Journal(store, "a").take_over(1.0, "h", 1, "up")
    text = store.get(layout.journal_entry(1)).replace(b"ControllerTookOver", b"Levitated")
    store.put(layout.journal_entry(1), text)
    with pytest.raises(Corrupt, match="unknown event 'Levitated'"):
        journal.read(store)[0].decoded()


class Doubtful:
    """A store that says that it is away, before or after doing as told."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.done: bool | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)

    def create(self, key: str, data: bytes) -> None:
        done, self.done = self.done, None
        if done is None or done:
            self.store.create(key, data)
        if done is not None:
            raise StoreUnavailable(f"create {key}")


@pytest.mark.parametrize("done", [True, False])
def test_entry_of_unknown_outcome_is_settled_by_its_writer(store: Store, done: bool) -> None:
    doubtful = Doubtful(store)
    writer = Journal(doubtful, "a")  # type: ignore[arg-type]  # a stand-in for a store over a bad network
    writer.take_over(1.0, "h", 1, "up")
    doubtful.done = done
    with pytest.raises(StoreUnavailable):
        writer.append(2.0, (RunCreated("r", "id"),))
    settled = writer.settle(9.0)
    assert settled is not None
    kept = (2.0, (RunCreated("r", "id"),)) if done else (9.0, ())  # what was decided then is not written now
    assert (settled.number, settled.time_s, settled.decoded()) == (2, *kept)
    assert writer.settle(9.0) is None
    assert writer.append(10.0, (RunCreated("s", "id"),)).number == 3
    assert journal.read(doubtful.store)[1] == settled


# How long nobody journalled anything, by the dates of files.


class World:
    """A run's store in a folder, in which what is written can be dated."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.began_s = time.time()
        self.store = Store(folder.as_uri())
        self.first = Journal(self.store, "a/1")
        self.first.take_over(1000.0, "a", 1, "up")
        self.first.append(1000.0, (RunCreated("r", "id"),))

    def date(self, key: str, ago_s: float) -> None:
        at_s = self.began_s - ago_s
        os.utime(self.folder / key, (at_s, at_s))

    def seconds_may_be(self, found_s: float, expected_s: float) -> bool:
        """Whether they are, for what is dated half a second more: the test itself takes time."""
        return expected_s <= found_s <= expected_s + 0.5 + time.time() - self.began_s


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def taken_over(world: World) -> ControllerTookOver:
    Journal(world.store, "b/1").take_over(500.0, "b", 1, "resume")
    [event] = journal.read(world.store)[-1].decoded()
    assert isinstance(event, ControllerTookOver)
    return event


def test_take_over_journals_age_of_last_event_by_store_clock(world: World) -> None:
    world.date(layout.journal_entry(2), 3600.5)
    assert world.seconds_may_be(taken_over(world).since_last_event_s, 3600.0)


def test_entry_without_events_gives_no_time(world: World) -> None:
    world.first.append(1000.0, ())
    world.date(layout.journal_entry(2), 3600.5)
    assert world.seconds_may_be(taken_over(world).since_last_event_s, 3600.0)


def test_a_date_in_the_future_is_none_of_the_past(world: World) -> None:
    world.date(layout.journal_entry(2), -3600.0)
    assert taken_over(world).since_last_event_s == 0.0
