"""What the gateway keeps of its members' time: every minute, however the store is."""

from __future__ import annotations

import asyncio
import itertools
from contextlib import suppress

import pytest

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
    """Counts the writes, and can refuse them."""

    def __init__(self) -> None:
        super().__init__(f"memory://activity-writer-{next(names)}", retry_s=0.0)
        self.writes: list[str] = []
        self.away = False

    def put(self, key: str, data: BytesLike) -> None:
        self.writes.append(key)
        if self.away:
            raise StoreUnavailable("away")
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
        self.writer = ActivityWriter(
            self.store, "b00t", lambda: self.members, lambda: self.now_s, lambda: T0 + self.now_s
        )

    def has(self, **running: int | None) -> None:
        """Members by what runs there; None: it loads."""
        self.members = [
            MemberStatus(f"{name}-i1", "b", "a", "0-1", count is not None, False, count or 0, 0.1)
            for name, count in running.items()
        ]

    async def passes(self, seconds: int) -> None:
        """A look a second, and what is due by then is written."""
        for _ in range(seconds):
            self.now_s += 1.0
            self.writer.see()
            await self.writer.write()


def test_a_minute_is_written_once_it_is_over_and_in_one_request() -> None:
    async def story() -> None:
        world = World()
        world.has(a=None, b=0)
        await world.passes(59)
        assert world.store.writes == []
        world.has(a=3, b=0)
        await world.passes(60)
        hour = int(T0 // 3600)
        assert world.store.part(MINUTE_S, hour).machines == {
            "a-i1": bytes([0xFF] * 20 + [0xF0]),
            "b-i1": bytes([0xFF] * 20 + [0x0F]),
        }
        await world.passes(3600)
        minutes = [key for key in world.store.writes if key.startswith(layout.activities(MINUTE_S))]
        assert len(minutes) == 61
        assert len(set(minutes)) == 2  # the hour of then, and the next
        hours = [key for key in world.store.writes if key.startswith(layout.activities(HOUR_S))]
        assert len(hours) == 6  # every ten minutes
        day = world.store.part(HOUR_S, int(T0 // 86400))
        assert day.machines["b-i1"][-2:] == bytes([0x0F, 0x0F])
        assert len(world.store.part(MINUTE_S, hour).machines["b-i1"]) == 60

    asyncio.run(story())


def test_a_store_that_is_away_gets_all_of_it_later() -> None:
    async def story() -> None:
        world = World()
        world.has(a=0)
        world.store.away = True
        await world.passes(3000)  # into the next hour
        world.store.away = False
        await world.passes(60)
        before, after = (world.store.part(MINUTE_S, int(T0 // 3600) + one).machines["a-i1"] for one in (0, 1))
        assert before == bytes([0xFF] * 20 + [0x0F] * 40)
        assert set(after) == {0x0F}

    asyncio.run(story())


def test_of_a_gap_nothing_is_known() -> None:
    async def story() -> None:
        world = World()
        world.has(a=0)
        await world.passes(60)
        world.now_s += 180  # its machine slept
        await world.passes(60)
        assert world.store.part(MINUTE_S, int(T0 // 3600)).machines["a-i1"][20:] == bytes(
            [0x0F, 0x0F, 0xFF, 0xFF, 0x0F]
        )

    asyncio.run(story())


def test_it_looks_and_writes_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activity_writer, "LOOK_S", 0.001)

    async def story() -> None:
        world = World()
        world.has(a=0)

        def looked() -> list[MemberStatus]:
            world.now_s += 1.0  # a second between two looks
            return world.members

        world.writer = ActivityWriter(world.store, "b00t", looked, lambda: world.now_s, lambda: T0 + world.now_s)
        running = asyncio.ensure_future(world.writer.run())
        async with asyncio.timeout(HANG_S):
            while len(world.store.writes) < 3:
                assert not running.done()
                await asyncio.sleep(0.001)
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running
        assert world.store.part(MINUTE_S, int(T0 // 3600)).machines["a-i1"][20] == 0x0F

    asyncio.run(story())
