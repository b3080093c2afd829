"""The membership table against a plain model, in any sequence of what can happen to it.

The model knows who was heard last, as what, and what put it out since, and it keeps a list of the requests. What
the table counts follows from these.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from grpo_orch.policies.serving.membership import (
    EASE_IN_REQUESTS,
    GROUP_LEAD_REQUESTS,
    REPLAY_TOKENS_MAX,
    RETRY_REQUESTS,
    Change,
    Load,
    Member,
    Membership,
)
from grpo_orch.policies.serving.wire import SILENT_S, Announce
from tests.budget import examples

NODES = ("a", "b", "c")
LABELS = ("0-1@aa", "0-2@bb", "0-2@cc", "0-4@dd", "1-3@ee", "0-1")
ROOM = (3 * EASE_IN_REQUESTS, 2)
TRIED = ("doubt", "failed", "muted", "muted", "answered")
nodes = st.sampled_from(NODES)
labels = st.sampled_from((*LABELS, None, "odd"))
backs = st.sampled_from((0, 0, 0, 1, 2))  # boots ago
seldom = st.sampled_from((False,) * 9 + (True,))


@dataclass
class Expected:
    said: Announce
    seen_s: float
    allowed: int = EASE_IN_REQUESTS  # its requests at a time: what it starts with, and what it has proved
    doubted: bool = False
    mute: bool = False
    stuck: bool = False

    def shown(self) -> tuple[object, ...]:
        said = self.said
        told = said.boot_id, said.address, said.policy, said.max_requests
        return *told, self.allowed, self.doubted, self.mute, self.stuck


@dataclass(eq=False)
class Request:
    node: str
    term: int
    load: Load
    begun: bool = False


@dataclass
class Seen:
    """What the table shows: who is a member, and who drains."""

    rows: dict[str, Member]
    draining: set[str]

    def matters(self) -> object:
        """What is news when it changes."""
        rows = {
            (row.term, row.boot_id, row.policy, row.is_suspected, row.is_unresponsive)
            for row in self.rows.values()
        }
        return rows, self.draining


class AnySequence(RuleBasedStateMachine):
    """The rules are what can happen; each compares what the table did with what the model says."""

    @initialize(policy=st.sampled_from(LABELS))
    def start(self, policy: str) -> None:
        self.table = Membership()
        self.now_s = 0.0
        self.members: dict[str, Expected] = {}
        self.boots = dict.fromkeys(NODES, 0)
        self.over: set[str] = set()
        self.draining: set[str] = set()
        self.requests: list[Request] = []
        self.mates: dict[object, str] = {}
        self.lives: dict[int, tuple[str, str]] = {}  # term -> whose it was
        for node, room in zip(NODES, (*ROOM, ROOM[0]), strict=True):
            self.says(node, Announce(f"{node}0", "host:1", policy, room))

    def boot_id(self, node: str, back: int) -> str:
        return f"{node}{max(0, self.boots[node] - back)}"

    def seen(self) -> Seen:
        rows = {row.node: replace(row) for row in self.table.members}
        return Seen(rows, {node for node in NODES if self.table.is_draining(node)})

    def check(self, change: Change | None, before: Seen, node: str | None = None) -> None:
        """A change says of whom and why, and ends the terms that are gone and no others."""
        after = self.seen()
        assert (change is not None) == (before.matters() != after.matters())
        if change is None:
            return
        terms = {row.term for row in after.rows.values()}
        assert change.reason.startswith(node or "")
        assert len(change.reason) > len(f"{node}: ")
        assert sorted(change.ended_terms) == sorted(
            row.term for row in before.rows.values() if row.term not in terms
        )

    @rule(node=nodes, policy=labels, back=backs, reboots=seldom, room=st.sampled_from(ROOM), leaves=seldom)
    def announces(self, node: str, policy: str | None, back: int, reboots: bool, room: int, leaves: bool) -> None:
        self.boots[node] += reboots
        self.says(node, Announce(self.boot_id(node, back), f"host:{self.boots[node]}", policy, room, leaves))

    @rule(silent=st.sampled_from((None, *NODES)), new_weights=st.booleans())
    def all_announce(self, silent: str | None, new_weights: bool) -> None:
        """As what they are, or one does not."""
        if new_weights:
            self.table.forget_groups()
            self.mates.clear()
        for node, member in list(self.members.items()):
            if node != silent:
                self.says(node, member.said)

    def says(self, node: str, said: Announce) -> None:
        before = self.seen()
        self.check(self.table.announce(node, said, self.now_s), before, node)
        if said.boot_id in self.over:
            return
        member = self.members.get(node)
        if member is None or member.said.boot_id != said.boot_id:
            if member is not None:
                self.over.add(member.said.boot_id)
            member = self.members[node] = Expected(said, self.now_s)
        member.stuck &= member.said.policy == said.policy
        member.said, member.seen_s, member.doubted = said, self.now_s, False
        if said.draining:
            self.draining.add(node)

    @rule(step_s=st.floats(0.0, 0.4 * SILENT_S))
    def time_passes(self, step_s: float) -> None:
        self.now_s += step_s
        before = self.seen()
        self.check(self.table.expire(self.now_s), before)
        for node, member in list(self.members.items()):
            if self.now_s - member.seen_s > SILENT_S:
                del self.members[node]

    @rule(node=nodes, back=backs, what=st.sampled_from(("loses its connection", "leaves", "is removed")))
    def goes(self, node: str, back: int, what: str) -> None:
        boot_id, before = self.boot_id(node, back), self.seen()
        match what:
            case "loses its connection":
                change = self.table.connection_lost(node, boot_id)
            case "leaves":
                change = self.table.leave(node, boot_id)
                self.over.add(boot_id)
            case _:
                change = self.table.remove(node)
                boot_id = self.members[node].said.boot_id if node in self.members else ""
                self.over |= {boot_id} - {""}
        self.check(change, before, node)
        if node in self.members and self.members[node].said.boot_id == boot_id:
            del self.members[node]

    @rule(node=nodes, sure=seldom)
    def drains(self, node: str, sure: bool) -> None:
        if sure:
            before = self.seen()
            self.check(self.table.drain(node), before, node)
            self.draining.add(node)

    @rule(node=nodes, what=st.sampled_from(TRIED), late=seldom, announces=st.booleans())
    def is_tried(self, node: str, what: str, late: bool, announces: bool) -> None:
        """What is heard of a term, which may be over by then; the member may announce itself at once."""
        terms = sorted(term for term, (whose, _) in self.lives.items() if whose == node)
        term, before = terms[0 if late else -1], self.seen()
        member = self.members[node] if term in self.terms() else None
        match what:
            case "doubt" | "failed":
                change = self.table.suspect(node, term, "reset", whole=what == "failed")
            case "muted":
                change = self.table.mark_unresponsive(node, term, "timed out")
            case _:
                change = self.table.mark_responsive(node, term)
        self.check(change, before, node)
        if member is None:
            return
        if what == "answered":
            member.mute = False
        else:
            most = max(EASE_IN_REQUESTS, len(self.running(node)) - 1)
            member.allowed = min(member.allowed, most) if what == "doubt" else RETRY_REQUESTS
            member.doubted |= what != "muted"
            member.stuck |= what == "failed"
            member.mute |= what == "muted"
        if announces:
            self.says(node, member.said)

    @rule(skip=st.integers(0, 30), most=st.integers(1, 12))
    def first_tokens_come(self, skip: int, most: int) -> None:
        for request in [one for one in self.requests[skip:] + self.requests[:skip] if not one.begun][:most]:
            request.begun = True
            self.table.first_token(request.node, request.term, request.load)
            if request.term in self.terms():
                member = self.members[request.node]
                member.allowed = min(member.allowed + 1, member.said.max_requests)
                member.stuck = False

    @rule(skip=st.integers(0, 30), most=st.integers(1, 6))
    def requests_end(self, skip: int, most: int) -> None:
        for request in (self.requests[skip:] + self.requests[:skip])[:most]:
            self.requests.remove(request)
            self.table.request_finished(request.node, request.term, request.load, got_token=request.begun)

    @rule(
        label=st.sampled_from(LABELS),
        like=st.sampled_from((None, *NODES)),
        load=st.builds(
            Load, st.integers(0, 2), st.sampled_from((1, 500, 9000)), st.sampled_from((0, 0, 0, 5000, 20_000))
        ),
        avoid=st.frozensets(st.sampled_from(NODES)),
        refused_by=st.frozensets(st.sampled_from(NODES)),
        count=st.integers(1, 12),
    )
    def requests_come(
        self,
        label: str,
        like: str | None,
        load: Load,
        avoid: frozenset[str],
        refused_by: frozenset[str],
        count: int,
    ) -> None:
        said = self.members[like].said.policy if like in self.members else None
        if said is not None and said in LABELS:
            label = said
        for _ in range(count):
            serving = self.serving(label)
            serving = serving - refused_by or serving
            well = {node for node in serving if not self.members[node].stuck}
            for some in (well - avoid, well):
                if any(self.has_room(node, Load(None)) for node in some):
                    serving = some
                    break
            able = {node for node in serving if self.has_room(node, load)}
            row = self.table.choose(label, load, avoid, refused_by)
            if not able:
                assert row is None
                return
            assert row is not None
            assert row.node in able
            self.check_balance(row, able, load)
            self.table.request_started(row.node, load)
            self.mates[load.group] = row.node
            self.requests.append(Request(row.node, row.term, load))

    def check_balance(self, row: Member, able: set[str], load: Load) -> None:
        """It is the group's member while that has not much more to do, else the one with the least."""
        tokens = {node: sum(one.load.tokens for one in self.running(node)) for node in able}
        least, mate = min(tokens.values()), self.mates.get(load.group)
        if mate in tokens and tokens[mate] < least + GROUP_LEAD_REQUESTS * load.tokens:
            assert row.node == mate
        else:
            assert tokens[row.node] == least

    def terms(self) -> set[int]:
        return {row.term for row in self.table.members}

    def running(self, node: str) -> list[Request]:
        row = self.table.member(node)
        return [one for one in self.requests if row is not None and one.term == row.term]

    def replaying(self, node: str) -> int:
        return sum(one.load.replayed for one in self.running(node) if not one.begun)

    def serving(self, label: str) -> set[str]:
        return {
            node
            for node, member in self.members.items()
            if member.said.policy == label and not member.doubted and not member.mute and node not in self.draining
        }

    def has_room(self, node: str, load: Load) -> bool:
        member, replaying = self.members[node], self.replaying(node)
        if len(self.running(node)) >= min(member.allowed, member.said.max_requests):
            return False
        return 0 in (replaying, load.replayed) or replaying + load.replayed <= REPLAY_TOKENS_MAX

    @invariant()
    def the_table_is_the_model(self) -> None:
        seen = self.seen()
        assert {
            node: (
                row.boot_id,
                row.address,
                row.policy,
                row.max_requests,
                row.allowed,
                row.is_suspected,
                row.is_unresponsive,
                row.is_stuck,
            )
            for node, row in seen.rows.items()
        } == {node: member.shown() for node, member in self.members.items()}
        assert seen.draining == self.draining
        for label in LABELS:
            serving = {row.node for row in self.table.serving(label)}
            assert serving == self.serving(label)

    @invariant()
    def the_counts_are_of_the_requests_that_run(self) -> None:
        for row in self.table.members:
            running = self.running(row.node)
            assert row.running == len(running)
            assert row.outstanding == sum(one.load.tokens for one in running)
            assert row.replaying == self.replaying(row.node)

    @invariant()
    def no_boot_that_is_over_is_a_member(self) -> None:
        assert all(self.table.is_void(boot_id) for boot_id in self.over)
        assert not any(self.table.is_void(row.boot_id) for row in self.table.members)

    @invariant()
    def a_term_is_never_used_again(self) -> None:
        for row in sorted(self.table.members, key=lambda row: row.term):
            assert row.term in self.lives or row.term > max(self.lives, default=0)
            assert self.lives.setdefault(row.term, (row.node, row.boot_id)) == (row.node, row.boot_id)


AnySequence.TestCase.settings = settings(max_examples=examples(200), stateful_step_count=50, deadline=None)
test_any_sequence = AnySequence.TestCase
