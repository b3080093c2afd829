"""Nodes, gateway and trainer killed with requests in flight: nothing fails, and the tokens are the same."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import httpx
import pytest

from orchestrator.control.observe import FRESH_S, GatewayWatch
from policies.serving.wire import BatchLine
from tests.budget import until
from tests.rigs.gateway_process import Rig, check_complete, hear, kill, make_batch


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path)
    rig.gateway()
    yield rig
    rig.stop()


@pytest.fixture
def calm_rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path)
    rig.gateway(calm=True)
    yield rig
    rig.stop()


@pytest.fixture
def go_on(tmp_path: Path) -> Path:
    """What nodes wait for after the first tokens of an answer: so none is whole before the test has acted."""
    return tmp_path / "go-on"


def until_tokens(lines: Iterator[BatchLine]) -> list[BatchLine]:
    """Read on until tokens have arrived, and return what was read."""
    read = []
    for line in lines:
        read.append(line)
        if line.progress is not None and line.progress.tokens > 0:
            return read
    raise AssertionError("the batch ended before a progress line with tokens in it")


@pytest.mark.parametrize("recovery", ["continue", pytest.param("exact", marks=pytest.mark.slow)])
def test_one_of_two_nodes_is_killed_with_requests_in_flight(
    rig: Rig, go_on: Path, recovery: Literal["continue", "exact"]
) -> None:
    victim = rig.node("rollout-0", until=go_on)
    other = rig.node("rollout-1")
    rig.until_members("rollout-0", "rollout-1")
    rig.complete(make_batch("0-0", requests=2, max_tokens=1))
    until("both serving", lambda: all(one.serving for one in rig.status().members))
    batch = make_batch("0-0", recovery=recovery)
    other.send_signal(signal.SIGSTOP)  # so that the first tokens are the victim's
    lines = rig.ask(batch)
    read = until_tokens(lines)
    kill(victim)
    other.send_signal(signal.SIGCONT)
    heard = hear(iter([*read, *lines]))
    check_complete(batch, heard)
    assert {one.node for one in heard.completions} == {"rollout-1"}
    assert heard.end is not None
    told = until("every handover", lambda: (status := rig.status()).handovers >= 8 and status)
    if recovery == "exact":
        assert heard.end.discarded == told.tokens_discarded > 0
        assert told.tokens_saved == 0
        assert max(line["prompt"] for line in rig.seen("rollout-1")) == 3
    else:
        assert heard.end.discarded == told.tokens_discarded == 0
        assert told.tokens_saved > 0
        moved = [line for line in rig.seen("rollout-1") if line["prompt"] > 3]
        assert {line["prompt"] + line["max_tokens"] for line in moved} == {3 + 16}
        replayed = sum(line["prompt"] for line in moved)
        until("what was replayed", lambda: rig.status().tokens_replayed >= replayed)


@pytest.mark.slow
def test_all_nodes_are_killed_and_the_batch_waits_for_their_successors(rig: Rig, go_on: Path) -> None:
    victims = [rig.node(name, until=go_on) for name in ("rollout-0", "rollout-1")]
    rig.until_members("rollout-0", "rollout-1")
    batch = make_batch("0-0")
    lines = rig.ask(batch)
    read = until_tokens(lines)
    for victim in victims:
        kill(victim)
    read += [waiting := next(line for line in lines if line.progress is not None and line.progress.waiting == 32)]
    assert waiting.progress is not None
    assert waiting.progress.members == 0
    rig.node("rollout-2")
    rig.node("rollout-3")
    heard = hear(iter([*read, *lines]))
    check_complete(batch, heard)
    assert {one.node for one in heard.completions} <= {"rollout-2", "rollout-3"}


def test_an_idle_node_that_dies_is_out_before_it_counts_as_silent(calm_rig: Rig) -> None:
    """To this gateway nobody ever does; it holds the node's announcement, and so has no moment without one."""
    victim = calm_rig.node("rollout-0")
    calm_rig.until_members("rollout-0")
    calm_rig.complete(make_batch("0-0", requests=1))
    kill(victim)
    calm_rig.until_members()
    assert "connection was lost" in calm_rig.status().changes[-1].reason


