"""The journal as a lock, with everything between any two store operations: other writers, crashes, lost answers.

Two to eight controllers and a reader run as threads, one store operation at a time (`journal_rig`). Segments are
short, so that controllers often meet at their ends.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_orch.checkpoint import journal
from grpo_orch.checkpoint.journal import Fenced, Journal, Record
from grpo_orch.checkpoint.store import layout
from grpo_orch.checkpoint.store.codec import from_json, state_from_plain
from grpo_orch.checkpoint.store.errors import StoreUnavailable
from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.policies.model.events import CommandTaken, ControllerTookOver, GatewayRestarted
from grpo_orch.policies.model.fold import fold
from grpo_orch.policies.model.state import RunState
from tests.budget import examples
from tests.stand_ins.journal_rig import Actor, Fate, arrive

SEGMENT = 3
APPENDS = 8  # of one controller, at most
TURNS = 120
names = itertools.count()

# Mostly without faults: a run of nothing else gets nowhere.
FATES = [Fate.DONE] * 10 + [fate for fate in Fate if fate is not Fate.DONE]


@pytest.fixture(autouse=True, scope="module")
def short_segments() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(journal, "SEGMENT_ENTRIES", SEGMENT)
        yield


@dataclass
class Seen:
    """What controllers and readers were told, to be compared with the journal at the end."""

    store: Store  # itself, between whose operations all happens
    acknowledged: list[Record] = field(default_factory=list)
    epochs: list[int] = field(default_factory=list)
    states: list[tuple[int, RunState]] = field(default_factory=list)
    read: list[list[Record]] = field(default_factory=list)

    def controller(self, name: str, store: Store) -> None:
        """Take over, append, and finish or be fenced for good, as the daemon does."""
        writer = Journal(store, name)
        try:
            state = writer.take_over(1.0, name, 1, "resume")
        except (Fenced, StoreUnavailable):
            return  # the process ends
        self.states.append((writer.number, state))
        self.epochs.append(writer.epoch)
        try:
            for count in range(APPENDS):
                self._tick(writer, f"{name}.{count}")
        except Fenced:
            assert raw_entries(self.store)[-1].epoch > writer.epoch, "nobody has taken its place"
            self._stays_fenced(writer)

    def _tick(self, writer: Journal, name: str) -> None:
        try:
            settled = writer.settle(2.0)
            if settled is not None:
                self.acknowledged.append(settled)
            events = (GatewayRestarted(name), CommandTaken(name, "x"))
            self.acknowledged.append(writer.append(2.0, events))
            writer.check()
        except StoreUnavailable:
            return  # and again with the next tick

    def _stays_fenced(self, writer: Journal) -> None:
        calls: tuple[Callable[[], object], ...] = (
            lambda: writer.append(3.0, (GatewayRestarted("fenced"),)),
            lambda: writer.settle(3.0),
            writer.check,
        )
        for call in calls:
            try:
                call()
            except Fenced:
                continue
            except StoreUnavailable:
                return
            raise AssertionError("who was replaced is not told so")

    def reader(self, store: Store) -> None:
        while True:
            try:
                found = journal.recover(store)
                self.states.append((found.number, found.state))
                self.read.append(journal.read(store))
            except StoreUnavailable:
                continue


@settings(max_examples=examples(100), deadline=None)
@given(st.data(), st.integers(2, 8))
def test_journal_is_one_line_after_any_interleaving(data: st.DataObject, count: int) -> None:
    store = Store(f"memory://interleaved-{next(names)}", retry_s=0.0)
    seen = Seen(store)
    actors: list[Actor] = []

    def begin(number: int) -> Actor:
        name = f"w{number}"
        return Actor(name, store, lambda scripted: seen.controller(name, scripted))

    try:
        actors.append(Actor("reader", store, seen.reader))
        actors += [begin(number) for number in range(count)]
        for turn in range(data.draw(st.integers(10, TURNS))):
            actor: Actor = data.draw(st.sampled_from(actors))
            arrives: bool = data.draw(st.booleans()) if actor.late else False
            if arrives:
                arrive(actor.late.pop(0))
            elif not actor.over:
                actor.turn(data.draw(st.sampled_from(FATES)))
            elif actor is not actors[0]:
                place = actors.index(actor)
                actors[place] = begin(count + turn)
                actors[place].late += actor.late  # what the dead one sent may still arrive
            if turn % 10 == 0:
                check_now(store)
    finally:
        late = [write for actor in actors for write in actor.late]
        for actor in actors:
            while not actor.over:
                actor.turn(Fate.DIES_BEFORE)
    for write in late:
        arrive(write)
    check_now(store)
    check(raw_entries(store), seen)
    last = Journal(store, "last")
    last.take_over(9.0, "last", 1, "resume")
    assert last.append(9.0, (GatewayRestarted("last"),)).number == last.epoch + 1


def check_now(store: Store) -> None:
    """At any moment recover, read and segments agree with the entries."""
    records = raw_entries(store)
    assert journal.read(store) == records
    found = journal.recover(store)
    assert (found.number, found.state) == (len(records), folded(records))
    for one in store.entries(layout.SEGMENTS):
        last = layout.number_of(one.key)
        assert last is not None
        segment = from_json(store.get(one.key), journal.Segment, one.key)
        assert segment.records == records[last - SEGMENT : last], "a segment disagrees with the entries"
        assert state_from_plain(segment.state, one.key) == folded(records[:last])


def check(records: list[Record], seen: Seen) -> None:
    """In the end everything that anybody was told agrees with the journal."""
    for record in seen.acknowledged:
        assert records[record.number - 1] == record, "an acknowledged entry was lost"
    assert len(seen.epochs) == len(set(seen.epochs))
    steering = 0
    for record in records:
        if any(isinstance(event, ControllerTookOver) for event in record.decoded()):
            steering = record.number
        assert record.epoch == steering, "who had been replaced wrote on"
    for number, state in seen.states:
        assert state == folded(records[:number])
    for read in seen.read:
        assert read == records[: len(read)]


def raw_entries(store: Store) -> list[Record]:
    """All entries, read without the journal's code, in order and without a gap."""
    listed = store.entries(layout.JOURNAL)
    records = [from_json(store.get(one.key), Record, one.key) for one in listed]
    assert [record.number for record in records] == list(range(1, len(records) + 1))
    return records


def folded(records: list[Record]) -> RunState:
    return fold((record.number, record.time_s, record.decoded()) for record in records)
