"""Jobs that lose their node in every way: each comes to what the undisturbed one would have been."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from orchestrator.gateway.job import Finished, Job
from orchestrator.gateway.nodes.connection import Pool
from policies.serving.silence import SilenceLimits
from policies.serving.wire import HandOver
from tests.budget import HANG_S
from tests.stand_ins.fake_vllm import BREAKS, texts
from tests.stand_ins.gateway_world import EVENT_STREAM, World, job, run, undisturbed


def check(one: Job, got: Finished) -> None:
    tokens, logprobs, reason = undisturbed(one)
    assert (got.token_ids, got.logprobs, got.finish_reason) == (tokens, logprobs, reason)


async def cut(world: World, one: Job, *, tokens: int = 5) -> Finished:
    """Have the job done, and kill its first node when so many tokens of it have arrived."""
    first = await world.node("first")
    first.stalls = tokens
    asked = world.ask(one)
    await world.until(lambda: len(one.token_ids) >= tokens)
    second = await world.node("second")
    first.kill()
    got = await asked
    assert (got.node, len(second.asked)) == ("second", 1)
    return got


@pytest.mark.parametrize("tokens", [1, 5, 13])
def test_a_job_goes_on_from_the_tokens_that_arrived(tokens: int) -> None:
    async def story(world: World) -> None:
        body: dict[str, Any] = {"min_tokens": 6, "stop_token_ids": list(range(0, 1000, 20)), "max_tokens": 17}
        while len(undisturbed(one := job(**body))[0]) <= tokens:
            pass
        check(one, await cut(world, one, tokens=tokens))
        asked = world.nodes[1].asked[0]
        assert asked["prompt"] == [1, 2, 3, *one.token_ids[: len(asked["prompt"]) - 3]]
        arrived = len(asked["prompt"]) - 3
        assert arrived == tokens
        assert (asked["max_tokens"], asked["min_tokens"]) == (17 - arrived, max(0, 6 - arrived))
        assert (world.ledger.saved, world.ledger.discarded) == (arrived, 0)
        assert world.ledger.replayed_prefill == 3 + arrived
        assert world.ledger.handovers_by == {"lost": 1}
        assert one.handed_over == [HandOver("first", arrived)]

    run(story)


@pytest.mark.parametrize(
    "body",
    [{"recovery": "exact"}, {"presence_penalty": 0.5}, {"stop": ["x"]}, {"bad_words": ["x"]}, {"what": "is this"}],
    ids=str,
)
def test_a_job_that_cannot_go_on_starts_over(body: dict[str, Any]) -> None:
    async def story(world: World) -> None:
        one = job(**body)
        check(one, await cut(world, one))
        assert world.nodes[1].asked[0]["prompt"] == [1, 2, 3]
        assert (world.ledger.saved, world.ledger.discarded, one.discarded) == (0, 5, 5)
        assert one.handed_over == [HandOver("first", 0)]

    run(story)


@pytest.mark.parametrize("chat", [False, True])
def test_text_goes_on_over_the_seam(chat: bool) -> None:
    async def story(world: World) -> None:
        while texts(undisturbed(one := job(chat=chat, keep_text=True))[0])[4] == "":
            pass  # the fifth token is half a character
        told: list[str] = []
        one.arrived = lambda: told.append(one.text)
        got = await cut(world, one)
        check(one, got)
        assert got.text == "".join(texts(got.token_ids)) == told[-1]
        assert told == sorted(told, key=len)
        assert one.tokens == texts(got.token_ids)
        assert world.ledger.saved == 5
        assert "messages" not in world.nodes[1].asked[0]

    run(story)


def test_text_that_was_cut_in_a_character_starts_over() -> None:
    async def story(world: World) -> None:
        while texts(undisturbed(one := job(keep_text=True, prompt="a text"))[0])[4] != "":
            pass
        got = await cut(world, one)
        check(one, got)
        assert got.text == "".join(texts(got.token_ids))
        assert (world.ledger.saved, world.ledger.discarded) == (0, 5)

    run(story)


def test_other_weights_in_mid_stream_lose_nothing() -> None:
    async def story(world: World) -> None:
        first = await world.node("first")
        first.stalls = 5
        one = job()
        asked = world.ask(one)
        await world.until(lambda: len(one.token_ids) == 5)
        await world.node("second")
        first.change(policy="0-1", stalls=100)
        check(one, await asked)
        assert world.ledger.handovers_by == {"refused": 1}
        assert world.ledger.saved == 5

    run(story)


def test_a_finish_reason_is_final_without_an_end_of_the_answer() -> None:
    async def story(world: World) -> None:
        node = await world.node("first")
        node.done = False
        one, two = job(), job()
        check(one, await world.ask(one))
        check(two, await world.ask(two))
        assert len(node.asked) == 2

    run(story)


SAID = {
    "nothing": "without saying why",
    "done": "without saying why",
    "abort": "it stopped after 1 tokens: abort",
    "error": "it said 500: engine died",
    "nonsense": "which is no event",
    "deep": "which is no event",
    "no-token": "which is no event",
    "no-logprobs": "1 tokens with 0 log-probabilities",
    "too-many": "1000 tokens where at most 16",
}


@pytest.mark.parametrize("way", BREAKS)
def test_streams_that_break_in_any_way_are_gone_on_with(way: str) -> None:
    async def story(world: World) -> None:
        bad = await world.node("bad")
        bad.breaks = BREAKS[way]
        jobs = [job(recovery="exact") for _ in range(8)]
        asked = [world.ask(one) for one in jobs]
        await world.until(lambda: all(one.handovers > 0 for one in jobs))
        await world.node("good")
        for one, got in zip(jobs, await asyncio.gather(*asked), strict=True):
            check(one, got)
            assert got.node == "good"
            assert SAID[way] in one.last_failure

    run(story)


def head(line: str) -> bytes:
    return f"HTTP/1.1 {line}\r\n\r\n".encode()


CHUNK = b"ffffffff\r\n"
HTTP = "it does not speak HTTP"
HOSTILE = {
    "nothing": (b"\r\n", "closed"),
    "not HTTP": (b"SSH-2.0-OpenSSH_9.2\r\n", HTTP),
    "an endless header": (b"HTTP/1.1 200 OK\r\nX: " + b"x" * 300_000, "too long a header"),
    "endless headers": (b"HTTP/1.1 200 OK\r\n" + b"X: x\r\n" * 50_000, "too long a header"),
    "another protocol": (head("101 Switching Protocols\r\nUpgrade: h2c\r\nConnection: upgrade"), "101"),
    "no such length": (head("200 OK\r\nContent-Length: -1"), HTTP),
    "two lengths": (head("200 OK\r\nContent-Length: 1\r\nContent-Length: 2"), HTTP),
    "no chunk": (EVENT_STREAM + b"zz\r\n", HTTP),
    "an endless event": (EVENT_STREAM + CHUNK + b"data: " + b"x" * (17 << 20), "more than 16 MiB"),
    "deep": (EVENT_STREAM + CHUNK + b'data: {"choices": [{"text": ' + b"[" * 100_000 + b"}\n\n", "no event"),
    "not text": (EVENT_STREAM + CHUNK + b'data: {"choices": [{"finish_reason": "\xff"}]}\n\n', "no event"),
    "a huge token": (EVENT_STREAM + CHUNK + b'data: {"choices": [{"token_ids": [%d]}]}\n\n' % 2**70, "no event"),
    "an error": (head("500 Oh\r\nContent-Length: 100000") + b"x" * 100_000, "it answered 500: xxx"),
    "no policy of that name": (head("409 Conflict\r\nContent-Length: 4") + b"none", "it answered 409: none"),
    "too many requests": (head("429 Wait\r\nContent-Length: 0"), "it answered 429"),
}


@pytest.mark.parametrize("way", HOSTILE)
def test_no_answer_however_broken_does_harm(way: str) -> None:
    async def story(world: World) -> None:
        bad = await world.node("bad")
        bad.raw, said = HOSTILE[way]
        one = job()
        asked = world.ask(one)
        await world.until(lambda: one.handovers > 0)
        await world.node("good")
        got = await asked
        check(one, got)
        assert got.node == "good"
        assert said in one.last_failure

    run(story)


def test_an_answer_that_nobody_asked_for_is_no_answer_to_the_next_request() -> None:
    async def story(world: World) -> None:
        node = await world.node("first")
        event = b'data: {"choices": [{"token_ids": [], "finish_reason": "stop"}]}\n\n'
        node.extra = head(f"200 OK\r\nContent-Length: {len(event) + 1}") + event
        for _ in range(3):
            one = job()
            check(one, await world.ask(one))
        assert world.ledger.handovers == 0

    run(story)


class Listener:
    """Hears an answer's end."""

    def __init__(self) -> None:
        self.over: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def head(self, status: int) -> None: ...
    def body(self, data: bytes) -> None: ...

    def end(self) -> None:
        self.over.set_result("")

    def lost(self, why: str) -> None:
        self.over.set_result(why)


