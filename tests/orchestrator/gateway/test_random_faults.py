"""Nodes that die, stall, go deaf, drain, leave and come at random, with many jobs under way: no token is lost."""

from __future__ import annotations

import asyncio
import random

import pytest

from grpo_orch.policies.serving.silence_limits import SilenceLimits
from tests.rigs.gateway_world import Node, World, job, undisturbed

JOBS = 48


class Hasty(SilenceLimits):
    """Asks, and gives up, within the time of a test."""

    __slots__ = ()

    soft_s = 0.2  # type: ignore[misc]
    hard_s = 1.5

    def first_token_s(self, prompt_tokens: int) -> float:  # noqa: ARG002
        return self.hard_s


def strike(world: World, node: Node, how: str) -> None:
    match how:
        case "kill":
            node.lose()
        case "crash":
            node.kill()
        case "stall":
            node.change(stalls=0)
        case "deaf":
            node.change(stalls=0, deaf=True)
        case "drain":
            world.members.drain(node.name)
        case "remove":
            world.members.remove(node.name)
        case "weights":
            node.change(policy="0-9")
        case "slow":
            node.change(event_s=0.2)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
async def test_every_job_completes_as_undisturbed_without_waste(world: World, seed: int) -> None:
    world.limits = Hasty
    chance = random.Random(seed)
    jobs = [job(max_tokens=chance.choice((17, 60, 120)), min_tokens=5) for _ in range(JOBS)]
    living = [await world.node(f"first-{number}", event_s=0.01) for number in range(3)]
    asked = [world.ask(one) for one in jobs]
    # All three are at work, and one of them breaks: whatever is drawn next, something is handed over.
    await world.until(lambda: all(node.sent >= JOBS for node in living))
    strike(world, living.pop(), "crash")
    for number in range(12):
        while len(living) < 3:
            node = await world.node(f"node-{number}-{len(living)}")
            node.event_s = chance.choice((0.01, 0.02))
            living.append(node)
        await asyncio.sleep(chance.uniform(0.0, 0.1))
        node = living.pop(chance.randrange(len(living)))
        strike(
            world,
            node,
            chance.choice(("kill", "crash", "stall", "deaf", "drain", "remove", "weights", "slow")),
        )
    await world.node("last", event_s=0.001)
    for one, got in zip(jobs, await asyncio.gather(*asked), strict=True):
        assert (got.token_ids, got.logprobs, got.finish_reason) == undisturbed(one)
        assert got.job.policy == "0-0"
    ledger = world.ledger
    assert ledger.discarded == 0
    assert ledger.handovers > 0
    assert 0 < ledger.saved <= sum(len(one.token_ids) for one in jobs)
    assert world.members.places.waiting.count == 0
    assert all(row.running == row.outstanding == row.replaying == 0 for row in world.members.table.members)
