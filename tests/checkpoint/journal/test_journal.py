"""The journal as a lock: one order, unique epochs, no acknowledged entry lost."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest

from checkpoint import journal
from checkpoint.journal import Fenced, Journal
from checkpoint.store import layout
from checkpoint.store.errors import Corrupt, StoreUnavailable
from checkpoint.store.run_store import Store
from policies.model.events import BudgetSet, RunCreated, TookOver
from policies.model.state import RunState

names = itertools.count()


def fresh() -> Store:
    return Store(f"memory://journal-{next(names)}", retry_s=0.0)


def test_entries_are_numbered_and_read_back() -> None:
    store = fresh()
    writer = Journal(store, "a/1")
    assert writer.take_over(1.0, "a", 1, "up") == RunState(epoch=1, told_s=1.0)
    writer.append(2.0, (RunCreated("r", "id"),))
    records = journal.read(store)
    assert [r.number for r in records] == [1, 2]
    assert records[0].decoded() == (TookOver("a", 1, "up"),)
    assert records[1].decoded() == (RunCreated("r", "id"),)
    assert [r.number for r in journal.read(store, after=1)] == [2]
    assert writer.epoch == 1


def test_event_that_could_not_be_read_back_is_never_written() -> None:
    """JSON has no NaN. Entries are never deleted, so that such an entry would end the run for good."""
    store = fresh()
    writer = Journal(store, "a/1")
    writer.take_over(1.0, "a", 1, "up")
    with pytest.raises(Corrupt, match="usd"):
        writer.append(2.0, (BudgetSet(math.nan),))
    assert writer.settle(3.0) is None
    writer.append(4.0, (BudgetSet(5.0),))
    assert journal.recover(store).state.budget_usd == 5.0


def test_the_late_controller_is_fenced_and_stays_fenced() -> None:
    store = fresh()
    old, new = Journal(store, "old"), Journal(store, "new")
    old.take_over(1.0, "h", 1, "up")
    new.take_over(2.0, "h", 2, "resume")
    assert new.epoch == 2
    for _ in range(2):
        with pytest.raises(Fenced, match="new wrote journal entry 2"):
            old.append(3.0, (RunCreated("r", "id"),))


def test_a_take_over_after_an_epoch_is_refused_once_there_is_another() -> None:
    store = fresh()
    Journal(store, "a").take_over(1.0, "h", 1, "up", 0)
    Journal(store, "b").take_over(2.0, "h", 2, "resume", 1)
    with pytest.raises(Fenced, match="epoch 2 and not 1"):
        Journal(store, "c").take_over(3.0, "h", 3, "resume", 1)
    assert [record.epoch for record in journal.read(store)] == [1, 2]
    Journal(store, "d").take_over(4.0, "h", 4, "resume")


class LostAnswers:
    """A store that loses the answers to creates: the object is there, the writer is told to try again."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.lose_next = False

    def create(self, key: str, data: bytes) -> None:
        if self.lose_next:
            self.lose_next = False
            self.store.create(key, data)  # done, and nobody hears of it; the client's retry follows
        self.store.create(key, data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)


def test_a_lost_answer_is_not_a_lost_race() -> None:
    flaky = LostAnswers(fresh())
    writer = Journal(flaky, "a")  # type: ignore[arg-type]  # a stand-in for a store over a bad network
    writer.take_over(1.0, "h", 1, "up")
    flaky.lose_next = True
    assert writer.append(2.0, (RunCreated("r", "id"),)).number == 2
    assert writer.append(3.0, (RunCreated("r", "id"),)).number == 3


def test_a_store_that_is_away_is_not_a_lost_race() -> None:
    class Away(LostAnswers):
        def create(self, key: str, data: bytes) -> None:  # noqa: ARG002  # the store's own signature
            raise StoreUnavailable(f"create {key}")

    store = fresh()
    writer = Journal(Away(store), "a")  # type: ignore[arg-type]
    with pytest.raises(StoreUnavailable):
        writer.take_over(1.0, "h", 1, "up")
    assert journal.read(store) == []


def test_an_event_of_a_newer_version_is_one_clear_line() -> None:
    store = fresh()
    Journal(store, "a").take_over(1.0, "h", 1, "up")
    text = store.get(layout.journal_entry(1)).replace(b"TookOver", b"Levitated")
    store.put(layout.journal_entry(1), text)
    with pytest.raises(Corrupt, match="unknown event 'Levitated'"):
        journal.read(store)[0].decoded()


class Doubtful(LostAnswers):
    """Says that it is away, before or after doing as told."""

    done: bool | None = None

    def create(self, key: str, data: bytes) -> None:
        done, self.done = self.done, None
        if done is None or done:
            self.store.create(key, data)
        if done is not None:
            raise StoreUnavailable(f"create {key}")


@pytest.mark.parametrize("done", [True, False])
def test_an_entry_of_unknown_outcome_is_settled_and_its_writer_goes_on(done: bool) -> None:
    doubtful = Doubtful(fresh())
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


def test_what_comes_late_finds_its_number_taken_and_what_came_before_is_known() -> None:
    """The store takes an entry after its writer was told otherwise, while the writer settles that number."""
    doubtful = Doubtful(fresh())
    writer = Journal(doubtful, "a")  # type: ignore[arg-type]
    writer.take_over(1.0, "h", 1, "up")
    for done in (True, False):  # it arrived; then the entry that settles it is lost
        doubtful.done = done
        with pytest.raises(StoreUnavailable):
            writer.append(2.0, (RunCreated("r", "id"),)) if done else writer.settle(3.0)
    settled = writer.settle(4.0)
    assert settled is not None
    assert settled.decoded() == (RunCreated("r", "id"),)


def test_a_controller_can_see_at_any_time_that_it_was_replaced() -> None:
    store = fresh()
    old, new = Journal(store, "old"), Journal(store, "new")
    old.take_over(1.0, "h", 1, "up")
    old.check()
    new.take_over(2.0, "h", 2, "resume")
    new.check()
    with pytest.raises(Fenced, match="new wrote journal entry 2"):
        old.check()


def test_who_was_replaced_while_the_store_was_away_is_fenced() -> None:
    doubtful = Doubtful(fresh())
    writer = Journal(doubtful, "a")  # type: ignore[arg-type]
    writer.take_over(1.0, "h", 1, "up")
    doubtful.done = False
    with pytest.raises(StoreUnavailable):
        writer.append(2.0, (RunCreated("r", "id"),))
    Journal(doubtful.store, "b").take_over(3.0, "h", 2, "resume")
    for _ in range(2):
        with pytest.raises(Fenced, match="b wrote journal entry 2"):
            writer.settle(4.0)
