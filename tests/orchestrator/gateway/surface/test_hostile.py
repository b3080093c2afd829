"""A gateway among those who mean it ill, or err: one clear line each, and it goes on serving."""

from __future__ import annotations

import asyncio
import copy
import json
import logging
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from grpo_orch.orchestrator.gateway.surface import admission
from grpo_orch.policies.serving.wire import CHAT, HEADER_POLICY, BatchLine
from tests.budget import HANG_S, examples
from tests.rigs.gateway_process import check_complete, hear, make_batch
from tests.rigs.gateway_world import TOKEN, World, serve

ROLLOUTS = "/v1/rollouts"
REFUSAL = b"HTTP/1.1 400 Bad Request\r\nContent-Length: 2\r\n\r\n{}"
PROOF = f"Authorization: Bearer {TOKEN}\r\n"
LOOSE = ("aiohttp", "python", "grpo", "0-0", "traceback", "node")  # what a stranger must not be told
ENDPOINTS = (
    ("GET", "/health"),
    ("GET", "/metrics"),
    ("GET", "/members"),
    ("GET", "/events"),
    ("GET", "/v1/models"),
    ("POST", CHAT),
    ("POST", ROLLOUTS),
    ("POST", "/members/a"),
    ("POST", "/joining/a"),
    ("POST", "/members/a/drain"),
    ("DELETE", "/members/a"),
    ("GET", "/there/is/no/such/path"),
    ("PUT", "/health"),
    ("PATCH", "/coffee"),
)


STRANGERS = (
    "A: b",
    "Authorization: Bearer wrong",
    "Authorization: \xff\xfe",
    "Expect: 100-continue",
    "Expect: a miracle",
    "Upgrade: websocket\r\nConnection: upgrade",
)


@contextmanager
def connected(port: int) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", port), HANG_S) as sock:
        yield sock


def heard(sock: socket.socket, enough: Callable[[bytes], object] = lambda _: False) -> bytes:
    """What is sent until there is enough, or the connection ends."""
    got = b""
    while not enough(got):
        try:
            data = sock.recv(65536)
        except ConnectionResetError:
            break
        if not data:
            break
        got += data
    return got


def answer(port: int, sent: bytes) -> bytes:
    """The answer's head, and what of its body comes with it."""
    with connected(port) as sock:
        sock.sendall(sent)
        return heard(sock, lambda got: b"\r\n\r\n" in got)


def status_of(got: bytes) -> int:
    return int(got.split()[1])


def request(method: str, path: str, body: bytes = b"", headers: str = PROOF) -> bytes:
    return f"{method} {path} HTTP/1.1\r\nHost: x\r\n{headers}Content-Length: {len(body)}\r\n\r\n".encode() + body


@contextmanager
def gateway(**options: Any) -> Iterator[World]:
    """A gateway on a thread of its own, with a node that refuses every request until it is told otherwise."""
    ready, over = threading.Event(), threading.Event()
    found: list[World] = []
    broken: list[BaseException] = []

    async def story(world: World) -> None:
        node = await world.node("node")
        node.raw = REFUSAL
        found.append(world)
        ready.set()
        while not over.is_set():
            await asyncio.sleep(0.01)

    def run() -> None:
        try:
            serve(story, **options)
        except BaseException as error:  # noqa: BLE001  # told below
            broken.append(error)
            ready.set()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert ready.wait(HANG_S)
        yield found[0]
    finally:
        over.set()
        thread.join()
    assert not broken, broken


@contextmanager
def asked(world: World, sent: bytes) -> Iterator[socket.socket]:
    """A connection on which all of it is there when the gateway looks, however slow this thread is to send it."""
    stands, goes_on = threading.Event(), threading.Event()

    def stand_still() -> None:
        stands.set()
        goes_on.wait(HANG_S)

    world.loop.call_soon_threadsafe(stand_still)
    assert stands.wait(HANG_S)
    try:
        with connected(world.port) as sock:
            sock.sendall(sent)
            goes_on.set()
            yield sock
    finally:
        goes_on.set()


