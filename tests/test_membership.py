"""The membership table: a truth table of single occurrences, and any sequence of them against a plain model."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from policies.membership import TOGETHER_REQUESTS, Membership
from policies.wire import SILENT_S, Announce

NODES = ("a", "b", "c")
POLICIES = ("0-1", "0-2")


def say(boot_id: str, policy: str | None = "0-1", max_requests: int = 4) -> Announce:
    return Announce(boot_id, "127.0.0.1:1", policy, max_requests)


@pytest.fixture
def table() -> Membership:
    """One member, `a`, boot `x`, holding 0-1, seen at 0 s."""
    table = Membership()
    table.announce("a", say("x"), 0.0)
    return table


def test_each_occurrence_gives_its_reason(table: Membership) -> None:
    assert table.announce("b", say("y", None), 0.0).reason == "b: joined as boot y, holds base weights"
    assert table.announce("b", say("y", "0-1"), 0.5).reason == "b: holds 0-1, before: None"
    assert table.announce("b", say("z", None), 0.6).reason == "b: boot z in place of y, holds base weights"
    assert table.announce("b", say("y", "0-1"), 0.7).reason == "b: boot y is over and was not let in"
    assert table.drain("a").reason == "a: drains, 0 requests running"
    assert table.connection_lost("a", "x").reason == "a: its announcing connection was lost"
    assert table.leave("b", "z").reason == "b: left"
    assert table.leave("b", "z").reason == "b: boot z left; it was no member"
    assert table.expire(9.0).reason == "nobody is silent"


def test_only_the_exact_version_serves(table: Membership) -> None:
    assert [row.node for row in table.serving("0-1")] == ["a"]
    assert table.serving("0-2") == ()
    table.announce("a", say("x", None), 0.1)
    assert table.choose("0-1", "p") is None


def test_a_new_boot_ends_the_term_and_the_old_boot_cannot_come_back(table: Membership) -> None:
    term = table.rows[0].term
    assert table.announce("a", say("y", None), 0.1).ended == (term,)
    assert table.announce("a", say("x", "0-1"), 0.2).ended == ()
    assert [(row.boot_id, row.policy) for row in table.rows] == [("y", None)]


def test_a_lost_connection_ends_the_term_and_the_same_boot_may_come_back(table: Membership) -> None:
    term = table.rows[0].term
    assert table.connection_lost("a", "x").ended == (term,)
    assert table.rows == ()
    table.announce("a", say("x"), 0.1)
    assert table.rows[0].term != term
    assert table.choose("0-1", "p") is not None


def test_silence_ends_the_term_just_after_the_limit(table: Membership) -> None:
    assert table.expire(SILENT_S).ended == ()
    assert table.expire(SILENT_S + 0.01).ended == (1,)


def test_a_drained_node_gets_nothing_on_any_boot_but_keeps_what_runs(table: Membership) -> None:
    table.started("a", "p")
    assert table.drain("a").ended == ()
    assert table.choose("0-1", "p") is None
    table.announce("a", say("y"), 0.1)
    assert table.choose("0-1", "p") is None


def test_doubt_lasts_until_the_next_announcement(table: Membership) -> None:
    table.doubt("a", table.rows[0].term, "reset")
    assert table.choose("0-1", "p") is None
    table.announce("a", say("x"), 0.1)
    assert table.choose("0-1", "p") is not None


def test_the_end_of_a_request_of_an_earlier_term_changes_nothing(table: Membership) -> None:
    term = table.rows[0].term
    table.started("a", "p")
    table.connection_lost("a", "x")
    table.announce("a", say("x"), 0.1)
    table.finished("a", term)
    assert table.rows[0].running == 0


def test_the_node_where_it_failed_is_taken_only_for_want_of_another(table: Membership) -> None:
    chosen = table.choose("0-1", "p", avoid="a")
    assert chosen is not None
    assert chosen.node == "a"
    table.announce("b", say("y"), 0.0)
    chosen = table.choose("0-1", "p", avoid="a")
    assert chosen is not None
    assert chosen.node == "b"


def test_groups_stay_together_until_one_member_has_much_more_than_another() -> None:
    table = Membership()
    for node in ("a", "b"):
        table.announce(node, say(f"boot-{node}", max_requests=1000), 0.0)
    for group in range(4):
        for _ in range(8):
            row = table.choose("0-1", group)
            assert row is not None
            table.started(row.node, group)
    assert Counter({row.node: row.running for row in table.rows}) == {"a": 16, "b": 16}
    for _ in range(100):  # one prompt with a very large group
        row = table.choose("0-1", "large")
        assert row is not None
        table.started(row.node, "large")
        low, high = sorted(one.running for one in table.rows)
        assert high - low <= TOGETHER_REQUESTS


class AnySequence(RuleBasedStateMachine):
    """The model: who was last heard when, as what, and whether anything since then put it out."""

    def __init__(self) -> None:
        super().__init__()
        self.table = Membership()
        self.now_s = 0.0
        self.members: dict[str, Announce] = {}
        self.seen_s: dict[str, float] = {}
        self.boots = dict.fromkeys(NODES, 0)
        self.over: set[str] = set()
        self.draining: set[str] = set()
        self.doubted: set[str] = set()
        self.running: list[tuple[str, int]] = []  # node, term

    def lose(self, node: str) -> None:
        del self.members[node]
        self.doubted.discard(node)

    def check_ended(self, ended: tuple[int, ...], terms: dict[str, int], lost: set[str]) -> None:
        assert set(ended) == {terms[node] for node in lost}

    def terms(self) -> dict[str, int]:
        return {row.node: row.term for row in self.table.rows}

    @rule(node=st.sampled_from(NODES), policy=st.sampled_from((None, *POLICIES)), back=st.integers(0, 2))
    def announce(self, node: str, policy: str | None, back: int) -> None:
        boot_id = f"{node}{max(0, self.boots[node] - back)}"
        said, terms = say(boot_id, policy, max_requests=2), self.terms()
        replaced = node in self.members and self.members[node].boot_id != boot_id and boot_id not in self.over
        change = self.table.announce(node, said, self.now_s)
        self.check_ended(change.ended, terms, {node} if replaced else set())
        if boot_id in self.over:
            return
        if replaced:
            self.over.add(self.members[node].boot_id)
        self.members[node], self.seen_s[node] = said, self.now_s
        self.doubted.discard(node)

    @rule(node=st.sampled_from(NODES))
    def reboot(self, node: str) -> None:
        self.boots[node] += 1

    @rule(step_s=st.floats(0.0, 2.0))
    def time_passes(self, step_s: float) -> None:
        self.now_s += step_s
        terms = self.terms()
        silent = {node for node in self.members if self.now_s - self.seen_s[node] > SILENT_S}
        self.check_ended(self.table.expire(self.now_s).ended, terms, silent)
        for node in silent:
            self.lose(node)

    @rule(node=st.sampled_from(NODES), back=st.integers(0, 1), leaves=st.booleans())
    def goes(self, node: str, back: int, leaves: bool) -> None:
        boot_id, terms = f"{node}{max(0, self.boots[node] - back)}", self.terms()
        here = node in self.members and self.members[node].boot_id == boot_id
        change = self.table.leave(node, boot_id) if leaves else self.table.connection_lost(node, boot_id)
        self.check_ended(change.ended, terms, {node} if here else set())
        if leaves:
            self.over.add(boot_id)
        if here:
            self.lose(node)

    @rule(node=st.sampled_from(NODES))
    def drain(self, node: str) -> None:
        assert self.table.drain(node).ended == ()
        self.draining.add(node)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), failed=st.booleans())
    def request_ends(self, data: st.DataObject, failed: bool) -> None:
        node, term = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        self.table.finished(node, term)
        if failed:
            self.table.doubt(node, term, "reset")
            if self.terms().get(node) == term:
                self.doubted.add(node)

    @rule(policy=st.sampled_from(POLICIES), group=st.integers(0, 2), avoid=st.sampled_from((None, *NODES)))
    def request(self, policy: str, group: int, avoid: str | None) -> None:
        able = self.able(policy)
        row = self.table.choose(policy, group, avoid)
        if not able:
            assert row is None
            return
        assert row is not None
        assert row.node in able
        assert row.node != avoid or able == {avoid}
        self.table.started(row.node, group)
        self.running.append((row.node, row.term))

    def able(self, policy: str) -> set[str]:
        terms = self.terms()
        load = Counter(node for node, term in self.running if terms.get(node) == term)
        return {
            node
            for node, said in self.members.items()
            if said.policy == policy
            and node not in self.draining | self.doubted
            and load[node] < said.max_requests
        }

    @invariant()
    def the_table_is_the_model(self) -> None:
        rows = {row.node: row for row in self.table.rows}
        assert {node: (row.boot_id, row.policy) for node, row in rows.items()} == {
            node: (said.boot_id, said.policy) for node, said in self.members.items()
        }
        counted = Counter(term for _, term in self.running)
        assert all(row.running == counted[row.term] for row in rows.values())
        assert all(not self.table.is_void(row.boot_id) for row in rows.values())
        for policy in POLICIES:
            assert {row.node for row in self.table.serving(policy)} >= self.able(policy)


AnySequence.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
test_any_sequence = AnySequence.TestCase
