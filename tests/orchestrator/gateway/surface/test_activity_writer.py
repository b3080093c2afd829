"""What the gateway keeps of its members' time: every minute, however the store is."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable

import pytest
from structlog.testing import capture_logs

from checkpoint.records.activity import HOUR_S, MINUTE_S, Part, read_part
from checkpoint.store import layout
from checkpoint.store.backends import BytesLike
from checkpoint.store.errors import StoreUnavailable
from checkpoint.store.run_store import Store
from orchestrator.gateway.surface import activity_writer
from orchestrator.gateway.surface.activity_writer import ActivityWriter
from policies.serving.gateway_status import MemberStatus
from tests.budget import HANG_S

T0 = 1_700_000_400.0  # 20 minutes into an hour
names = itertools.count()


class WatchedStore(Store):
    """Counts the writes, and can refuse them, break, or hang."""

    def __init__(self) -> None:
        super().__init__(f"memory://activity-writer-{next(names)}", retry_s=0.0)
        self.writes: list[str] = []
        self.away = self.breaks = False
        self.back, self.waited_out = threading.Event(), threading.Event()
        self.back.set()

    def put(self, key: str, data: BytesLike) -> None:
        self.writes.append(key)
        if self.away:
            raise StoreUnavailable("away")
        if self.breaks:
            raise ValueError("nobody has thought of it")
        if not self.back.wait(HANG_S):
            self.waited_out.set()
        super().put(key, data)

    def part(self, slot_s: int, group: int) -> Part:
        found = read_part(self, layout.activity(slot_s, group, "b00t"))
        assert found is not None
        return found


class World:
    """Members, and a writer that looks when it is told to."""

    def __init__(self) -> None:
        self.store = WatchedStore()
        self.members: list[MemberStatus] = []
        self.now_s = 0.0
        self.blind = False  # a look raises
        self.writer = ActivityWriter(
            self.store, "b00t", lambda: self.members, lambda: self.now_s, lambda: T0 + self.now_s
        )

    def has(self, **running: int | None) -> None:
        """Members by what runs there; None: it loads."""
        self.members = [
            MemberStatus(f"{name}-i1", "b", "a", "0-1", count is not None, False, count or 0, 0.1)
            for name, count in running.items()
        ]

    def passes(self, seconds: int) -> None:
        """A look a second, and what is due by then is written."""
        for _ in range(seconds):
            self.now_s += 1.0
            self.writer.see()
            self.writer.write()


def test_a_minute_is_written_once_it_is_over_and_in_one_request() -> None:
    world = World()
    world.has(a=None, b=0)
    world.passes(59)
    assert world.store.writes == []
    world.has(a=3, b=0)
    world.passes(60)
    hour = int(T0 // 3600)
    assert world.store.part(MINUTE_S, hour).machines == {
        "a-i1": bytes([0xFF] * 20 + [0xF0]),
        "b-i1": bytes([0xFF] * 20 + [0x0F]),
    }
    world.passes(3600)
    minutes = [key for key in world.store.writes if key.startswith(layout.activities(MINUTE_S))]
    assert len(minutes) == 61
    assert len(set(minutes)) == 2  # the hour of then, and the next
    hours = [key for key in world.store.writes if key.startswith(layout.activities(HOUR_S))]
    assert len(hours) == 6  # every ten minutes
    day = world.store.part(HOUR_S, int(T0 // 86400))
    assert day.machines["b-i1"][-2:] == bytes([0x0F, 0x0F])
    assert len(world.store.part(MINUTE_S, hour).machines["b-i1"]) == 60


def test_a_store_that_is_away_gets_all_of_it_later() -> None:
    world = World()
    world.has(a=0)
    world.store.away = True
    world.passes(3000)  # into the next hour
    world.store.away = False
    world.passes(60)
    before, after = (world.store.part(MINUTE_S, int(T0 // 3600) + one).machines["a-i1"] for one in (0, 1))
    assert before == bytes([0xFF] * 20 + [0x0F] * 40)
    assert set(after) == {0x0F}


def test_of_a_gap_nothing_is_known() -> None:
    world = World()
    world.has(a=0)
    world.passes(60)
    world.now_s += 180  # its machine slept
    world.passes(60)
    assert world.store.part(MINUTE_S, int(T0 // 3600)).machines["a-i1"][20:] == bytes(
        [0x0F, 0x0F, 0xFF, 0xFF, 0x0F]
    )


def run_it(monkeypatch: pytest.MonkeyPatch, world: World, come_true: Callable[[], bool]) -> None:
    """Let the writer look by itself, a second between two looks, until that is true."""
    monkeypatch.setattr(activity_writer, "LOOK_S", 0.001)

    def looked() -> list[MemberStatus]:
        world.now_s += 1.0
        if world.blind:
            raise RuntimeError("no look")
        return world.members

    async def story() -> None:
        writer = ActivityWriter(world.store, "b00t", looked, lambda: world.now_s, lambda: T0 + world.now_s)
        running = asyncio.create_task(writer.run())
        async with asyncio.timeout(HANG_S):
            while not come_true():
                assert not running.done()
                await asyncio.sleep(0.001)
        running.cancel()

    asyncio.run(story())


def test_it_looks_and_writes_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    world.has(a=0)
    run_it(monkeypatch, world, lambda: len(world.store.writes) > 3)
    assert world.store.part(MINUTE_S, int(T0 // 3600)).machines["a-i1"][20] == 0x0F


def test_no_error_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """What nobody has thought of, in a look and in a write, costs what it hits."""
    world = World()
    world.has(a=0)
    world.store.breaks = world.blind = True

    def heals() -> bool:
        world.blind = world.now_s < 90
        world.store.breaks = len(world.store.writes) < 3
        return len(world.store.writes) > 5

    with capture_logs() as logged:
        run_it(monkeypatch, world, heals)
    assert [one["event"] for one in logged] == ["activity_not_seen"]
    assert world.store.part(MINUTE_S, int(T0 // 3600)).machines["a-i1"][-1] == 0x0F


def test_a_write_that_hangs_holds_neither_looks_nor_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    world.has(a=0)
    world.store.back.clear()
    run_it(monkeypatch, world, lambda: world.now_s > 600)
    assert len(world.store.writes) == 1
    assert not world.store.waited_out.is_set()
    world.store.back.set()