def check_serves(world: World) -> None:
    """A correct batch is completed as if nothing had been."""
    world.nodes[0].raw = b""
    batch = make_batch("0-0", requests=16)
    body = msgspec.json.encode(batch)
    with asked(world, request("POST", ROLLOUTS, body, f"{PROOF}Connection: close\r\n")) as sock:
        got = heard(sock)
    lines = [part for part in got.partition(b"\r\n\r\n")[2].split(b"\n") if part.startswith(b"{")]
    check_complete(batch, hear(msgspec.json.decode(line, type=BatchLine) for line in lines))


@pytest.fixture(autouse=True)
def nothing_broke(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    yield
    assert [one for one in caplog.records if one.levelno >= logging.ERROR] == []


def test_request_without_the_secret_reveals_nothing() -> None:
    with gateway() as world:
        for method, path in ENDPOINTS:
            for proof in STRANGERS:
                # The body is announced and never sent: the answer does not wait for it.
                head = f"{method} {path} HTTP/1.1\r\nHost: x\r\n{proof}\r\nContent-Length: 500000000\r\n\r\n"
                with connected(world.port) as sock:
                    sock.sendall(head.encode("latin-1"))
                    got = heard(sock)
                assert status_of(got) == 401, (method, path)
                assert got.partition(b"\r\n\r\n")[2] == b""
                assert not any(word in got.lower().decode() for word in LOOSE), got
        check_serves(world)


HEAD = b"GET /health HTTP/1.1\r\nHost: x\r\n"
POST = b"POST /health HTTP/1.1\r\nHost: x\r\n"
NO_HTTP = [
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # a TLS hello
    b"GET\r\n\r\n",
    b"BREW /coffee HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET / HTTP/9.9\r\nHost: x\r\n\r\n",
    b"GET /\xff HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET http://[ HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    HEAD + b"A B: c\r\n\r\n",
    HEAD + b"A\x00: y\r\n\r\n",
    HEAD + b"A: " + b"a" * 9000 + b"\r\n\r\n",
    HEAD + b"".join(b"A%d: b\r\n" % i for i in range(100)) + b"\r\n",
    POST + b"Content-Length: -1\r\n\r\n",
    POST + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n",
    POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    b"\x00" * 20_000,
]


def test_request_without_http_gets_a_bare_answer() -> None:
    with gateway() as world:
        for sent in NO_HTTP:
            got = answer(world.port, sent)
            assert status_of(got) == 400, (sent[:60], got)
            assert not any(word in got.lower().decode() for word in LOOSE), got
        check_serves(world)


@pytest.mark.parametrize("drip", [b"", b"GET / HTTP/1.1\r\nA: b\r\n"], ids=["silent", "half a head"])
def test_unfinished_head_is_cut_off(drip: bytes) -> None:
    with gateway(head_s=0.3) as world:
        with connected(world.port) as sock:
            sock.sendall(drip)
            assert heard(sock) == b""
        with asked(world, request("GET", "/health")) as sock:  # and so in his second request
            assert status_of(heard(sock, lambda got: b"\r\n\r\n" in got)) == 200
            sock.sendall(b"GET /health HT")
            assert heard(sock) == b""
        check_serves(world)


def test_unfinished_body_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    with gateway() as world:
        with monkeypatch.context() as patch:  # what is sent whole afterwards has its time
            patch.setattr(admission, "BODY_S", 0.2)
            for path in (ROLLOUTS, CHAT, "/members/a"):
                got = answer(world.port, request("POST", path, b"x" * 100)[:-1])
                assert status_of(got) == 408
        check_serves(world)


LIMITS = (
    ("/members/a", admission.ANNOUNCE_SIZE_MAX),
    (CHAT, admission.OPENAI_SIZE_MAX),
    (ROLLOUTS, admission.BATCH_SIZE_MAX),
)


def test_a_body_over_the_limit_is_refused_before_it_is_read() -> None:
    with gateway() as world:
        for path, limit in LIMITS:
            head = f"POST {path} HTTP/1.1\r\nHost: x\r\n{PROOF}Content-Length: {limit + 1}\r\n\r\n"
            assert status_of(answer(world.port, head.encode())) == 413
        check_serves(world)


def test_body_of_unknown_length_is_read_only_to_the_limit() -> None:
    with gateway() as world:
        head = f"POST /members/a HTTP/1.1\r\nHost: x\r\n{PROOF}Transfer-Encoding: chunked\r\n\r\n"
        piece = b"8000\r\n" + b"a" * 0x8000 + b"\r\n"
        assert status_of(answer(world.port, head.encode() + 3 * piece)) == 413
        broken = head.encode() + b"zz\r\nno chunk\r\n"
        assert status_of(answer(world.port, broken)) == 400
        check_serves(world)


def test_a_compressed_body_is_not_unpacked() -> None:
    with gateway() as world:
        sent = request("POST", CHAT, b"\x1f\x8b" + b"\0" * 50, f"{PROOF}Content-Encoding: gzip\r\n")
        assert status_of(answer(world.port, sent)) == 415
        check_serves(world)


def test_unknown_paths_methods_and_names_are_one_line() -> None:
    cases = [
        ("GET", "/nothing", 404),
        ("GET", "/v1/nothing", 404),
        ("GET", ROLLOUTS, 405),
        ("PUT", "/members/a", 405),
        ("PATCH", "/members", 405),
        ("POST", "/members/a%0Ab/drain", 400),
        ("POST", "/members/%FF%FE/drain", 400),
        ("DELETE", "/members/" + "a" * 300, 400),
        ("DELETE", "/members/a?boot=", 400),
        ("DELETE", "/members/a?boot=%0A", 400),
        ("DELETE", "/members/nobody", 404),
    ]
    with gateway() as world:
        for method, path, status in cases:
            got = answer(world.port, request(method, path))
            body = got.partition(b"\r\n\r\n")[2]
            assert (status_of(got), body.count(b"\n") <= 1, len(body) > 5) == (status, True, True), got
        check_serves(world)


# Of another length than that of `check_serves`, which would take over a request that the node has refused.
BATCH: dict[str, Any] = json.loads(msgspec.json.encode(make_batch("0-0", requests=3, max_tokens=8)))
VALID: dict[str, dict[str, Any]] = {
    ROLLOUTS: BATCH,
    CHAT: {
        "messages": [{"role": "user", "content": "a"}],
        "n": 2,
        "seed": 3,
        "max_tokens": 4,
        "logprobs": True,
        "stop": ["a"],
    },
    "/members/fuzz": {"boot_id": "b", "address": "127.0.0.1:9", "policy": "0-7", "max_requests": 1},
}
DEEP = "[" * 9000 + "]" * 9000
DEEP_OBJECT = '{"a":' * 9000 + "1" + "}" * 9000
MARK = "put it here"
# Raw JSON, or what is nearly that.
NUMBERS = ["NaN", "Infinity", "-Infinity", "1e999", "-1", "0", "1.5", "01", str(2**63), str(2**64), "9" * 5000]
TEXTS = ['""', '"\\ud800"', '"\\u0000"', '"\xff"', '"0-0\\r\\nX: y"', '"\u0661-\u0662"', '"']
WHOLES = ["true", "null", "[]", "{}", "[[]]", "[null]", '{"a":NaN}', DEEP, DEEP_OBJECT, "", "'", "}"]
HOSTILE = st.sampled_from([*NUMBERS, *TEXTS, *WHOLES])


def places(document: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    if isinstance(document, dict | list):
        for key in document if isinstance(document, dict) else range(len(document)):
            yield from places(document[key], (*path, key))


@st.composite
def mutated(draw: st.DrawFn) -> tuple[str, bytes]:
    """A request with one to three things in it that are not as they should be."""
    endpoint = draw(st.sampled_from(sorted(VALID)))
    document, hostile = copy.deepcopy(VALID[endpoint]), []
    for number in range(draw(st.integers(1, 3))):
        *path, last = draw(st.sampled_from(sorted(places(document), key=str)))
        target = document
        for key in path:
            target = target[key]
        if isinstance(target, dict) and draw(st.booleans()):
            last = draw(
                st.sampled_from(["extra", "", "stream", "min_tokens", "max_completion_tokens", "é", "model"])
            )
        target[last] = f"{MARK} {number}"
        hostile.append(draw(HOSTILE))
    text = json.dumps(document)
    for number, value in enumerate(hostile):
        text = text.replace(f'"{MARK} {number}"', value)
    return endpoint, text.encode("latin-1", errors="replace")


FUZZ = settings(
    max_examples=examples(150),
    deadline=None,
    suppress_health_check=list(HealthCheck),
    database=None,
    derandomize=True,
)


def test_hostile_documents_are_refused_and_batches_served() -> None:
    with gateway() as world:

        @FUZZ
        @given(mutated())
        def fuzz(case: tuple[str, bytes]) -> None:
            endpoint, body = case
            got = answer(world.port, request("POST", endpoint, body, f"{PROOF}{HEADER_POLICY}: 0-0\r\n"))
            assert status_of(got) in (200, 400, 404, 413), got  # two deep values are too long for an Announce

        fuzz()
        check_serves(world)


def test_a_batch_is_refused_for_each_thing_that_no_node_could_do() -> None:
    first = {"index": 0, "prompt_token_ids": [1], "seed": 1}
    cases: list[dict[str, Any]] = [
        *({"requests": [{**first, "index": index}]} for index in (-1, 10**30)),
        *({"requests": [{**first, "seed": seed}]} for seed in (-1, 2**63)),
        {"requests": [{**first, "prompt_token_ids": []}]},
        {"requests": [first, first]},
        {"requests": [{**first, "index": index} for index in range(70_000)]},
        {"policy": {**BATCH["policy"], "version": "0"}},
        {"policy": {**BATCH["policy"], "digest": "a\nb"}},
        {"deadline_s": 0},
        {"recovery": "maybe"},
        *({"sampling": {"max_tokens": tokens}} for tokens in (-1, True)),
        {"sampling": {"min_tokens": 0.5}},
        {"sampling": {"stream": False}},
        {"sampling": {"n": 2}},
    ]
    with gateway() as world:
        for change in cases:
            got = answer(world.port, request("POST", ROLLOUTS, json.dumps({**BATCH, **change}).encode()))
            assert status_of(got) == 400, str(change)[:200]
        check_serves(world)


def test_an_announcement_is_refused_when_no_agent_could_mean_it() -> None:
    good = VALID["/members/fuzz"]
    changes: list[dict[str, Any]] = [
        {"address": "nowhere"},
        {"address": "host:0"},
        {"address": "host:65536"},
        {"address": "a b:80"},
        {"boot_id": ""},
        {"boot_id": "b\r\nX: y"},
        {"policy": "é"},
        {"max_requests": 0},
        {"max_requests": 10**40},
        {"kv_tokens": -1},
        {"engine": {"running": -1}},
        {"engine": {"tokens": 10**40}},
        {"engine": {"kv_usage": 1.5}},
        {"stages": {"policy": "0-1", "fetch_s": -1.0}},
        {"stages": {"policy": "0-1", "fetched_bytes": -1}},
    ]
    with gateway() as world:
        for change in changes:
            got = answer(world.port, request("POST", "/members/fuzz", json.dumps({**good, **change}).encode()))
            assert status_of(got) == 400, change
        check_serves(world)
