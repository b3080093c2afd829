"""Nodes, gateway and trainer lost with requests in flight: nothing fails, and the tokens are the same."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import msgspec
import pytest

from grpo_orch.policies.model.node_contract import ATTEMPT_ENV, NODE_ENV, TIMELINE_ENV, WORKDIR_ENV
from grpo_orch.policies.serving.wire import (
    Announce,
    Batch,
    BatchLine,
    PolicyRef,
    Progress,
)
from tests.budget import HANG_S, until
from tests.rigs.gateway_process import Rig, check_complete, hear, kill, make_batch
from tests.rigs.gateway_world import Node, World
from tests.stand_ins.fake_vllm import FOREVER


async def until_progress(
    lines: AsyncIterator[BatchLine], wanted: Callable[[Progress], bool] = lambda progress: progress.tokens > 0
) -> list[BatchLine]:
    """Read on until there is such progress; return what was read."""
    read = []
    async for line in lines:
        read.append(line)
        if line.progress is not None and wanted(line.progress):
            return read
    raise AssertionError(f"the batch ended before: {read[-1]}")


async def test_batch_waits_for_successors_after_all_nodes_are_killed(world: World) -> None:
    victims = [await world.node(name, stalls=1) for name in ("a", "b")]
    batch = make_batch("0-0")
    lines = world.lines(batch)
    read = await until_progress(lines)
    for victim in victims:
        victim.lose()
    read += await until_progress(lines, lambda progress: (progress.waiting, progress.members) == (32, 0))
    for name in ("c", "d"):
        await world.node(name)
    heard = hear(iter([*read, *[line async for line in lines]]))
    check_complete(batch, heard)
    assert {one.node for one in heard.completions} <= {"c", "d"}


async def test_node_restarted_on_base_weights_gets_no_request(world: World) -> None:
    victim = await world.node("a", stalls=1)
    batch = make_batch("0-0")
    lines = world.lines(batch)
    read = await until_progress(lines)
    victim.lose()
    port = int(victim.address.rpartition(":")[2])
    again = await world.node("a", policy=None, port=port, boot_id="another")
    await world.node("b")
    heard = hear(iter([*read, *[line async for line in lines]]))
    check_complete(batch, heard)
    assert {one.node for one in heard.completions} == {"b"}
    assert again.asked == []


async def test_restarted_trainer_gets_earlier_completions(world: World) -> None:
    """What was under way has gone on, and nothing is made again."""
    batch = make_batch("0-0")
    node = await left_alone(world, batch)
    node.change(stalls=FOREVER)
    await world.until(lambda: node.row.running == 0)
    node.lose()
    heard = await world.complete(batch)
    check_complete(batch, heard)
    assert heard.end is not None
    assert (heard.end.reused, heard.end.discarded) == (16 * 32, 0)
    again = await world.complete(batch)  # it was killed before it had stored what it was given
    check_complete(batch, again)
    assert len(node.asked) == 32
    assert world.gateway.status().tokens_delivered == 16 * 32


async def test_early_trainer_takes_over_running_requests(world: World) -> None:
    batch = make_batch("0-0")
    node = await left_alone(world, batch)
    under_way = list(world.gateway.orphans.batches[0].requests.values())[8:]
    kept = sum(len(one.job.token_ids) for one in under_way)
    lines = world.lines(replace(batch, requests=batch.requests[8:]))  # it had stored the others
    read = await until_progress(lines)
    node.change(stalls=FOREVER)
    heard = hear(iter([*read, *[line async for line in lines]]))
    assert heard.end is not None
    assert (len(heard.completions), heard.end.reused) == (24, kept)
    assert len(node.asked) == 32
    await world.until(lambda: world.members.demand.open_policies == {})


async def test_tokens_of_a_failed_batch_are_reported_lost_by_the_next(world: World) -> None:
    node = await world.node("a", stalls=2)
    failed = await world.complete(make_batch("0-0", requests=4, deadline_s=1.0))
    assert failed.error is not None
    assert (lost := world.ledger.discarded) >= 4 * 2
    node.change(stalls=FOREVER)
    heard = await world.complete(make_batch("0-0", requests=4))
    assert heard.end is not None
    assert (heard.end.discarded, heard.end.reused, world.ledger.delivered) == (lost, 0, 4 * 16)


async def test_batch_is_not_late_while_nodes_work_at_older_policy(world: World) -> None:
    """A window ahead, of the newest policy, on a fleet of one node."""
    node = await world.node("a", loads=True, event_s=0.1, max_requests=4)
    older = asyncio.ensure_future(world.complete(make_batch("0-0", requests=12)))
    await world.until(lambda: node.row.running)
    newer = replace(make_batch("0-1", requests=2), deadline_s=1.0)
    began_s = time.monotonic()
    check_complete(newer, await world.complete(newer))
    assert time.monotonic() - began_s > newer.deadline_s
    assert older.done()


async def test_samples_stored_before_batch_end_are_not_reported_lost(world: World) -> None:
    """A window of several is trained on while the others are made; then the trainer dies."""
    world.gateway.orphans.superseded_ttl_s = 0.0
    node = await world.node("a", max_requests=4, event_s=0.01)
    batch, newer = make_batch("0-0"), make_batch("0-1", requests=1)
    lines = world.lines(batch)
    while (await anext(lines)).completion is None:
        pass
    node.change(stalls=1)
    await leave(lines)
    await world.until(lambda: world.gateway.orphans.batches)
    node.change(stalls=FOREVER)
    left = world.gateway.orphans.batches[0]
    unfinished = [one for one in left.requests.values() if not one.task.done()]
    assert len(unfinished) >= 16
    stored = [one for one in left.requests.values() if one.delivered]
    assert stored
    await world.until(lambda: all(one.task.done() for one in unfinished))
    lost = sum(len(one.job.token_ids) for one in left.requests.values()) - 16 * len(stored)
    node.loads = True
    heard = [await world.complete(newer), await world.complete(newer)]
    assert sum(one.end.discarded for one in heard if one.end is not None) == lost


@pytest.mark.parametrize("newer", [PolicyRef("1-0", "p"), PolicyRef("0-1", "p"), PolicyRef("0-0", "p", "f" * 32)])
async def test_superseded_requests_free_nodes_and_are_lost_once(newer: PolicyRef, world: World) -> None:
    world.gateway.orphans.superseded_ttl_s = 0.0
    node = await world.node("a", stalls=1)
    lines = world.lines(make_batch("0-0"))
    abandoned = (await until_progress(lines))[-1].progress
    assert abandoned is not None
    await leave(lines)
    await world.until(lambda: world.gateway.orphans.batches)
    node.loads = True
    every = replace(make_batch(newer.version, requests=3), policy=newer)
    first, second, third = (replace(every, requests=[one]) for one in every.requests)
    asking = asyncio.ensure_future(world.complete(first))
    await world.until(lambda: world.gateway.status().tokens_discarded >= abandoned.tokens)
    node.change(stalls=FOREVER)
    told = [(await heard).end for heard in (asking, world.complete(second), world.complete(third))]
    discarded = [end.discarded for end in told if end is not None]
    assert discarded[1] >= abandoned.tokens
    assert (discarded[0], discarded[2]) == (0, 0)
    await world.until(lambda: world.members.demand.open_policies == {})


async def test_orphaned_requests_end_after_a_while(world: World) -> None:
    world.gateway.orphans.ttl_s = 0.0
    node = await world.node("a", stalls=1)
    lines = world.lines(make_batch("0-0"))
    await until_progress(lines)
    await leave(lines)
    await world.until(lambda: node.row.running == 0 and world.members.demand.open_policies == {})


async def left_alone(world: World, batch: Batch) -> Node:
    """Have a trainer leave once all its requests have some tokens; return the node, which makes no more."""
    node = await world.node("a", stalls=3)
    lines = world.lines(batch)
    await until_progress(lines, lambda _: node.stalled == len(batch.requests))
    await leave(lines)
    await world.until(lambda: world.gateway.orphans.batches)
    return node


async def leave(lines: AsyncIterator[BatchLine]) -> None:
    """The trainer is gone: closing the generator closes the connection."""
    await lines.aclose()  # type: ignore[attr-defined]  # it is a generator


async def test_batch_waits_until_its_deadline_with_a_reason(world: World) -> None:
    node = await world.node("a", policy=None)
    lines = world.lines(make_batch("0-7"))
    waiting = (await until_progress(lines, lambda progress: progress.waiting == 32))[-1].progress
    assert waiting is not None
    assert (waiting.tokens, waiting.members) == (0, 0)
    await leave(lines)
    error = (await world.complete(make_batch("0-7", deadline_s=1.0))).error
    assert error is not None
    assert "no node served policy 0-7 within 1 s" in error
    assert "a holds base weights" in error
    assert node.asked == []
    await world.until(lambda: world.members.places.waiting.count == 0)


async def test_member_whose_announcement_breaks_is_out_at_once(world: World) -> None:
    world.members.announcements.hold_s = HANG_S
    body = msgspec.json.encode(Announce("boot", "127.0.0.1:9", "0-0"))
    await world.http.post("/members/a", content=body)  # what is news to a node is answered immediately
    announcing = asyncio.ensure_future(world.http.post("/members/a", content=body))
    await world.until(lambda: "a" in world.members.announcements.held)
    announcing.cancel()
    await world.until(lambda: world.members.table.member("a") is None)
    assert "lost its announcing connection" in world.members.changes[-1].reason


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path)
    yield rig
    rig.stop()


def test_killed_gateway_returns_on_its_port_with_its_members(rig: Rig) -> None:
    rig.gateway()
    for name in ("rollout-0", "rollout-1"):
        rig.node(name)
    rig.until_members("rollout-0", "rollout-1")
    for batch in (make_batch("0-0"), make_batch("0-1")):  # nodes hear of the second through held announcements
        check_complete(batch, rig.complete(batch))
    told = until("every token", lambda: (one := rig.status()).tokens_delivered >= 2 * 32 * 16 and one)
    assert (told.policy, told.tokens_delivered, told.tokens_discarded) == ("0-1", 2 * 32 * 16, 0)
    url, boot_id = rig.url, rig.status().boot_id
    kill(rig.processes[0])
    with pytest.raises(httpx.TransportError):
        rig.http.get(f"{rig.url}/health")
    gateway = rig.gateway()
    assert rig.url == url
    assert rig.status().boot_id != boot_id
    rig.until_members("rollout-0", "rollout-1")
    check_complete(batch, rig.complete(batch))
    assert all(rig.seen(name) for name in ("rollout-0", "rollout-1"))
    gateway.send_signal(signal.SIGTERM)
    assert gateway.wait(timeout=HANG_S) == 0


@pytest.mark.parametrize("timeline", [0, 1])
def test_next_gateway_continues_requests_of_the_last(timeline: int, rig: Rig, tmp_path: Path) -> None:
    """The trainer dies and its gateway ends with it; both come again. After a rollback nothing is gone on with."""
    rig.env |= {NODE_ENV: "trainer-0-i1", ATTEMPT_ENV: "1", TIMELINE_ENV: "0", WORKDIR_ENV: str(tmp_path)}
    gateway, _ = rig.gateway(), rig.node("a", event_s=0.1)
    rig.until_members("a")
    batch = make_batch("0-0", max_tokens=64)
    lines, made = rig.ask(batch), 0
    while made < 32 * 8:
        line = next(lines)
        made = max(made, 0 if line.progress is None else line.progress.tokens)
    lines.close()  # type: ignore[attr-defined]  # it is a generator
    gateway.send_signal(signal.SIGTERM)
    assert gateway.wait(HANG_S) == 0
    rig.env |= {ATTEMPT_ENV: "2", TIMELINE_ENV: str(timeline)}
    rig.gateway()
    heard = rig.complete(batch)
    check_complete(batch, heard)
    assert heard.end is not None
    assert heard.end.discarded == 0
    assert (heard.end.reused >= made) if timeline == 0 else (heard.end.reused == 0)
    assert not list(tmp_path.glob("gateway-requests")), "it would be taken over again"
