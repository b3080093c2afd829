"""Requests of two policies at a time: the older one's last ones keep few members, and no completion mixes them."""

from __future__ import annotations

from grpo_orch.policies.serving.wire import PolicyRef
from tests.rigs.gateway_world import World, job, undisturbed

NEW = PolicyRef("0-1", "policies/0-1")
OLD = PolicyRef("0-0", "policies/0-0")


async def test_last_requests_of_older_policy_gather_on_one_member(world: World) -> None:
    nodes = [await world.node(name, loads=True, stalls=4) for name in "ab"]
    old = [job() for _ in range(2)]
    world.members.want(OLD, len(old))
    finishing = [world.ask(one) for one in old]
    await world.until(lambda: all(node.stalled for node in nodes))  # each has one of them
    new = [job(policy="0-1") for _ in range(3)]
    world.members.want(NEW, len(new))
    for node in nodes:
        if node.policy == "0-0":
            node.change(stalls=4)
    asked = [world.ask(one) for one in new]
    await world.until(lambda: {node.policy for node in nodes} == {"0-0", "0-1"})
    turned = next(node for node in nodes if node.policy == "0-1")
    turned.change(stalls=1_000_000)
    for task, one in zip(asked, new, strict=True):
        assert (await task).token_ids == undisturbed(one)[0]
    assert not any(task.done() for task in finishing), "they are still at work"
    kept = next(node for node in nodes if node is not turned)
    kept.change(stalls=1_000_000)
    for task, one in zip(finishing, old, strict=True):
        got = await task
        assert (got.token_ids, got.job.policy, got.node) == (undisturbed(one)[0], "0-0", kept.name)
    world.members.finish("0-0", len(old))
    await world.until(lambda: kept.policy == "0-1")
    assert world.ledger.discarded == 0
    assert not any(row.is_suspected for row in world.members.table.members)


async def test_older_policy_gets_a_member_when_its_last_is_lost(world: World) -> None:
    nodes = {name: await world.node(name, loads=True, stalls=4) for name in "ab"}
    old, new = job(), job(policy="0-1")
    world.members.want(OLD, 1)
    waiting = world.ask(old)
    await world.until(lambda: any(node.stalled for node in nodes.values()))
    world.members.want(NEW, 1)
    working = world.ask(new)
    await world.until(lambda: {node.policy for node in nodes.values()} == {"0-0", "0-1"})
    lost = next(name for name, node in nodes.items() if node.policy == "0-0")
    nodes.pop(lost).kill()
    world.members.remove(lost)
    (left,) = nodes.values()
    left.change(stalls=1_000_000)
    assert (await waiting).token_ids == undisturbed(old)[0]
    world.members.finish("0-0", 1)
    assert (await working).token_ids == undisturbed(new)[0]
