"""Segments: what they save, and that nothing depends on them."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_orch.checkpoint import journal
from grpo_orch.checkpoint.journal import SEGMENT_ENTRIES, Journal, Record, entries_after
from grpo_orch.checkpoint.store import layout
from grpo_orch.checkpoint.store.backends import BytesLike
from grpo_orch.checkpoint.store.codec import STATE_SCHEMA, from_json, state_from_plain, state_to_plain, to_json
from grpo_orch.checkpoint.store.errors import Corrupt, StoreDenied, StoreUnavailable
from grpo_orch.checkpoint.store.run_store import Entry, Store
from grpo_orch.policies.model.events import CommandTaken, GatewayRestarted
from grpo_orch.policies.model.fold import fold
from grpo_orch.policies.model.state import RunState
from grpo_orch.policies.model.vocabulary import Role
from tests.budget import examples
from tests.stand_ins.world import World, spec

names = itertools.count()
THREE = 3 * SEGMENT_ENTRIES


class Noting(Store):
    """A store in memory that records what is read, and fails writes as told."""

    def __init__(self) -> None:
        super().__init__(f"memory://segments-{next(names)}", retry_s=0.0)
        self.read: list[str] = []
        self.listed: list[tuple[str, str | None]] = []
        self.fails: Callable[[str], Exception | None] = lambda _: None

    def get(self, key: str) -> bytes:
        self.read.append(key)
        return super().get(key)

    def entries(self, prefix: str, *, after: str | None = None) -> list[Entry]:
        self.listed.append((prefix, after))
        return super().entries(prefix, after=after)

    def put(self, key: str, data: BytesLike) -> None:
        error = self.fails(key)
        if error is not None:
            raise error
        super().put(key, data)


def written(store: Store, count: int) -> Journal:
    """A journal of `count` entries, distinct by their gateway and command."""
    writer = Journal(store, "a/1")
    writer.take_over(1.0, "a", 1, "up")
    for number in range(2, count + 1):
        writer.append(float(number), (GatewayRestarted(f"g{number}"), CommandTaken(f"c{number}", "x")))
    return writer


def stored_segments(store: Store) -> list[int | None]:
    return [layout.number_of(one.key) for one in store.entries(layout.SEGMENTS)]


def expected(store: Store, count: int) -> RunState:
    """The fold of the entries themselves."""
    records = [
        from_json(store.get(layout.journal_entry(number)), Record, "entry") for number in range(1, count + 1)
    ]
    return fold((record.number, record.time_s, record.decoded()) for record in records)


@pytest.mark.parametrize("count", [1, SEGMENT_ENTRIES - 1, SEGMENT_ENTRIES, SEGMENT_ENTRIES + 1, THREE + 5])
def test_a_long_run_is_recovered_by_reading_little(count: int) -> None:
    store = Noting()
    written(store, count)
    state = expected(store, count)
    store.read, store.listed = [], []
    found = journal.recover(store)
    assert (found.number, found.state) == (count, state)
    whole, rest = divmod(count, SEGMENT_ENTRIES)
    assert len(store.read) == rest + (whole > 0)
    last = whole * SEGMENT_ENTRIES
    assert store.listed[1] == (layout.JOURNAL, layout.journal_entry(last) if whole else None)


@pytest.mark.parametrize("after", [0, 1, SEGMENT_ENTRIES - 1, SEGMENT_ENTRIES, SEGMENT_ENTRIES + 1, THREE + 2])
def test_history_is_read_through_segments_from_anywhere(after: int) -> None:
    store = Noting()
    written(store, THREE + 4)
    store.read = []
    assert [record.number for record in journal.read(store, after)] == list(range(after + 1, THREE + 5))
    assert len(store.read) <= 3 + 4


@pytest.mark.parametrize(
    ("error", "by_next"), [(StoreUnavailable("away"), False), (StoreDenied("not there"), True)]
)
def test_failed_segment_costs_nothing_and_is_stored_later(error: Exception, by_next: bool) -> None:
    store = Noting()
    store.fails = lambda key: error if key.startswith(layout.SEGMENTS) else None
    writer = written(store, SEGMENT_ENTRIES + 2)
    assert stored_segments(store) == []
    assert journal.recover(store).state == expected(store, SEGMENT_ENTRIES + 2)
    store.fails = lambda _: None
    if by_next:
        Journal(store, "b").take_over(9.0, "b", 2, "resume")
    else:
        writer.append(9.0, (GatewayRestarted("g"),))
    assert stored_segments(store) == [SEGMENT_ENTRIES]


def _changed(**fields: Any) -> Callable[[bytes], bytes]:
    return lambda data: json.dumps({**json.loads(data), **fields}).encode()


def _one_short(data: bytes) -> bytes:
    document = json.loads(data)
    return json.dumps({**document, "records": document["records"][1:]}).encode()


DAMAGES = {
    "cut": lambda data: data[: len(data) // 2],
    "empty": lambda _: b"",
    "not text": lambda _: b"\xff\xfe",
    "one record short": _one_short,
    "newer schema": _changed(schema=2),
    "another state's schema": _changed(state_schema=STATE_SCHEMA + 1, state={"phase": "flying"}),
    "another state's schema, alike": _changed(state_schema=STATE_SCHEMA + 1, state={"name": "wrong"}),
    "unreadable state": _changed(state={"phase": "flying"}),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize(
    "which", [[3], *(pytest.param(which, marks=pytest.mark.slow) for which in ([1, 2], [1, 2, 3]))]
)
def test_an_unusable_segment_is_passed_over(damage: str, which: list[int]) -> None:
    store = Noting()
    written(store, THREE + 1)
    state, records = expected(store, THREE + 1), journal.read(store)
    for place in which:
        key = layout.segment(place * SEGMENT_ENTRIES)
        store.put(key, DAMAGES[damage](store.get(key)))
    assert journal.recover(store).state == state
    assert journal.read(store) == records
    assert Journal(store, "b").take_over(9.0, "b", 2, "resume") == expected(store, THREE + 2)


@pytest.mark.parametrize(
    ("number", "says"),
    [
        *((number, f"journal entry {number} is missing") for number in (1, 2, 4)),
        (3, r"journal/000000000003.json: holds entry 4"),
        (999_999_999_999, "journal entry 6 is missing"),
    ],
)
def test_a_gap_a_wrong_and_a_stray_number_are_named_in_one_line(number: int, says: str) -> None:
    store = Noting()
    written(store, 5)
    if number in (1, 2, 4):
        store.delete([layout.journal_entry(number)])
    else:
        store.put(layout.journal_entry(number), store.get(layout.journal_entry(4)))
    for look in (journal.read, journal.recover):
        with pytest.raises(Corrupt, match=says) as caught:
            look(store)
        assert "\n" not in str(caught.value)


def test_foreign_objects_are_passed_over() -> None:
    store = Noting()
    written(store, 5)
    for name in ("README", "000000000003.json.bak", "0000000000003.json", "old/000000000009.json"):
        store.put(f"{layout.JOURNAL}/{name}", b"not ours")
    for name in ("README", "000000000007.json", "000000000000.json"):
        store.put(f"{layout.SEGMENTS}/{name}", b"not ours")
    assert [record.number for record in journal.read(store)] == [1, 2, 3, 4, 5]
    assert journal.recover(store).number == 5


def test_a_listing_that_shows_the_later_of_two_is_no_gap() -> None:
    """Files are listed one by one: one made meanwhile may be shown or not."""

    class Skipping(Noting):
        def entries(self, prefix: str, *, after: str | None = None) -> list[Entry]:
            return [one for one in super().entries(prefix, after=after) if layout.number_of(one.key) != 4]

    store = Skipping()
    written(store, 5)
    assert [record.number for record in entries_after(store, 2)] == [3, 4, 5]


@settings(max_examples=examples(60), deadline=None)
@given(st.data())
def test_any_state_survives_being_stored(data: st.DataObject) -> None:
    world = World(spec(max_replicas=3), max_steps=10**6)
    for _ in range(data.draw(st.integers(0, 60))):
        match data.draw(st.sampled_from(["lose", "exit", "refuse", "take over", "command", "on", "on", "on"])):
            case "lose" if world.machines:
                world.lose(data.draw(st.sampled_from(sorted(world.machines))))
            case "exit" if world.machines:
                world.exit(data.draw(st.sampled_from(sorted(world.machines))), data.draw(st.integers(-9, 2)))
            case "refuse":
                world.refusing = not world.refusing
            case "take over":
                world.take_over()
            case "command":
                world.journal((CommandTaken(data.draw(st.text(st.characters(exclude_categories=["Cs"]))), "x"),))
            case _:
                world.advance(data.draw(st.sampled_from([0.5, 7.3])))
        world.tick()
        check_survives(world.state)


def check_survives(state: RunState) -> None:
    data = to_json(state_to_plain(state))
    back = state_from_plain(from_json(data, dict, "state"), "state")
    assert back == state
    assert list(back.nodes) == list(state.nodes), "actions come in this order"
    assert list(back.slots) == list(state.slots)
    assert to_json(state_to_plain(back)) == data
    for field in ("nodes", "slots", "kinds", "commands_taken", "reports"):
        assert type(getattr(back, field)) is type(getattr(state, field))
    assert all(type(node.role) is Role for node in back.nodes.values())


def test_changed_state_raises_its_schema() -> None:
    """Else a version to which it means something else would continue a stored state."""
    schema = msgspec.json.schema(RunState)

    def stored(part: Any) -> Any:
        """The part without the names and descriptions of its classes, which are not stored."""
        match part:
            case {"$ref": name}:
                return stored(schema["$defs"][name.rpartition("/")[2]])
            case dict():
                return {key: stored(value) for key, value in part.items() if key not in ("title", "description")}
            case list():
                return [stored(one) for one in part]
        return part

    shape = hashlib.sha256(json.dumps(stored({"$ref": schema["$ref"]}), sort_keys=True).encode()).hexdigest()[:16]
    assert (STATE_SCHEMA, shape) == (36, "c256ec9f37f9d7e0"), (
        "raise codec.STATE_SCHEMA, then note the new pair here"
    )
