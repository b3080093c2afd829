"""The gateway's status on its way to a store that is quick, slow or away."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from grpo_orch.checkpoint.store import codec, layout
from grpo_orch.checkpoint.store.backends import BytesLike
from grpo_orch.checkpoint.store.errors import StoreUnavailable
from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.orchestrator.gateway.surface.status_writer import StatusWriter
from grpo_orch.policies.serving.gateway_status import GatewayStatus, MemberStatus
from grpo_orch.policies.serving.wire import STATUS_S
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


class Writing:
    """A gateway that is only its status, and the writer at work on it, by a clock that the test sets."""

    def __init__(self) -> None:
        self.store = WatchedStore()
        self.status = GatewayStatus("boot", None)
        self.now_s = 0.0
        self.looks = 0

    async def __aenter__(self) -> Writing:
        self._writer = asyncio.ensure_future(
            StatusWriter(self.store, BY, self._look, clock=lambda: self.now_s).run()
        )
        await self.until_written(1)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert not self._writer.done()
        self._writer.cancel()
        with suppress(asyncio.CancelledError):
            await self._writer

    def members(self, *nodes: str) -> None:
        found = [MemberStatus(node, "boot", "127.0.0.1:1", None, False, False, 0, 0.1) for node in nodes]
        self.status = replace(self.status, members=found)

    def nodes(self) -> list[list[str]]:
        return [[member.node for member in status.members] for status in self.store.written]

    async def until_written(self, count: int) -> None:
        await self.until(lambda: len(self.store.written) == count)
        looks = self.looks
        await self.until(lambda: self.looks >= looks + 3)
        assert len(self.store.written) == count

    async def until(self, wanted: Callable[[], bool]) -> None:
        async with asyncio.timeout(HANG_S):
            while not wanted():
                await asyncio.sleep(0.01)

    def _look(self) -> GatewayStatus:
        self.looks += 1
        return self.status


@pytest.fixture
def writing() -> Writing:
    return Writing()


async def test_membership_is_written_immediately_and_counts_with_the_beat(writing: Writing) -> None:
    written = writing.store.written
    for count, nodes in enumerate((("a",), ("a", "b"), ("b",)), 2):
        writing.members(*nodes)
        await writing.until_written(count)
    writing.status = replace(writing.status, policy="0-1")
    await writing.until_written(5)
    writing.status = replace(writing.status, tokens_delivered=7)
    await writing.until_written(5)
    for beat in range(6, 8):  # the second without any change
        writing.now_s += STATUS_S
        await writing.until_written(beat)
    assert writing.nodes() == [[], ["a"], ["a", "b"], *[["b"]] * 4]
    assert [status.seq for status in written] == list(range(1, 8))
    assert [status.tokens_delivered for status in written] == [0, 0, 0, 0, 0, 7, 7]


@pytest.mark.parametrize("trouble", ["slow", "away"])
async def test_store_in_trouble_delays_nothing_and_gets_the_newest(writing: Writing, trouble: str) -> None:
    store = writing.store
    if trouble == "slow":
        store.free.clear()
    else:
        store.away = True
    writing.members("a")
    await writing.until(lambda: store.held.is_set() or store.refused == 1)
    writing.members("a", "b")
    writing.members("a", "b", "c")
    await writing.until(lambda: trouble == "slow" or store.refused == 2)
    store.free.set()
    store.away = False
    await writing.until(lambda: writing.nodes()[-1] == ["a", "b", "c"])
    assert writing.nodes() == [[], *([["a"]] if trouble == "slow" else []), ["a", "b", "c"]]
    assert store.written[-1].seq > store.written[0].seq


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
        rig.spawn("-m", "grpo_orch.orchestrator.gateway")
        until("the old machine's gateway", lambda: rig.store.get(old) != before)
        assert rig.status().boot_id == newest.boot_id
    finally:
        rig.stop()