@pytest.mark.slow
def test_a_silent_node_is_out_and_its_requests_move(rig: Rig, go_on: Path) -> None:
    frozen = rig.node("rollout-0", until=go_on)
    rig.until_members("rollout-0")
    batch = make_batch("0-0", requests=4)
    lines = rig.ask(batch)
    read = until_tokens(lines)
    frozen.send_signal(signal.SIGSTOP)  # as a machine that vanished: no connection breaks
    rig.node("rollout-1")
    heard = hear(iter([*read, *lines]))
    check_complete(batch, heard)
    assert {one.node for one in heard.completions} == {"rollout-1"}
    rig.until_members("rollout-1")
    frozen.send_signal(signal.SIGCONT)  # the same boot, with its policy: it simply goes on
    rig.until_members("rollout-0", "rollout-1")


@pytest.mark.slow
def test_a_node_that_restarts_on_base_weights_gets_no_request(rig: Rig, go_on: Path) -> None:
    victim = rig.node("rollout-0", until=go_on)
    rig.until_members("rollout-0")
    before = rig.member("rollout-0")
    assert before is not None
    batch = make_batch("0-0")
    lines = rig.ask(batch)
    read = until_tokens(lines)
    kill(victim)
    seen = len(rig.seen("rollout-0"))
    rig.node("rollout-0", port=before.address.rpartition(":")[2], never_load=True)
    after = until("a new boot", lambda: (one := rig.member("rollout-0")) and one.boot_id != before.boot_id and one)
    assert (after.address, after.policy, after.serving) == (before.address, None, False)
    rig.node("rollout-1")
    heard = hear(iter([*read, *lines]))
    check_complete(batch, heard)
    assert len(rig.seen("rollout-0")) == seen
    assert {one.node for one in heard.completions} == {"rollout-1"}


def test_a_killed_gateway_comes_back_on_its_port_and_members_return_by_themselves(rig: Rig) -> None:
    rig.node("rollout-0")
    rig.node("rollout-1")
    rig.until_members("rollout-0", "rollout-1")
    rig.complete(make_batch("0-0"))
    url, boot_id = rig.url, rig.status().boot_id
    kill(rig.processes[0])
    with pytest.raises(httpx.TransportError):
        rig.http.get(f"{rig.url}/health")
    rig.gateway()
    assert rig.url == url
    assert rig.status().boot_id != boot_id
    rig.until_members("rollout-0", "rollout-1")
    batch = make_batch("0-0")
    check_complete(batch, rig.complete(batch))


@pytest.mark.slow
def test_who_watches_the_store_sees_members_come_and_go_and_does_not_believe_a_dead_gateway(rig: Rig) -> None:
    now_s = 0.0  # stands still while the gateway is at work, however slowly
    watch = GatewayWatch(rig.store, clock=lambda: now_s)

    def seen() -> set[str] | None:
        status = watch.look()
        return None if status is None else {one.node for one in status.members}

    victim = rig.node("rollout-0")
    until("a member", lambda: seen() == {"rollout-0"})
    kill(victim)
    until("no member", lambda: seen() == set())
    rig.node("rollout-1")
    until("another member", lambda: seen() == {"rollout-1"})
    kill(rig.processes[0])
    assert seen() == {"rollout-1"}
    now_s += FRESH_S
    assert seen() is None
    rig.gateway()
    until("its successor's word", lambda: seen() == {"rollout-1"})


@pytest.mark.slow
def test_a_trainer_that_goes_away_frees_the_nodes_and_its_tokens_are_told_to_the_next(
    rig: Rig, go_on: Path
) -> None:
    rig.node("rollout-0", until=go_on)
    lines = rig.ask(make_batch("0-0"))
    abandoned = until_tokens(lines)[-1].progress
    assert abandoned is not None
    lines.close()  # type: ignore[attr-defined]  # it is a generator; closing it closes the connection
    told = until("it is given up", lambda: (one := rig.status()).tokens_discarded >= abandoned.tokens and one)
    assert [one.requests_running for one in told.members] == [0]
    go_on.touch()
    batch = make_batch("0-0", requests=1)
    heard = rig.complete(batch)
    check_complete(batch, heard)
    assert heard.end is not None
    assert heard.end.discarded >= abandoned.tokens
    again = rig.complete(batch)
    assert again.end is not None
    assert again.end.discarded == 0  # told once
