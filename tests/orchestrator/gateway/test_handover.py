"""Jobs that lose their node in every way: each comes to what the undisturbed one would have been."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from grpo_orch.orchestrator.gateway.job import Finished, Job
from grpo_orch.orchestrator.gateway.nodes.connection import Pool
from grpo_orch.policies.serving.silence_limits import SilenceLimits
from grpo_orch.policies.serving.wire import Handover
from tests.budget import HANG_S
from tests.rigs.gateway_world import Node, World, check, job, undisturbed
from tests.stand_ins.fake_vllm import EVENT_STREAM, FOREVER, completion


async def begun(world: World, one: Job, tokens: int = 5) -> tuple[Node, asyncio.Task[Finished]]:
    """Ask, and let the job's first node stall once so many tokens have arrived; return when there is another."""
    first = await world.node("first", stalls=tokens)
    asked = await world.begun(one, tokens)
    await world.node("second")
    return first, asked


async def cut(world: World, one: Job, *, tokens: int = 5) -> Finished:
    """Have the job done, and kill its first node when so many tokens of it have arrived."""
    first, asked = await begun(world, one, tokens)
    first.kill()
    got = await asked
    check(one, got)
    assert (got.node, len(world.nodes[1].asked)) == ("second", 1)
    return got


@pytest.mark.parametrize("tokens", [1, 5, 13])
async def test_job_continues_from_the_tokens_that_arrived(world: World, tokens: int) -> None:
    body: dict[str, Any] = {"min_tokens": 6, "stop_token_ids": list(range(0, 1000, 20)), "max_tokens": 17}
    while len(undisturbed(one := job(**body))[0]) <= tokens:
        pass
    await cut(world, one, tokens=tokens)
    asked = world.nodes[1].asked[0]
    assert asked["prompt"] == [1, 2, 3, *one.token_ids[: len(asked["prompt"]) - 3]]
    arrived = len(asked["prompt"]) - 3
    assert arrived == tokens
    assert (asked["max_tokens"], asked["min_tokens"]) == (17 - arrived, max(0, 6 - arrived))
    assert (world.ledger.saved, world.ledger.discarded) == (arrived, 0)
    assert world.ledger.replayed == 3 + arrived
    assert world.ledger.handovers_by_reason == {"lost": 1}
    assert one.handed_over == [Handover("first", arrived)]


@pytest.mark.parametrize(
    "body",
    [{"recovery": "exact"}, {"presence_penalty": 0.5}, {"stop": ["x"]}, {"bad_words": ["x"]}, {"what": "is this"}],
    ids=str,
)
async def test_a_job_that_cannot_go_on_starts_over(world: World, body: dict[str, Any]) -> None:
    one = job(**body)
    await cut(world, one)
    assert world.nodes[1].asked[0]["prompt"] == [1, 2, 3]
    assert (world.ledger.saved, world.ledger.discarded, one.discarded) == (0, 5, 5)
    assert one.handed_over == [Handover("first", 0)]


async def test_job_that_starts_over_is_made_by_one_node(world: World) -> None:
    """Their last bits differ, as on GPUs whose sums follow the batch."""
    first, one = await world.node("first", unequal="first", stalls=9), job(stop=["never"], max_tokens=40)
    asked = world.ask(one)
    await world.until(lambda: first.stalled)
    await world.node("second", unequal="second")
    first.kill()
    assert (await asked).token_ids == completion(one.body, [1, 2, 3], "second")[0]


@pytest.mark.parametrize("why", ["refused", "term_ended"])
async def test_other_weights_or_a_leaving_node_lose_nothing(world: World, why: str) -> None:
    one = job()
    first, asked = await begun(world, one)
    if why == "refused":
        first.change(policy="0-1", stalls=FOREVER)
    else:
        world.members.leave("first", first.boot_id)
    check(one, await asked)
    assert (world.ledger.handovers_by_reason, world.ledger.saved) == ({why: 1}, 5)
    await world.until(lambda: first.aborted == (why == "term_ended"))


