"""The views' Reader: it reads little of a run however long that is, and misses no change."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from grpo_orch.checkpoint.journal import SEGMENT_ENTRIES
from grpo_orch.checkpoint.store.run_store import Entry, Store
from grpo_orch.orchestrator.views.reader import EVENTS_KEPT, Reader
from grpo_orch.policies.model.events import GatewayRestarted
from grpo_orch.policies.model.vocabulary import NodePhase
from tests.generators.views_world import FIRST_FORK, T0, World, diverging, next_view, run_view


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
def test_late_view_of_a_long_run_equals_one_from_its_start(entries: int) -> None:
    watched = World()
    reader = Reader(watched.store, whole=True)
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
    assert fresh.events[-EVENTS_KEPT:] == reader.events[-EVENTS_KEPT:]
    assert len(reader.history) == entries + 11
    whole = Reader(watched.store, whole=True)
    whole.refresh()
    assert (whole.history, whole.events) == (reader.history, reader.events)


def test_status_of_long_run_reads_little_and_then_only_news(monkeypatch: pytest.MonkeyPatch) -> None:
    world = long_run(4 * SEGMENT_ENTRIES, every_s=15.0)
    reader = Reader(world.store)
    assert entries_read(world, monkeypatch, reader) <= 2 + 11
    assert entries_read(world, monkeypatch, reader) == 0
    world.happens(30_000, GatewayRestarted("one more"))
    assert entries_read(world, monkeypatch, reader) == 1
    assert reader.state.gateway_boot_id == "one more"


def test_node_leaving_in_the_first_read_entry_is_shown() -> None:
    """Its request lies before what a new Reader begins with."""
    world = long_run(SEGMENT_ENTRIES - 11)  # to the end of a segment
    world.moves(30, "rollout-1-i1", NodePhase.GONE, "preempted")
    for number in range(SEGMENT_ENTRIES):
        world.happens(40, GatewayRestarted(f"h{number}"))
    shown = {node.slot: (node.phase, node.reason) for node in next_view(Reader(world.store), T0 + 50).nodes}
    assert shown["rollout-1"] == (NodePhase.GONE, "preempted")


class CountingStore(Store):
    """Remembers which objects were fetched."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.fetched: list[str] = []

    def get(self, key: str) -> bytes:
        self.fetched.append(key)
        return super().get(key)


class CoarseStore(Store):
    """Its clock stands still, as a clock of whole seconds does for most of one."""

    def entries(self, prefix: str, *, after: str | None = None) -> list[Entry]:
        now = datetime(2026, 1, 1, tzinfo=UTC)
        return [replace(entry, modified_at=now) for entry in super().entries(prefix, after=after)]


def test_a_fork_changes_the_line_though_nothing_new_was_logged() -> None:
    world = diverging()
    reader = Reader(world.store)
    assert len(next_view(reader, T0 + 44).recent) == 10
    world.rolls_back(45, FIRST_FORK, 10)
    assert [point.step for point in next_view(reader, T0 + 50).recent] == [1, 2, 3, 4, 5]
    assert [row.step for row in reader.abandoned] == [6, 7, 8, 9, 10]


def test_second_look_fetches_only_possible_changes(tmp_path: Path) -> None:
    world = World()
    world.starts()
    for step in range(1, 251):
        world.logs(20.0 + step, step, reward=float(step))
    world.saves(35, 50, tmp_path)
    world.beats(271, 250)
    store = CountingStore(world.store.url)
    reader = Reader(store)
    first = next_view(reader, T0 + 300)
    store.fetched.clear()
    second = next_view(reader, T0 + 300)
    assert second == first
    assert [point.step for point in second.recent] == list(range(131, 251))
    documents = {"controller.json", "lease.json", "plan.json", "trainer.json"}
    assert set(store.fetched) - documents <= {"metrics/0000/00000002.jsonl"}

    world.logs(280, 251, reward=-1.0)
    world.moves(281, "rollout-0-i1", NodePhase.GONE)
    world.saves(282, 100, tmp_path)
    third = next_view(reader, T0 + 300)
    assert third.reward == -1.0
    assert third.nodes[1].phase is NodePhase.GONE
    assert third.checkpoint is not None
    assert third.checkpoint.version == "0-100"
    assert third == run_view(world.store, T0 + 300, None)


def test_a_step_made_again_in_an_older_object_is_seen() -> None:
    world = World()
    for step in range(98, 103):
        world.logs(step, step, reward=float(step))
    reader = Reader(world.store)
    assert next_view(reader, T0 + 200).reward == 102.0
    world.logs(150, 98, reward=-98.0)
    view = next_view(reader, T0 + 200)
    assert (view.reward, len(view.recent)) == (-98.0, 1)


def test_rows_of_two_objects_between_two_looks_are_seen() -> None:
    world = World()
    world.logs(98, 98, reward=98.0)
    reader = Reader(world.store)
    next_view(reader, T0 + 200)
    for step in range(99, 102):
        world.logs(step, step, reward=float(step))
    assert [point.step for point in next_view(reader, T0 + 200).recent] == [98, 99, 100, 101]


def test_a_row_of_the_same_size_in_the_same_second_is_seen() -> None:
    world = World()
    world.logs(20, 1, reward=1.5)
    reader = Reader(CoarseStore(world.store.url))
    assert next_view(reader, T0 + 30).reward == 1.5
    world.logs(20, 1, reward=2.5)
    assert next_view(reader, T0 + 30).reward == 2.5
