"""Requests that wait inside a node's engine are left there; an engine that stands still is found all the same."""

from __future__ import annotations

import asyncio

import pytest

from grpo_orch.orchestrator.gateway.routing import watch
from grpo_orch.policies.serving.silence import SilenceLimits
from grpo_orch.policies.serving.wire import EngineStats
from tests.rigs.gateway_world import Node, World, job, undisturbed

LONG_S = 1.2  # in place of four minutes


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "MOST_S", LONG_S)
    monkeypatch.setattr(watch, "HOUSEKEEPING_S", 0.1)


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


@pytest.mark.usefixtures("soon")
async def test_what_waits_for_its_turn_in_an_engine_is_not_taken_for_stuck(world: World) -> None:
    """The engine works at two at a time, and the last begin after three times the limit."""
    node = await world.node("a")
    node.at_a_time, node.event_s = 2, LONG_S / 4
    jobs = [job(max_tokens=13) for _ in range(8)]
    for one, got in zip(jobs, await asyncio.gather(*(world.ask(one) for one in jobs)), strict=True):
        assert got.token_ids == undisturbed(one)[0]
    assert (world.ledger.handovers, len(node.asked)) == (0, len(jobs))


@pytest.mark.usefixtures("soon")
async def test_one_that_others_have_gone_before_is_ended(world: World) -> None:
    node = await world.node("a", event_s=0.1)
    lost = job(max_tokens=13)
    node.loses = {lost.body["seed"]}
    asked = world.ask(lost)
    await world.until(lambda: node.running == 1)
    while not lost.handovers:
        await world.ask(job(max_tokens=5))
    node.change(loses=set())
    assert (await asked).token_ids == undisturbed(lost)[0]
    assert world.ledger.handovers_by_reason == {"silent": 1}


@pytest.mark.usefixtures("soon")
async def test_an_engine_that_says_that_requests_wait_is_believed(world: World) -> None:
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
    assert late.handovers == 0
    node.change(loses=set())
    asked.cancel()


async def test_an_engine_at_work_is_not_stuck_because_its_events_are_far_apart_and_one_that_stops_is(
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
    assert one.handovers == 0
    await world.until(lambda: one.handovers == 1)  # the same tokens again and again
    node.change(stalls=1000)
    assert (await asked).token_ids == undisturbed(one)[0]
    assert world.ledger.handovers_by_reason.keys() == {"silent"}


async def test_server_that_does_not_answer_is_mute_although_its_engine_works(world: World) -> None:
    world.limits = Brief
    node = await world.node("a", stalls=5, deaf=True, engine=EngineStats())
    asked = world.ask(job(max_tokens=13))
    while not node.row.mute:
        report_work(node)
        await asyncio.sleep(0.1)
    asked.cancel()