async def test_a_finish_reason_is_final_without_an_end_of_the_answer(world: World) -> None:
    node = await world.node("first", done=False)
    one, two = job(), job()
    check(one, await world.ask(one))
    check(two, await world.ask(two))
    assert len(node.asked) == 2


def head(line: str) -> bytes:
    return f"HTTP/1.1 {line}\r\n\r\n".encode()


CHUNK = b"ffffffff\r\n"
HTTP = "invalid HTTP response"
# A node's answers, each with a part of what is reported of it.
HOSTILE = {
    "nothing": (b"\r\n", "closed"),
    "not HTTP": (b"SSH-2.0-OpenSSH_9.2\r\n", HTTP),
    "an endless header": (b"HTTP/1.1 200 OK\r\nX: " + b"x" * 300_000, "response header over 64 KiB"),
    "endless headers": (b"HTTP/1.1 200 OK\r\n" + b"X: x\r\n" * 50_000, "response header over 64 KiB"),
    "another protocol": (head("101 Switching Protocols\r\nUpgrade: h2c\r\nConnection: upgrade"), "101"),
    "no such length": (head("200 OK\r\nContent-Length: -1"), HTTP),
    "two lengths": (head("200 OK\r\nContent-Length: 1\r\nContent-Length: 2"), HTTP),
    "no chunk": (EVENT_STREAM + b"zz\r\n", HTTP),
    "an endless event": (EVENT_STREAM + CHUNK + b"data: " + b"x" * (17 << 20), "sent an event over 16 MiB"),
    "deep": (
        EVENT_STREAM + CHUNK + b'data: {"choices": [{"text": ' + b"[" * 100_000 + b"}\n\n",
        "sent an invalid event",
    ),
    "not text": (
        EVENT_STREAM + CHUNK + b'data: {"choices": [{"finish_reason": "\xff"}]}\n\n',
        "sent an invalid event",
    ),
    "a huge token": (
        EVENT_STREAM + CHUNK + b'data: {"choices": [{"token_ids": [%d]}]}\n\n' % 2**70,
        "sent an invalid event",
    ),
    "an error": (head("500 Oh\r\nContent-Length: 100000") + b"x" * 100_000, "answered 500: xxx"),
    "no policy of that name": (head("409 Conflict\r\nContent-Length: 4") + b"none", "answered 409: none"),
    "too many requests": (head("429 Wait\r\nContent-Length: 0"), "answered 429"),
}
# How a stream may end after its first event without being complete, and a part of what is reported of it.
BREAKS = {
    "nothing": (b"", "without a finish reason"),
    "done": (b"data: [DONE]\n\n", "without a finish reason"),
    "abort": (
        b'data: {"choices": [{"index": 0, "token_ids": [], "finish_reason": "abort"}]}\n\ndata: [DONE]\n\n',
        "stopped after 1 tokens: abort",
    ),
    "error": (
        b'data: {"error": {"message": "engine died", "code": 500}}\n\ndata: [DONE]\n\n',
        "reported 500: engine died",
    ),
    "nonsense": (b"data: {\n\n", "sent an invalid event"),
    "deep": (b'data: {"choices": [], "x": ' + b"[" * 50_000 + b"\n\n", "sent an invalid event"),
    "no-token": (
        b'data: {"choices": [{"token_ids": [-1], "logprobs": {"token_logprobs": [0.0]}}]}\n\n',
        "sent an invalid event",
    ),
    "no-logprobs": (
        b'data: {"choices": [{"index": 0, "token_ids": [1], "finish_reason": "stop"}]}\n\n',
        "1 tokens with 0 log-probabilities",
    ),
    "too-many": (
        b'data: {"choices": [{"token_ids": %a, "logprobs": {"token_logprobs": %a}}]}\n\n'
        % ([7] * 999, [-1.0] * 999),
        "sent 1000 tokens, more than the limit of 16",
    ),
}
WAYS = [({"raw": raw}, said) for raw, said in HOSTILE.values()]
WAYS += [({"breaks": breaks}, said) for breaks, said in BREAKS.values()]


