"""Requests that wait inside a node's engine are left there; an engine that stands still is found all the same."""

from __future__ import annotations

import asyncio

from grpo_orch.policies.serving.silence_limits import SilenceLimits
from grpo_orch.policies.serving.wire import EngineStats
from tests.rigs.gateway_world import Node, World, job, undisturbed

LONG_S = 1.2  # in place of four minutes


def give_up_soon(world: World) -> None:
    world.watch.stuck_s, world.watch.housekeeping_s = LONG_S, 0.1


def report_work(node: Node) -> None:
    """Have the node's agent report that its engine has made another token."""
    assert node.engine is not None
    node.change(engine=EngineStats(running=1, tokens=node.engine.tokens + 1))
    node.announce()


class Brief(SilenceLimits):
    """Gives up soon what answers and makes no token."""

    __slots__ = ()

    soft_s = 0.2  # type: ignore[misc]
    hard_s = 0.8


async def test_requests_queued_in_an_engine_are_not_stuck(world: World) -> None:
    """The engine works at two at a time, and the last begin after three times the limit."""
    give_up_soon(world)
    node = await world.node("a")
    node.at_a_time, node.event_s = 2, LONG_S / 4
    jobs = [job(max_tokens=13) for _ in range(8)]
    for one, got in zip(jobs, await asyncio.gather(*(world.ask(one) for one in jobs)), strict=True):
        assert got.token_ids == undisturbed(one)[0]
    assert (world.ledger.handovers, len(node.asked)) == (0, len(jobs))


async def test_request_that_later_ones_overtake_is_restarted(world: World) -> None:
    give_up_soon(world)
    node = await world.node("a", event_s=0.1)
    lost = job(max_tokens=13)
    node.loses = {lost.body["seed"]}
    asked = world.ask(lost)
    await world.until(lambda: node.running == 1)
    while not lost.last_failure:
        await world.ask(job(max_tokens=5))
    node.change(loses=set())
    assert (await asked).token_ids == undisturbed(lost)[0]
    assert world.ledger.handovers_by_reason == {"silent": 1}


async def test_engines_report_of_waiting_requests_is_trusted(world: World) -> None:
    give_up_soon(world)
    node = await world.node("a", event_s=0.1)
    late = job(max_tokens=13)
    node.loses = {late.body["seed"]}
    node.change(engine=EngineStats(running=1, waiting=1, kv_usage=0.5))
    await world.until(lambda: node.row.engine is not None)
    asked = world.ask(late)
    loop = asyncio.get_running_loop()
    until_s = loop.time() + 2 * LONG_S
    while loop.time() < until_s:
        await world.ask(job(max_tokens=5))
    assert not late.last_failure
    node.change(loses=set())
    asked.cancel()


async def test_working_engine_with_rare_events_is_not_stuck(
    world: World,
) -> None:
    world.limits = Brief
    node = await world.node("a")
    one = job(max_tokens=13)
    node.change(stalls=5, engine=EngineStats())
    asked = world.ask(one)
    await world.until(lambda: len(one.token_ids) == 5)
    loop = asyncio.get_running_loop()
    until_s = loop.time() + 2.0
    while loop.time() < until_s:
        report_work(node)
        await asyncio.sleep(0.1)
    assert not one.last_failure
    await world.until(lambda: one.last_failure)  # the same tokens again and again
    node.change(stalls=1000)
    assert (await asked).token_ids == undisturbed(one)[0]
    assert world.ledger.handovers_by_reason.keys() == {"silent"}


async def test_request_that_tries_a_stuck_member_moves_to_an_idle_one(world: World) -> None:
    stuck, busy = await world.node("stuck", stalls=0), await world.node("busy", max_requests=1, stalls=5)
    link = world.members.places.link(stuck.row)
    world.members.suspect(link, "no token", whole=True)
    await world.until(lambda: not stuck.row.is_suspected)
    first, second = job(), job()
    asked = [await world.begun(first), world.ask(second)]
    await world.until(lambda: stuck.running == 1)
    assert (busy.row.running, second.is_waiting) == (1, False)
    busy.change(stalls=1000)
    for one, got in zip((first, second), await asyncio.gather(*asked), strict=True):
        assert (got.node, got.token_ids) == ("busy", undisturbed(one)[0])
    assert world.ledger.handovers_by_reason == {"rebalanced": 1}


async def test_silent_server_is_unresponsive_though_its_engine_works(world: World) -> None:
    world.limits = Brief
    node = await world.node("a", stalls=5, deaf=True, engine=EngineStats())
    asked = world.ask(job(max_tokens=13))
    while not node.row.is_unresponsive:
        report_work(node)
        await asyncio.sleep(0.1)
    asked.cancel()
