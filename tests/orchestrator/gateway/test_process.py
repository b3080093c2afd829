"""The gateway as a process among processes: what it says, to whom, and what it does with nonsense."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import msgspec
import pytest

from policies.serving.wire import REFUSED, Batch
from tests.budget import HANG_S, until
from tests.rigs.gateway_process import TOKEN, Rig, check_complete, hear, make_batch


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path)
    yield rig
    rig.stop()


def test_a_batch_is_completed_by_all_members_with_the_same_tokens_every_time(rig: Rig) -> None:
    rig.gateway(calm=True)
    rig.node("rollout-0")
    rig.node("rollout-1")
    rig.until_members("rollout-0", "rollout-1")
    first, second = make_batch("0-0"), make_batch("0-1")
    for batch in (first, second):  # the second policy reaches the nodes through their held announcements
        heard = rig.complete(batch)
        check_complete(batch, heard)
        assert heard.end is not None
        assert heard.end.discarded == 0
    told = until("every token", lambda: (one := rig.status()).tokens_delivered >= 2 * 32 * 16 and one)
    assert (told.policy, told.tokens_delivered, told.tokens_discarded, told.handovers) == (
        "0-1",
        2 * 32 * 16,
        0,
        0,
    )
    seen = [line for name in ("rollout-0", "rollout-1") for line in rig.seen(name)]
    assert {line["status"] for line in seen} == {200}
    assert Counter(line["policy"] for line in seen) == {"0-0": 32, "0-1": 32}


def test_load_is_spread_and_a_prompts_group_stays_together(rig: Rig) -> None:
    rig.gateway(calm=True)
    rig.node("rollout-0", event_s=0.05)
    rig.node("rollout-1", event_s=0.05)
    rig.until_members("rollout-0", "rollout-1")
    rig.complete(make_batch("0-0", requests=2))  # until both hold it
    until("both serving", lambda: all(one.serving for one in rig.status().members))
    batch = make_batch("0-0")
    rig.complete(batch)  # until both are eased in
    heard = rig.complete(batch)
    nodes = [{one.node for one in heard.completions[group : group + 8]} for group in range(0, 32, 8)]
    assert all(len(group) == 1 for group in nodes)
    assert Counter(one.node for one in heard.completions) == {"rollout-0": 16, "rollout-1": 16}


def test_a_full_member_is_given_no_more_than_it_takes(rig: Rig) -> None:
    rig.gateway()
    rig.node("rollout-0", event_s=0.01, max_requests=3)
    batch = make_batch("0-0", requests=10)
    check_complete(batch, rig.complete(batch))
    seen = rig.seen("rollout-0")
    assert max(line["running"] for line in seen) == 3
    assert {line["status"] for line in seen} == {200}


def test_nothing_is_said_without_the_secret(rig: Rig) -> None:
    rig.gateway()
    for given in (None, b"Bearer wrong", TOKEN.encode(), "Bearer é".encode("latin-1")):
        headers = {} if given is None else {b"Authorization": given}
        for method, path in (
            ("GET", "/health"),
            ("GET", "/nowhere"),
            ("POST", "/comers/rollout-0"),
            ("POST", "/v1/rollouts"),
            ("POST", "/members/rollout-0"),
            ("POST", "/members/rollout-0/drain"),
            ("DELETE", "/members/rollout-0?boot=x"),
        ):
            answer = httpx.request(method, f"{rig.url}{path}", headers=headers, timeout=HANG_S)
            assert (answer.status_code, answer.content) == (401, b"")
            assert not answer.headers.get("server")


def change(batch: Batch, **fields: object) -> bytes:
    return msgspec.json.encode(replace(batch, **fields))  # type: ignore[arg-type]  # wrong on purpose


def test_malformed_bodies_are_refused_and_do_no_harm(rig: Rig) -> None:
    rig.gateway()
    batch = make_batch("0-0", requests=2)
    bodies = [
        b"",
        b"{",
        b"[]",
        b"\xff\xfe",
        b'{"policy": null}',
        change(batch, requests=[{"index": 0, "prompt_token_ids": ["a"], "seed": 1}]),
        change(batch, requests=[{"index": 0, "prompt_token_ids": [], "seed": 1}]),
        change(batch, requests=[{"index": 0, "prompt_token_ids": [1], "seed": -1}]),
        change(batch, requests=[batch.requests[0], batch.requests[0]]),
        change(batch, policy={"version": "newest", "prefix": "x"}),
        change(batch, sampling={"n": 2}),
        change(batch, deadline_s=0),
    ]
    for body in bodies:
        answer = rig.http.post(f"{rig.url}/v1/rollouts", content=body)
        assert answer.status_code == 400, (body, answer.text)
        assert rig.http.post(f"{rig.url}/members/rollout-0", content=body).status_code == 400
    assert rig.http.delete(f"{rig.url}/members/rollout-0?boot=").status_code == 400
    assert rig.http.post(f"{rig.url}/members/rollout-0", content=b" " * 100_000).status_code == 413
    assert rig.status().members == []
    rig.node("rollout-0")
    check_complete(batch, rig.complete(batch))


def test_a_request_that_no_node_takes_is_told_in_its_place(rig: Rig) -> None:
    rig.gateway()
    rig.node("rollout-0", status=400)
    heard = rig.complete(make_batch("0-0", requests=1))
    assert heard.error is None
    (refused,) = heard.completions
    assert (refused.token_ids, refused.finish_reason, refused.node) == ([], REFUSED, "rollout-0")
    assert "vLLM answered 400" in refused.refused
    assert "refused by the stand-in" in refused.refused


@pytest.mark.parametrize("failing", [{"status": 409}, {"breaks": "nothing"}], ids=str)
def test_a_failing_node_is_left_for_another(rig: Rig, failing: dict[str, int | str]) -> None:
    rig.gateway()
    rig.node("rollout-0", **failing)
    rig.until_members("rollout-0")
    batch = make_batch("0-0", requests=8, recovery="exact")  # else a broken node finishes them token by token
    lines = rig.ask(batch)
    assert next(lines).progress is not None
    until("the first failure", lambda: rig.status().handovers > 0)
    rig.node("rollout-1")
    heard = hear(lines)
    check_complete(batch, heard)
    assert {one.node for one in heard.completions} == {"rollout-1"}


def test_with_nobody_to_serve_a_batch_waits_until_its_deadline_and_says_why(rig: Rig) -> None:
    rig.gateway(calm=True)
    rig.node("rollout-0", never_load=True)
    rig.until_members("rollout-0")
    waiting = rig.ask(make_batch("0-7"))  # a slow gateway's first word comes after a short deadline
    told = next(one for line in waiting if (one := line.progress) and one.waiting == 32)
    assert (told.tokens, told.members) == (0, 0)
    waiting.close()  # type: ignore[attr-defined]  # it is a generator; closing it closes the connection
    *_, last = rig.ask(make_batch("0-7", deadline_s=1.0))
    assert last.error is not None
    assert "no node could serve policy 0-7 within 1 s" in last.error
    assert "rollout-0 holds base weights" in last.error
    assert rig.seen("rollout-0") == []
    until("nobody waits", lambda: rig.status().requests_waiting == 0)


def test_a_drained_node_finishes_what_it_has_and_leaves(rig: Rig, tmp_path: Path) -> None:
    rig.gateway()
    seen = tmp_path / "seen"
    leaving = rig.node("rollout-0", until=seen)  # else it may be gone before anybody sees that it drains
    rig.until_members("rollout-0")
    batch = make_batch("0-0", requests=4)
    lines = rig.ask(batch)
    heard = [next(line for line in lines if line.progress is not None and line.progress.tokens > 0)]
    rig.http.post(f"{rig.url}/members/rollout-0/drain")
    drained = until("it drains", lambda: (one := rig.member("rollout-0")) and one.draining and one)
    assert not drained.serving
    seen.touch()
    heard += list(lines)
    assert sum(line.completion is not None for line in heard) == 4
    assert heard[-1].end is not None
    assert heard[-1].end.discarded == 0
    assert leaving.wait(timeout=HANG_S) == 0
    rig.until_members()


def test_sigterm_ends_the_gateway_in_good_order(rig: Rig) -> None:
    gateway = rig.gateway()
    rig.node("rollout-0")
    rig.until_members("rollout-0")
    gateway.send_signal(signal.SIGTERM)
    assert gateway.wait(timeout=HANG_S) == 0