@pytest.mark.parametrize(("behaviour", "said"), WAYS, ids=[*HOSTILE, *(f"stream: {way}" for way in BREAKS)])
async def test_no_answer_however_broken_does_harm(world: World, behaviour: dict[str, Any], said: str) -> None:
    await world.node("bad", **behaviour)
    jobs = [job(recovery="exact") for _ in range(4)]
    asked = [world.ask(one) for one in jobs]
    await world.until(lambda: all(one.last_failure for one in jobs))
    await world.node("good")
    for one, got in zip(jobs, await asyncio.gather(*asked), strict=True):
        check(one, got)
        assert got.node == "good"
        assert said in one.last_failure


async def test_unrequested_answer_is_none_to_the_next_request(world: World) -> None:
    node = await world.node("first")
    event = b'data: {"choices": [{"token_ids": [], "finish_reason": "stop"}]}\n\n'
    node.extra = head(f"200 OK\r\nContent-Length: {len(event) + 1}") + event
    for _ in range(3):
        one = job()
        check(one, await world.ask(one))
    assert world.ledger.handovers == 0


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


async def test_late_end_does_not_take_the_next_connection_along(world: World) -> None:
    node = await world.node("first")
    pool = Pool(node.row.address, None)
    connection, health = await pool.connect(HANG_S), [b"GET /health HTTP/1.1\r\nContent-Length: 0\r\n\r\n"]
    first, second = Listener(), Listener()
    connection.send(health, first)
    assert await first.over == ""
    assert pool.take() is connection
    connection.send(health, second)
    connection.cancel(first)
    assert await second.over == ""
    pool.close()


async def test_refused_continuation_is_requested_as_a_whole(world: World) -> None:
    one = job()
    first, asked = await begun(world, one)
    second = world.nodes[1]
    second.refuses = lambda body: len(body["prompt"]) > 3
    first.kill()
    check(one, await asked)
    assert [len(body["prompt"]) for body in second.asked] == [8, 3]
    assert (world.ledger.saved, world.ledger.discarded) == (0, 5)


async def test_abandoned_request_frees_place_and_node(world: World) -> None:
    node = await world.node("first", max_requests=1, stalls=5)
    two = job()
    asked = await world.begun(job())
    waits = world.ask(two)
    await world.until(lambda: two.is_waiting)
    asked.cancel()
    await world.until(lambda: node.aborted == 1)
    node.change(stalls=FOREVER)
    check(two, await waits)


class Asks(SilenceLimits):
    """Asks soon whether a member lives."""

    __slots__ = ()

    soft_s = 0.2  # type: ignore[misc]


async def test_a_server_that_does_not_answer_is_mute_until_it_does(world: World) -> None:
    world.limits = Asks
    node = await world.node("first", stalls=5, deaf=True)
    one = job()
    asked = world.ask(one)
    await world.until(lambda: node.row.is_unresponsive)
    await world.until(lambda: one.is_waiting)
    second = await world.node("second")
    check(one, await asked)
    assert second.asked[0]["max_tokens"] == 16 - 5
    assert world.ledger.handovers_by_reason == {"silent": 1}
    await asyncio.sleep(0)  # its agent goes on announcing it
    assert node.row.is_unresponsive
    node.change(deaf=False, stalls=100)
    await world.until(lambda: not node.row.is_unresponsive)


async def test_dead_server_is_unresponsive_despite_announcements(world: World) -> None:
    node = await world.node("first")
    node.kill()
    one = job()
    asked = world.ask(one)
    await world.until(lambda: node.row.is_unresponsive)
    before_s = node.row.announced_at_s
    await world.until(lambda: node.row.announced_at_s > before_s)
    assert node.row.is_unresponsive
    await world.node("second")
    check(one, await asked)
    assert world.ledger.handovers_by_reason == {"closed": 1}


async def test_slow_server_that_answers_is_not_ended(world: World) -> None:
    world.limits = Asks
    await world.node("first", event_s=0.3)  # longer than the soft limit
    one = job(max_tokens=12)
    check(one, await world.ask(one))
    assert world.ledger.handovers == 0
