"""The membership table: a truth table of single occurrences. Sequences of them: `test_membership_property`."""

from __future__ import annotations

from dataclasses import replace

import pytest

from grpo_orch.policies.serving.gateway_status import MembershipChange
from grpo_orch.policies.serving.membership import (
    EASE_IN_REQUESTS,
    Change,
    Load,
    Membership,
)
from grpo_orch.policies.serving.wire import SILENT_S, Announce, EngineStats

ONE = Load("p")


def say(boot_id: str, policy: str | None = "0-1", max_requests: int = 4) -> Announce:
    return Announce(boot_id, "127.0.0.1:1", policy, max_requests)


@pytest.fixture
def table() -> Membership:
    """One member, `a`, boot `x`, holding 0-1, seen at 0 s."""
    table = Membership()
    table.announce("a", say("x"), 0.0)
    return table


def reason(change: Change | None) -> str:
    assert change is not None
    return change.reason


def test_journalled_change_names_the_members_concerned(table: Membership) -> None:
    table.announce("b", say("y"), 0.0)
    silent = table.expire(9.0)
    joined = table.announce("a", replace(say("z"), unfit="policy 0-1: disk\tfull"), 9.0)
    for change, nodes in ((silent, ["a", "b"]), (joined, ["a"])):
        assert change is not None
        written = MembershipChange(1, 0.0, change.reason)
        assert written.nodes == nodes == list(change.nodes)
        assert written.description == " ".join(change.description.split())


def test_each_occurrence_gives_its_reason(table: Membership) -> None:
    assert reason(table.announce("b", say("y", None), 0.0)) == "b: joined as boot y, holds base weights"
    assert reason(table.announce("b", say("y", "0-1"), 0.5)) == "b: holds 0-1, before: base weights"
    assert reason(table.announce("b", say("z", None), 0.6)) == "b: boot z replaces y, holds base weights"
    assert table.announce("b", say("y", "0-1"), 0.7) is None
    assert reason(table.drain("a")) == "a: drains, 0 requests running"
    assert reason(table.connection_lost("a", "x")) == "a: lost its announcing connection"
    assert reason(table.leave("b", "z")) == "b: left"
    assert table.leave("b", "z") is table.expire(9.0) is table.remove("b") is None


def test_silence_ends_the_term_just_after_the_limit(table: Membership) -> None:
    assert table.expire(SILENT_S) is None
    assert table.expire(SILENT_S + 0.01) == Change(("a",), "no announcement for 2.5 s", (1,))


def eased_in(table: Membership, node: str) -> None:
    table.announce(node, say(f"boot-{node}", max_requests=1000), 0.0)
    term = table.members[-1].term
    for _ in range(1000):
        table.first_token(node, term, Load(None))
    assert table.members[-1].allowed == 1000


def test_node_reporting_unfit_is_no_longer_awaited(table: Membership) -> None:
    wanted = "0-2"
    assert [row.node for row in table.loading(wanted)] == ["a"]
    why = "policy 0-2: no such tensor"
    change = table.announce("a", Announce("x", "h:1", None, 4, unfit=why), 0.1)
    assert reason(change) == f"a: holds base weights, unfit: {why}"
    assert table.announce("a", Announce("x", "h:1", None, 4, unfit=why), 0.2) is None
    assert table.loading(wanted) == ()
    again = table.announce("a", say("x", "0-2"), 0.3)
    assert reason(again) == "a: holds 0-2, no longer unfit"
    assert [row.node for row in table.serving(wanted)] == ["a"]


def test_policy_refused_by_all_members_is_named_as_broken(table: Membership) -> None:
    unfit = [Announce(boot, "h:1", None, 4, unfit="policy 0-2: no such tensor") for boot in ("x", "y")]
    assert "all other" not in reason(table.announce("a", unfit[0], 0.1))
    assert reason(table.announce("b", unfit[1], 0.2)) == (
        "b: joined as boot y, holds base weights, unfit: policy 0-2: no such tensor; "
        "all other members are unfit too, so the policy is broken and not the nodes"
    )


@pytest.mark.parametrize(
    ("word", "allowed"),
    [
        (EngineStats(running=60, waiting=40, kv_usage=0.99), 60),  # the rest waits for room
        (EngineStats(running=100, preemptions=1), 100),  # some have lost theirs
        (EngineStats(running=60, waiting=40, kv_usage=0.3), 1000),  # they wait for their prompts' turn
        (EngineStats(running=100, waiting=0, kv_usage=0.99), 1000),
        (EngineStats(running=2, waiting=1, kv_usage=1.0), EASE_IN_REQUESTS),
        (None, 1000),
    ],
)
def test_full_engine_gets_no_more_than_it_runs(word: EngineStats | None, allowed: int) -> None:
    table = Membership()
    eased_in(table, "a")
    first = replace(say("boot-a", max_requests=1000), engine=EngineStats())
    table.announce("a", first, 0.1)
    table.announce("a", replace(first, engine=word), 0.2)
    assert table.members[0].allowed == allowed
    table.first_token("a", table.members[0].term, ONE)
    assert table.members[0].allowed == min(allowed + 1, 1000)


def test_failed_request_costs_one_place_and_failed_member_all() -> None:
    table = Membership()
    eased_in(table, "a")
    term = table.members[0].term
    for _ in range(100):
        table.request_started("a", ONE)
    table.suspect("a", term, "reset")
    assert table.members[0].allowed == 99
    for _ in range(100):
        table.request_finished("a", term, ONE, got_token=True)
        table.suspect("a", term, "reset")
    assert table.members[0].allowed == EASE_IN_REQUESTS
    table.suspect("a", term, "stands still", whole=True)
    assert table.members[0].allowed == 1


def test_stuck_member_is_used_last_until_a_token_or_policy() -> None:
    table = Membership()
    for node in ("a", "b"):
        eased_in(table, node)
    stuck, well = table.members

    def chosen() -> str | None:
        row = table.choose("0-1", ONE)
        return None if row is None else row.node

    def a_hangs() -> None:
        table.suspect("a", stuck.term, "no token", whole=True)
        table.announce("a", say("boot-a", max_requests=1000), 0.1)

    a_hangs()
    table.request_started("b", Load("p", 9))
    assert chosen() == "b"
    while well.free_slots:
        table.request_started("b", ONE)
    assert chosen() == "a"
    table.first_token("a", stuck.term, ONE)
    assert not stuck.is_stuck
    a_hangs()
    table.announce("a", say("boot-a", "0-2"), 0.2)
    assert not stuck.is_stuck
