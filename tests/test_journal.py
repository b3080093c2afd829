"""The journal as a lock: one order, unique epochs, no acknowledged entry lost."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoint import journal, layout
from checkpoint.errors import Corrupt, StoreUnavailable
from checkpoint.journal import Fenced, Journal
from checkpoint.store import Store
from policies.events import RunCreated, TookOver

names = itertools.count()


def fresh() -> Store:
    return Store(f"memory://journal-{next(names)}", patience_s=0.0)


def test_entries_are_numbered_and_read_back():
    store = fresh()
    writer = Journal(store, "a/1")
    assert [r.number for r in writer.take_over(1.0, "a", 1, "up")] == [1]
    writer.append(2.0, (RunCreated("r", "id"),))
    records = journal.read(store)
    assert [r.number for r in records] == [1, 2]
    assert records[0].decoded() == (TookOver("a", 1, "up"),)
    assert records[1].decoded() == (RunCreated("r", "id"),)
    assert [r.number for r in journal.read(store, after=1)] == [2]
    assert writer.epoch == 1


def test_the_late_controller_is_fenced_and_stays_fenced():
    store = fresh()
    old, new = Journal(store, "old"), Journal(store, "new")
    old.take_over(1.0, "h", 1, "up")
    new.take_over(2.0, "h", 2, "resume")
    assert new.epoch == 2
    for _ in range(2):
        with pytest.raises(Fenced, match="new wrote journal entry 2"):
            old.append(3.0, (RunCreated("r", "id"),))


class LostAnswers:
    """A store whose create answers get lost: the object is there, the writer is told to try again."""

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


def test_a_lost_answer_is_not_a_lost_race():
    flaky = LostAnswers(fresh())
    writer = Journal(flaky, "a")  # type: ignore[arg-type]  # a stand-in for a store behind a bad network
    writer.take_over(1.0, "h", 1, "up")
    flaky.lose_next = True
    assert writer.append(2.0, (RunCreated("r", "id"),)).number == 2
    assert writer.append(3.0, (RunCreated("r", "id"),)).number == 3


@settings(max_examples=200, deadline=None)
@given(st.data(), st.integers(2, 6))
def test_many_writers_one_order(data: st.DataObject, count: int):
    """Writers take over, append, stall, lose answers and die in any order; the journal stays one line."""
    flaky = LostAnswers(fresh())
    writers: list[Journal | None] = [None] * count
    acknowledged: dict[int, str] = {}
    epochs: list[int] = []
    for turn in range(data.draw(st.integers(1, 40))):
        who = data.draw(st.integers(0, count - 1))
        flaky.lose_next = data.draw(st.booleans())
        act = data.draw(st.sampled_from(["take over", "append", "append", "append", "die"]))
        writer = writers[who]
        try:
            if act == "die":
                writers[who] = None
            elif act == "take over" or writer is None:
                writers[who] = writer = Journal(flaky, f"w{who}.{turn}")  # type: ignore[arg-type]
                record = writer.take_over(float(turn), "h", who, "resume")[-1]
                epochs.append(writer.epoch)
                acknowledged[record.number] = record.nonce
            else:
                record = writer.append(float(turn), (RunCreated("r", "id"),))
                acknowledged[record.number] = record.nonce
        except Fenced:
            writers[who] = None
    records = journal.read(flaky.store)
    assert [r.number for r in records] == list(range(1, len(records) + 1))
    assert len(epochs) == len(set(epochs))
    for number, nonce in acknowledged.items():
        assert records[number - 1].nonce == nonce, "an acknowledged entry was lost"
    assert all(a.epoch <= b.epoch for a, b in itertools.pairwise(records)), "a fenced writer wrote on"


def test_a_store_that_is_away_is_not_a_lost_race():
    class Away(LostAnswers):
        def create(self, key: str, data: bytes) -> None:  # noqa: ARG002  # the store's own signature
            raise StoreUnavailable(f"create {key}")

    store = fresh()
    writer = Journal(Away(store), "a")  # type: ignore[arg-type]
    with pytest.raises(StoreUnavailable):
        writer.take_over(1.0, "h", 1, "up")
    assert journal.read(store) == []


def test_an_event_of_a_newer_version_is_one_clear_line():
    store = fresh()
    Journal(store, "a").take_over(1.0, "h", 1, "up")
    text = store.get(layout.journal_entry(1)).replace(b"TookOver", b"Levitated")
    store.put(layout.journal_entry(1), text)
    with pytest.raises(Corrupt, match="unknown event 'Levitated'"):
        journal.read(store)[0].decoded()
