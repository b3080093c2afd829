"""A step's requests over the members that come, one after another, and over those that are done early."""

from __future__ import annotations

import asyncio
from collections import Counter

from grpo_orch.orchestrator.gateway.job import Finished
from grpo_orch.orchestrator.gateway.routing import member_watch
from grpo_orch.policies.serving.membership import GROUP_LEAD_REQUESTS
from grpo_orch.policies.serving.sharing import DOUBLING_REQUESTS
from grpo_orch.policies.serving.wire import PolicyRef
from tests.rigs.gateway_world import Node, World, job, undisturbed

NODES, PER_NODE, GROUP = 4, 32, 8
NEW = "0-1"


async def fleet(world: World) -> list[Node]:
    """Members that have proved themselves, and hold an older policy than is wanted."""
    world.watch.balancer.speed_s = 0.4
    nodes = [await world.node(f"n{number}") for number in range(NODES)]
    for node in nodes:
        node.row.allowed = node.max_requests
        node.doubling = DOUBLING_REQUESTS
    world.members.want(PolicyRef(NEW, "policies/0-1"))
    return nodes


def step(world: World, count: int) -> list[asyncio.Task[Finished]]:
    return [world.ask(job(policy=NEW, group=number // GROUP)) for number in range(count)]


async def until_running(world: World, nodes: list[Node], count: int) -> None:
    await world.until(lambda: sum(one.running for one in nodes) >= count)


async def test_first_member_takes_its_share_and_others_theirs(world: World) -> None:
    world.members.places.share_limit_s = 600.0
    nodes = await fleet(world)
    for node in nodes:
        node.stalls = 0
    asked = step(world, NODES * PER_NODE)
    for number, node in enumerate(nodes, 1):
        await node.load(NEW)
        await until_running(world, nodes, number * PER_NODE)
        for one in nodes[:number]:
            assert abs(one.row.running - PER_NODE) <= GROUP_LEAD_REQUESTS
    for node in nodes:
        node.change(stalls=100)
    await asyncio.gather(*asked)
    assert world.ledger.handovers == 0
    assert max(len(node.asked) for node in nodes) <= PER_NODE + GROUP_LEAD_REQUESTS


async def test_reserved_share_is_released_if_no_member_comes(world: World) -> None:
    nodes = await fleet(world)
    nodes[0].stalls = 0
    asked = step(world, NODES * PER_NODE)
    await nodes[0].load(NEW)
    await world.until(lambda: nodes[0].running == NODES * PER_NODE)
    nodes[0].change(stalls=100)
    await asyncio.gather(*asked)


async def test_late_member_takes_jobs_from_others_without_loss(world: World) -> None:
    nodes = await fleet(world)
    early, late = nodes[:2]
    for node in nodes[2:]:
        world.members.remove(node.name)
    early.event_s = late.event_s = 0.1
    jobs = [job(policy=NEW, group=number // GROUP, max_tokens=193) for number in range(2 * PER_NODE)]
    asked = [world.ask(one) for one in jobs]
    await early.load(NEW)
    await world.until(lambda: all(len(one.token_ids) > 4 for one in jobs))
    await world.until(lambda: world.members.places.links[early.row.term].speed_tokens_s)
    await late.load(NEW)
    await world.until(
        lambda: abs(late.row.running - PER_NODE) <= 5 and early.row.running + late.row.running == 2 * PER_NODE
    )
    early.change(event_s=0.01)
    late.change(event_s=0.01)
    for one, got in zip(jobs, await asyncio.gather(*asked), strict=True):
        assert (got.token_ids, got.logprobs, got.finish_reason) == undisturbed(one)
    assert world.ledger.handovers_by_reason.keys() == {"rebalanced"}
    assert world.ledger.handovers >= PER_NODE - 5
    assert max(one.rebalances for one in jobs) <= member_watch.REBALANCES_MAX
    assert (world.ledger.discarded, world.ledger.saved > 0) == (0, True)


async def test_jobs_without_tokens_move_first_and_lose_nothing(world: World) -> None:
    nodes = await fleet(world)
    early, late = nodes[:2]
    for node in nodes[2:]:
        world.members.remove(node.name)
    early.event_s = late.event_s = 0.2
    begun = [job(policy=NEW, group="begun", max_tokens=397) for _ in range(PER_NODE)]
    asked = [world.ask(one) for one in begun]
    await early.load(NEW)
    await world.until(lambda: world.members.places.links[early.row.term].speed_tokens_s)
    early.change(stalls=0)  # what comes now gets no token there
    late.stalls = 0
    waiting = [job(policy=NEW, group=number // GROUP, max_tokens=397) for number in range(PER_NODE)]
    asked += [world.ask(one) for one in waiting]
    await world.until(lambda: early.row.running == 2 * PER_NODE)
    await late.load(NEW)
    await world.until(lambda: late.row.running >= PER_NODE - 6)
    assert Counter(one.rebalances for one in begun) == {0: PER_NODE}
    assert world.ledger.saved == world.ledger.replayed == 0
    for node in (early, late):
        node.change(event_s=0.001, stalls=1000)
    await asyncio.gather(*asked)


async def test_last_request_of_slow_member_moves_to_an_idle_one(world: World) -> None:
    world.watch.balancer.speed_s = 0.4
    slow, fast = [await world.node(name) for name in ("slow", "fast")]
    for node in (slow, fast):
        node.row.allowed, node.event_s = node.max_requests, 0.05
    jobs = [job(group=str(number), max_tokens=797) for number in range(2)]
    asked = [world.ask(one) for one in jobs]
    await world.until(lambda: slow.running == fast.running == 1)
    await world.until(
        lambda: len([link for link in world.members.places.links.values() if link.speed_tokens_s]) == 2
    )
    slow.change(event_s=1.0)
    fast.change(event_s=0.01)
    got = await asyncio.gather(*asked)
    assert [one.node for one in got] == ["fast", "fast"]
    for one, made in zip(jobs, got, strict=True):
        assert (made.token_ids, made.logprobs, made.finish_reason) == undisturbed(one)
    assert world.ledger.handovers_by_reason == {"rebalanced": 1}
    assert world.ledger.discarded == 0
