"""A step's requests over the members that come, one after another, and over those that are done early."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from orchestrator.gateway.job import Finished
from orchestrator.gateway.nodes.upstream import VllmAttempt
from orchestrator.gateway.routing import places, watch
from orchestrator.gateway.routing.members import Members
from orchestrator.gateway.routing.watch import LOOK_S
from policies.serving.member import Load
from policies.serving.membership import TOGETHER_REQUESTS
from policies.serving.sharing import DOUBLING_REQUESTS, Movable, tokens_left
from policies.serving.wire import Announce, PolicyRef
from tests.stand_ins.gateway_world import Node, World, job, run, undisturbed

NODES, PER_NODE, GROUP = 4, 32, 8
NEW = "0-1"


async def fleet(world: World) -> list[Node]:
    """Members that have proved themselves, and hold an older policy than is wanted."""
    nodes = [await world.node(f"n{number}") for number in range(NODES)]
    for node in nodes:
        node.row.allowed = node.max_requests
        node.doubling = DOUBLING_REQUESTS
    world.members.want(PolicyRef(NEW, "policies/0-1"))
    return nodes


async def loads(world: World, node: Node) -> None:
    """It has the new policy, and its agent says so at once."""
    node.change(policy=NEW)
    world.members._announcements.answer(node.name)
    await world.until(lambda: node.row.policy == NEW)


def step(world: World, count: int) -> list[asyncio.Task[Finished]]:
    return [world.ask(job(policy=NEW, group=number // GROUP)) for number in range(count)]


async def until_running(world: World, nodes: list[Node], count: int) -> None:
    await world.until(lambda: sum(one.running for one in nodes) >= count)


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "SPEED_S", 0.4)


@pytest.fixture
def shares_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "SHARES_S", 600.0)


@pytest.mark.usefixtures("shares_for_ever")
def test_the_first_member_takes_its_share_and_each_that_comes_takes_another() -> None:
    async def story(world: World) -> None:
        nodes = await fleet(world)
        for node in nodes:
            node.stalls = 0
        asked = step(world, NODES * PER_NODE)
        for number, node in enumerate(nodes, 1):
            await loads(world, node)
            await until_running(world, nodes, number * PER_NODE)
            for one in nodes[:number]:
                assert abs(one.row.running - PER_NODE) <= TOGETHER_REQUESTS
        for node in nodes:
            node.change(stalls=100)
        await asyncio.gather(*asked)
        assert world.ledger.handovers == 0
        assert max(len(node.asked) for node in nodes) <= PER_NODE + TOGETHER_REQUESTS

    run(story)


def test_what_was_kept_for_others_that_do_not_come_is_not_kept_long() -> None:
    async def story(world: World) -> None:
        nodes = await fleet(world)
        nodes[0].stalls = 0
        asked = step(world, NODES * PER_NODE)
        await loads(world, nodes[0])
        await world.until(lambda: nodes[0].running == NODES * PER_NODE)
        nodes[0].change(stalls=100)
        await asyncio.gather(*asked)

    run(story)


def test_who_comes_late_takes_from_those_at_work_and_nothing_is_lost() -> None:
    async def story(world: World) -> None:
        nodes = await fleet(world)
        early, late = nodes[:2]
        for node in nodes[2:]:
            world.members.remove(node.name)
        early.event_s = late.event_s = 0.1
        jobs = [job(policy=NEW, group=number // GROUP, max_tokens=193) for number in range(2 * PER_NODE)]
        asked = [world.ask(one) for one in jobs]
        await loads(world, early)
        await world.until(lambda: all(len(one.token_ids) > 4 for one in jobs))
        await world.until(lambda: world.members.links[early.row.term].speed_tokens_s)
        await loads(world, late)
        await world.until(
            lambda: abs(late.row.running - PER_NODE) <= 5 and early.row.running + late.row.running == 2 * PER_NODE
        )
        early.change(event_s=0.01)
        late.change(event_s=0.01)
        for one, got in zip(jobs, await asyncio.gather(*asked), strict=True):
            assert (got.token_ids, got.logprobs, got.finish_reason) == undisturbed(one)
        assert world.ledger.handovers_by.keys() == {"shared"}
        assert world.ledger.handovers >= PER_NODE - 5
        assert max(one.shared for one in jobs) <= watch.MOVES_MAX
        assert (world.ledger.discarded, world.ledger.saved > 0) == (0, True)

    run(story)


def test_those_without_a_token_go_first_and_lose_nothing() -> None:
    async def story(world: World) -> None:
        nodes = await fleet(world)
        early, late = nodes[:2]
        for node in nodes[2:]:
            world.members.remove(node.name)
        early.event_s = late.event_s = 0.2
        begun = [job(policy=NEW, group="begun", max_tokens=397) for _ in range(PER_NODE)]
        asked = [world.ask(one) for one in begun]
        await loads(world, early)
        await world.until(lambda: world.members.links[early.row.term].speed_tokens_s)
        early.change(stalls=0)  # what comes now gets no token there
        late.stalls = 0
        waiting = [job(policy=NEW, group=number // GROUP, max_tokens=397) for number in range(PER_NODE)]
        asked += [world.ask(one) for one in waiting]
        await world.until(lambda: early.row.running == 2 * PER_NODE)
        await loads(world, late)
        await world.until(lambda: late.row.running >= PER_NODE - 6)
        assert Counter(one.shared for one in begun) == {0: PER_NODE}
        assert world.ledger.saved == world.ledger.replayed_prefill == 0
        for node in (early, late):
            node.change(event_s=0.001, stalls=1000)
        await asyncio.gather(*asked)

    run(story)


def test_last_request_of_a_slow_member_moves_to_an_idle_one() -> None:
    async def story(world: World) -> None:
        slow, fast = [await world.node(name) for name in ("slow", "fast")]
        for node in (slow, fast):
            node.row.allowed, node.event_s = node.max_requests, 0.05
        jobs = [job(group=str(number), max_tokens=97) for number in range(2)]
        asked = [world.ask(one) for one in jobs]
        await world.until(lambda: slow.running == fast.running == 1)
        await world.until(lambda: len([link for link in world.members.links.values() if link.speed_tokens_s]) == 2)
        slow.change(event_s=1.0)
        fast.change(event_s=0.01)
        got = await asyncio.gather(*asked)
        assert [one.node for one in got] == ["fast", "fast"]
        for one, made in zip(jobs, got, strict=True):
            assert (made.token_ids, made.logprobs, made.finish_reason) == undisturbed(one)
        assert world.ledger.handovers_by == {"shared": 1}
        assert world.ledger.discarded == 0

    run(story)


class Counted:
    """A fleet's requests, and how much of them is read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *counts: int) -> None:
        self.members = Members("a token")
        self.balance = watch.Balance(self.members)
        self.read = self.built = 0
        for name, count in zip("abcd", counts, strict=False):
            said = Announce(f"boot-{name}", "127.0.0.1:9", NEW, max(counts))
            self.members._apply(self.members._table.announce(name, said, 0.0))
            row = self.members.rows[-1]
            row.allowed = max(counts)
            for _ in range(count):
                place = self.members.places._place_on(row, Load(None))
                attempt = VllmAttempt(job(policy=NEW, max_tokens=400), place.link, lambda: None)
                place.link.running.add(attempt)
                place.link.speed_tokens_s = 50.0
        monkeypatch.setattr(watch, "tokens_left", self._tokens_left)
        monkeypatch.setattr(watch, "Movable", self._movable)

    def _tokens_left(self, *args: int) -> float:
        self.read += 1
        return tokens_left(*args)

    def _movable(self, *args: int) -> Movable:
        self.built += 1
        return Movable(*args)


def test_what_may_move_is_looked_up_only_where_it_pays_and_only_at_who_gives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def story() -> None:
        even = Counted(monkeypatch, 100, 97, 97, 97)
        even.balance.look(1.0)
        assert (even.read, even.built) == (391, 0)
        uneven = Counted(monkeypatch, 128, 20, 20, 20)
        uneven.balance.look(1.0)
        moved = sum(attempt._done.done() for link in uneven.members.links.values() for attempt in link.running)
        assert 70 <= moved < uneven.built <= moved + 4
        for link in uneven.members.links.values():
            for attempt in link.running:
                if attempt._done.done():
                    attempt._done.exception()  # else the loop tells of it

    asyncio.run(story())


def test_many_requests_are_looked_at_more_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        few, many = Counted(monkeypatch, 100, 97), Counted(monkeypatch, 3000, 2997)
        for fleet in (many, few):
            monkeypatch.setattr(watch, "tokens_left", fleet._tokens_left)
            for tick in range(1, 101):
                fleet.balance.look(tick * LOOK_S)
        assert few.read == 100 * 197  # at each
        assert 2 * 5997 < many.read <= 100 * LOOK_S / watch.REQUEST_S + 5997

    asyncio.run(story())