def test_who_leaves_late_does_not_take_the_next_ones_connection_along() -> None:
    async def story(world: World) -> None:
        node = await world.node("first")
        pool = Pool(node.row.address, None)
        connection, health = await pool.connect(HANG_S), [b"GET /health HTTP/1.1\r\nContent-Length: 0\r\n\r\n"]
        first, second = Listener(), Listener()
        connection.ask(health, first)
        assert await first.over == ""
        assert pool.take() is connection
        connection.ask(health, second)
        connection.leave(first)
        assert await second.over == ""
        pool.close()

    run(story)


def test_a_node_that_leaves_gives_its_jobs_away_at_once() -> None:
    async def story(world: World) -> None:
        first = await world.node("first")
        first.stalls = 5
        one = job()
        asked = world.ask(one)
        await world.until(lambda: len(one.token_ids) == 5)
        await world.node("second")
        world.members.leave("first", first.boot_id)
        check(one, await asked)
        assert world.ledger.handovers_by == {"left": 1}
        await world.until(lambda: first.aborted == 1)

    run(story)


def test_a_rest_that_is_refused_is_asked_for_as_a_whole() -> None:
    async def story(world: World) -> None:
        first = await world.node("first")
        first.stalls = 5
        one = job()
        asked = world.ask(one)
        await world.until(lambda: len(one.token_ids) == 5)
        second = await world.node("second")
        second.refuses = lambda body: len(body["prompt"]) > 3
        first.kill()
        check(one, await asked)
        assert [len(body["prompt"]) for body in second.asked] == [8, 3]
        assert (world.ledger.saved, world.ledger.discarded) == (0, 5)

    run(story)


