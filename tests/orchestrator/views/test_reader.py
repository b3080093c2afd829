"""The views' Reader on runs longer than what it reads of them."""

from __future__ import annotations

import pytest

from checkpoint.journal.segments import SEGMENT_ENTRIES
from orchestrator.views.reader import EVENTS_KEPT, Reader
from orchestrator.views.run_view import view_of
from policies.model.events import GatewayRestarted
from policies.model.vocabulary import NodePhase
from tests.generators.views_world import T0, World


def long_run(entries: int, every_s: float = 0.0) -> World:
    world = World()
    world.starts()
    for number in range(entries):
        world.happens(20 + every_s * number, GatewayRestarted(f"g{number}"))
    return world


def entries_read(world: World, monkeypatch: pytest.MonkeyPatch, reader: Reader) -> int:
    """How many objects of the journal a refresh fetches."""
    read: list[str] = []
    get = world.store.get

    def noting(key: str) -> bytes:
        read.append(key)
        return get(key)

    monkeypatch.setattr(world.store, "get", noting)
    reader.refresh()
    monkeypatch.undo()
    return len([key for key in read if key.startswith(("journal/", "segments/"))])


@pytest.mark.parametrize("entries", [0, 10, SEGMENT_ENTRIES - 11, SEGMENT_ENTRIES, 2 * SEGMENT_ENTRIES + 3])
def test_a_long_run_looks_like_one_that_was_watched_from_its_beginning(entries: int) -> None:
    watched = World()
    reader = Reader(watched.store)
    watched.starts()
    reader.refresh()
    for number in range(entries):
        watched.happens(20, GatewayRestarted(f"g{number}"))
        if number % 50 == 0:
            reader.refresh()
    reader.refresh()
    fresh = Reader(watched.store)
    fresh.refresh()
    assert fresh.state == reader.state
    assert fresh.newest_node == reader.newest_node
    kept = min(EVENTS_KEPT, len(reader.events))
    assert list(fresh.events)[-kept:] == list(reader.events)[-kept:]
    assert len(fresh.history()) == entries + 11


def test_status_of_a_long_run_reads_little_and_then_only_what_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    world = long_run(4 * SEGMENT_ENTRIES, every_s=15.0)
    reader = Reader(world.store)
    assert entries_read(world, monkeypatch, reader) <= 2 + 11
    assert entries_read(world, monkeypatch, reader) == 0
    world.happens(30_000, GatewayRestarted("one more"))
    assert entries_read(world, monkeypatch, reader) == 1
    assert reader.state.gateway_boot_id == "one more"


def test_a_node_that_leaves_as_the_first_thing_that_is_read_is_still_shown() -> None:
    """Its request lies before what a new Reader begins with."""
    world = long_run(SEGMENT_ENTRIES - 11)  # to the end of a segment
    world.moves(30, "rollout-1-i1", NodePhase.GONE, "preempted")
    for number in range(SEGMENT_ENTRIES):
        world.happens(40, GatewayRestarted(f"h{number}"))
    shown = {node.slot: (node.phase, node.reason) for node in view_of(Reader(world.store), T0 + 50, None).nodes}
    assert shown["rollout-1"] == (NodePhase.GONE, "preempted")


def test_a_slot_that_has_been_empty_for_long_is_still_shown() -> None:
    world = long_run(1)
    world.moves(30, "rollout-1-i1", NodePhase.GONE, "preempted")
    for number in range(3 * SEGMENT_ENTRIES):
        world.happens(40, GatewayRestarted(f"h{number}"))
    shown = {node.slot: (node.phase, node.reason) for node in view_of(Reader(world.store), T0 + 50, None).nodes}
    assert shown["rollout-1"] == (NodePhase.GONE, "preempted")


def test_a_busy_run_is_read_as_far_back_as_a_lane_is_long() -> None:
    world = long_run(3 * SEGMENT_ENTRIES)  # in a moment
    world.moves(30, "rollout-1-i1", NodePhase.BOOTING, "its work ended")
    for number in range(SEGMENT_ENTRIES):
        world.happens(40, GatewayRestarted(f"h{number}"))
    lanes = {node.slot: node.lane for node in view_of(Reader(world.store), T0 + 50, None).nodes}
    assert [(one.since_s - T0, one.state) for one in lanes["rollout-1"]] == [
        (1, "requested"),
        (4, "booting"),
        (10, "serving"),
        (30, "booting"),
    ]
