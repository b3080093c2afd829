"""Which member gets a job: newcomers, storms, slow requests, drains, a queue and its bound."""

from __future__ import annotations

import asyncio

import pytest

from grpo_orch.orchestrator.gateway.job import QueueFull
from grpo_orch.orchestrator.gateway.routing.places import TOKEN_SIZE, WAITING_SIZE_MAX
from grpo_orch.policies.serving.membership import EASE_IN_REQUESTS
from grpo_orch.policies.serving.wire import Handover
from tests.rigs.gateway_world import World, job, undisturbed


async def test_a_new_member_gets_few_jobs_before_it_has_made_a_token(world: World) -> None:
    node = await world.node("first", stalls=0)
    asked = [world.ask(job()) for _ in range(60)]
    await world.until(lambda: node.running == EASE_IN_REQUESTS)
    assert world.members.places.waiting.count == 60 - EASE_IN_REQUESTS
    node.change(stalls=1)
    await world.until(lambda: node.running == 60)
    node.change(stalls=100)
    await asyncio.gather(*asked)
    assert node.row.running == node.row.outstanding == 0


async def test_long_jobs_move_one_at_a_time_and_new_ones_need_not_wait(
    world: World,
) -> None:
    first = await world.node("first", stalls=5)
    long = [job(prompt=[1] * 10_000) for _ in range(3)]
    asked = [world.ask(one) for one in long]
    await world.until(lambda: all(len(one.token_ids) == 5 for one in long))
    second = await world.node("second", stalls=0)
    first.kill()
    await world.until(lambda: sum(one.is_waiting for one in long) == 2 and second.running == 1)
    assert second.row.replaying == 10_005
    new = world.ask(job())
    await world.until(lambda: second.running == 2)
    second.change(stalls=100)
    for one, got in zip(long, await asyncio.gather(*asked), strict=True):
        assert got.token_ids == undisturbed(one)[0]
    await new
    assert world.ledger.replayed == 3 * 10_005


async def test_returning_member_takes_jobs_from_full_ones(world: World) -> None:
    back, full = await world.node("back", max_requests=4), await world.node("full", max_requests=4)
    back.stalls = full.stalls = 1
    jobs = [job(max_tokens=50) for _ in range(8)]
    asked = [world.ask(one) for one in jobs]
    await world.until(lambda: back.stalled + full.stalled == 8)
    back.boot_id, back.stalls = "second-boot", 1000
    back.announce()
    await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
    assert full.row.running == 4
    full.change(stalls=1000)
    for one, got in zip(jobs, await asyncio.gather(*asked), strict=True):
        assert got.token_ids == undisturbed(one)[0]


async def test_job_refused_by_one_member_blocks_no_other_there(world: World) -> None:
    full = await world.node("full", max_requests=1, stalls=0)
    held = world.ask(job())
    await world.until(lambda: full.running == 1)
    await world.node("strict", refuses=lambda body: len(body["prompt"]) > 100)
    long = job(prompt=[1] * 200)
    asked = world.ask(long)
    await world.until(lambda: long.refused_by and world.members.places.waiting.count)
    assert {(await world.ask(job())).node for _ in range(4)} == {"strict"}
    assert not asked.done()
    full.change(stalls=100)
    await held
    assert (await asked).node == "full"


async def test_unfinished_jobs_of_drained_member_continue_elsewhere(world: World) -> None:
    leaving = await world.node("leaving", stalls=5)
    moves, stays = job(), job(recovery="exact")
    asked = [world.ask(moves), world.ask(stays)]
    await world.until(lambda: all(len(one.token_ids) == 5 for one in (moves, stays)))
    world.members.drain("leaving")
    await asyncio.sleep(0.3)  # longer than `drain_s`
    assert (leaving.running, world.ledger.handovers) == (2, 0)  # there is no other
    other = await world.node("other")
    assert (await asked[0]).token_ids == undisturbed(moves)[0]
    assert (len(other.asked), world.ledger.handovers_by_reason) == (1, {"drained": 1})
    leaving.change(stalls=100)  # what would have to start over is left to finish
    assert (await asked[1]).node == "leaving"
    await world.until(lambda: world.members.table.member("leaving") is None)
    assert world.ledger.discarded == 0


async def test_cut_completion_waits_for_a_member_of_its_policy(world: World) -> None:
    older = await world.node("older", policy="0-4")
    first = await world.node("first", policy="0-5", stalls=5)
    one = job(policy="0-5")
    asked = await world.begun(one)
    first.kill()
    await world.node("newer", policy="0-6")
    await world.until(lambda: one.is_waiting)
    assert (older.asked, asked.done()) == ([], False)
    await world.node("same", policy="0-5")
    got = await asked
    assert (got.job.policy, got.node, got.token_ids) == ("0-5", "same", undisturbed(one)[0])
    assert one.handed_over == [Handover("first", 5)]
    assert world.ledger.discarded == 0


async def test_the_queue_is_bounded(world: World) -> None:
    huge, small, more = job(), job(), job()
    huge.prompt_size = WAITING_SIZE_MAX - 3 * TOKEN_SIZE
    asked = [world.ask(huge), world.ask(small)]
    await world.until(lambda: world.members.places.waiting.count == 2)
    with pytest.raises(
        QueueFull, match=r"the queue is full: 2 requests \(1024 MiB\) wait for a node; retry later"
    ):
        await world.ask(more)
    more.is_admitted = True
    asked.append(world.ask(more))
    await world.until(lambda: world.members.places.waiting.count == 3)
    asked[0].cancel()
    await world.until(lambda: world.members.places.waiting.count == 2)
    more = job()
    asked.append(world.ask(more))
    await world.node("first")
    await asyncio.gather(*asked[1:])