def test_who_gives_up_frees_the_place_and_the_node() -> None:
    async def story(world: World) -> None:
        node = await world.node("first", max_requests=1)
        node.stalls = 5
        one, two = job(), job()
        asked = world.ask(one)
        await world.until(lambda: len(one.token_ids) == 5)
        waits = world.ask(two)
        await world.until(lambda: two.waiting)
        asked.cancel()
        await world.until(lambda: node.aborted == 1)
        node.change(stalls=100)
        check(two, await waits)

    run(story)


class Asks(SilenceLimits):
    """Asks soon whether a member lives."""

    __slots__ = ()

    soft_s = 0.2  # type: ignore[misc]


class GivesUp(Asks):
    """Does not wait either for what never comes."""

    __slots__ = ()

    hard_s = 0.5


def test_a_server_that_does_not_answer_is_mute_until_it_does() -> None:
    async def story(world: World) -> None:
        node = await world.node("first")
        node.change(stalls=5, deaf=True)
        one = job()
        asked = world.ask(one)
        await world.until(lambda: node.row.mute)
        await world.until(lambda: one.waiting)
        second = await world.node("second")
        check(one, await asked)
        assert second.asked[0]["max_tokens"] == 16 - 5
        assert world.ledger.handovers_by == {"silent": 1}
        await asyncio.sleep(0)  # its agent goes on announcing it
        assert node.row.mute
        node.change(deaf=False, stalls=100)
        await world.until(lambda: not node.row.mute)

    run(story, limits=Asks)


def test_a_dead_server_is_mute_however_often_its_agent_announces_it() -> None:
    async def story(world: World) -> None:
        node = await world.node("first")
        node.kill()
        one = job()
        asked = world.ask(one)
        await world.until(lambda: node.row.mute)
        before_s = node.row.seen_at_s
        await world.until(lambda: node.row.seen_at_s > before_s)
        assert node.row.mute
        await world.node("second")
        check(one, await asked)
        assert world.ledger.handovers_by == {"closed": 1}

    run(story)


def test_an_engine_that_stands_still_behind_a_living_server_is_given_up() -> None:
    async def story(world: World) -> None:
        node = await world.node("first")
        node.stalls = 5
        one = job()
        asked = world.ask(one)
        await world.until(lambda: one.handovers == 1)
        assert not node.row.mute
        await world.node("second")
        node.stalls = 100
        check(one, await asked)
        assert set(world.ledger.handovers_by) == {"silent"}
        assert world.ledger.discarded == 0

    run(story, limits=GivesUp)


def test_a_slow_server_that_answers_is_left_alone() -> None:
    async def story(world: World) -> None:
        node = await world.node("first")
        node.event_s = 0.3  # longer than the soft limit
        one = job(max_tokens=12)
        check(one, await world.ask(one))
        assert world.ledger.handovers == 0

    run(story, limits=Asks)
