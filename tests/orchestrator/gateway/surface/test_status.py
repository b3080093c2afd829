"""The gateway's status on its way to a store that is quick, slow or away."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from checkpoint.store import codec, layout
from checkpoint.store.backends import BytesLike
from checkpoint.store.errors import StoreUnavailable
from checkpoint.store.run_store import Store
from orchestrator.gateway.surface.status_writer import StatusWriter
from policies.serving.gateway_status import GatewayStatus, MemberStatus
from policies.serving.wire import STATUS_S
from tests.budget import HANG_S, until
from tests.rigs.gateway_process import Rig

BY = (0, 1, 1)
names = itertools.count()


class WatchedStore(Store):
    """Keeps what is written, and can refuse or hold a write."""

    def __init__(self) -> None:
        super().__init__(f"memory://status-{next(names)}", retry_s=0.0)
        self.written: list[GatewayStatus] = []
        self.refused = 0
        self.away = False
        self.free = threading.Event()
        self.free.set()
        self.held = threading.Event()

    def put(self, key: str, data: BytesLike) -> None:
        assert key == layout.members(BY)
        if self.away:
            self.refused += 1
            raise StoreUnavailable("away")
        if not self.free.is_set():
            self.held.set()
            assert self.free.wait(HANG_S), "the event loop stood still for as long as the store did"
        self.written.append(codec.from_json(bytes(data), GatewayStatus, key))


class World:
    """A gateway that is only its status, and the writer at work on it."""

    def __init__(self) -> None:
        self.store = WatchedStore()
        self.status = GatewayStatus("boot", None)
        self.now_s = 0.0
        self.looks = 0

    def look(self) -> GatewayStatus:
        self.looks += 1
        return self.status

    def members(self, *nodes: str) -> None:
        found = [MemberStatus(node, "boot", "127.0.0.1:1", None, False, False, 0, 0.1) for node in nodes]
        self.status = replace(self.status, members=found)

    async def until_looks(self, more: int) -> None:
        wanted = self.looks + more
        await self.until(lambda: self.looks >= wanted)

    async def until_written(self, count: int) -> None:
        await self.until(lambda: len(self.store.written) == count)

    async def until_told(self, *nodes: str) -> None:
        await self.until(lambda: self.nodes()[-1] == list(nodes))

    async def until(self, wanted: Callable[[], bool]) -> None:
        async with asyncio.timeout(HANG_S):
            while not wanted():
                await asyncio.sleep(0.01)

    def nodes(self) -> list[list[str]]:
        return [[one.node for one in status.members] for status in self.store.written]


def run(story: Callable[[World], Coroutine[Any, Any, None]]) -> World:
    """Run the writer beside the story."""
    world = World()

    async def both() -> None:
        writing = asyncio.ensure_future(StatusWriter(world.store, BY, world.look, clock=lambda: world.now_s).run())
        await story(world)
        assert not writing.done()
        writing.cancel()
        with suppress(asyncio.CancelledError):
            await writing

    asyncio.run(both())
    return world


def test_a_change_of_the_membership_is_written_at_once_and_counts_with_the_next_beat() -> None:
    """No beat is due for as long as the clock stands."""

    async def story(world: World) -> None:
        await world.until(lambda: len(world.store.written) == 1)
        for nodes in (("a",), ("a", "b"), ("b",)):
            world.members(*nodes)
            await world.until_told(*nodes)
        world.status = replace(world.status, policy="0-1")
        await world.until(lambda: world.store.written[-1].policy == "0-1")
        world.status = replace(world.status, tokens_delivered=7)
        await world.until_looks(3)
        assert len(world.store.written) == 5
        world.now_s += STATUS_S
        await world.until(lambda: len(world.store.written) == 6)

    world = run(story)
    assert world.nodes() == [[], ["a"], ["a", "b"], ["b"], ["b"], ["b"]]
    assert [status.seq for status in world.store.written] == [1, 2, 3, 4, 5, 6]
    assert [status.tokens_delivered for status in world.store.written] == [0, 0, 0, 0, 0, 7]


def test_a_gateway_where_nothing_happens_goes_on_writing() -> None:
    async def story(world: World) -> None:
        for beat in range(1, 4):
            await world.until_written(beat)
            await world.until_looks(2)
            assert len(world.store.written) == beat
            world.now_s += STATUS_S

    run(story)


def test_a_slow_store_is_not_waited_for_and_gets_the_newest_next() -> None:
    async def story(world: World) -> None:
        await world.until(lambda: len(world.store.written) == 1)
        world.store.free.clear()
        world.members("a")
        await world.until(world.store.held.is_set)
        world.members("a", "b")
        world.members("a", "b", "c")
        world.store.free.set()
        await world.until(lambda: world.nodes()[-1] == ["a", "b", "c"])

    assert run(story).nodes() == [[], ["a"], ["a", "b", "c"]]


def test_a_store_that_is_away_is_tried_again_and_gets_the_newest() -> None:
    async def story(world: World) -> None:
        await world.until(lambda: len(world.store.written) == 1)
        world.store.away = True
        world.members("a")
        await world.until(lambda: world.store.refused == 1)
        world.members("b")
        await world.until(lambda: world.store.refused == 2)
        world.store.away = False
        await world.until(lambda: len(world.store.written) == 2)

    world = run(story)
    assert world.nodes() == [[], ["b"]]
    assert world.store.written[-1].seq > world.store.written[0].seq


def test_the_gateway_of_a_replaced_machine_does_not_come_back_as_the_runs(tmp_path: Path) -> None:
    """Its supervisor starts it again after a crash, beside a trainer that does not know yet."""
    rig = Rig(tmp_path)
    try:
        for node in ("trainer-0-i1", "trainer-0-i2"):
            rig.env.update(GRPO_ORCH_NODE=node, GRPO_ORCH_ATTEMPT="1")
            rig.gateway()
        newest = rig.status()
        rig.env.update(GRPO_ORCH_NODE="trainer-0-i1")
        old = layout.gateway((0, 1, 1))
        before = rig.store.get(old)
        rig.spawn("-m", "orchestrator.gateway")
        until("the old machine's gateway", lambda: rig.store.get(old) != before)
        assert rig.status().boot_id == newest.boot_id
    finally:
        rig.stop()
