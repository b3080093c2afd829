"""The gateway's table of members: which may serve which policy version, and which gets the next request.

Every change describes itself and lists the terms that it ended; the caller moves the requests of those terms to
other members. Methods return None where nothing has changed. The table holds no connections and reads no clock:
`now_s` is from any monotonic clock.

A boot is one lifetime of a node's server process. When a node announces a new boot, everything known of the old
one is void, and a boot that was voided or has left never returns. A term is one uninterrupted membership of one
boot: a boot that timed out and announces itself again starts its second term.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from grpo_orch.policies.model.vocabulary import machine_of
from grpo_orch.policies.serving.joining import Stage
from grpo_orch.policies.serving.wire import SILENT_S, Announce, EngineStats

# Requests of one prompt go to the member that has the prompt cached, until it has this many such requests more
# than the least loaded member. Up to there a larger batch hardly increases a server's time per token.
GROUP_LEAD_REQUESTS = 8
# A session's turns stay for longer: another member would have to compute the whole conversation again.
SESSION_LEAD_TURNS = 32
GROUPS_MAX = 100_000  # remembered; then all are forgotten, which costs each at most one cached prompt
RETRY_REQUESTS = 1  # allowed at first for a member that failed as a whole
# Nodes fail independently; a policy that no node can load is broken itself.
ALL_UNFIT_NOTE = "; all other members are unfit too, so the policy is broken and not the nodes"

# Slow start: a new member may be cold or broken, so it gets this many requests at first, and one more for each
# that gets its first token. This doubles the limit with every round.
EASE_IN_REQUESTS = 8
# Tokens of requests that move are computed again as prompts, which stalls decoding on their new member. This limit
# is two of vLLM's own steps of 8,192.
REPLAY_TOKENS_MAX = 16_384
KV_FULL = 0.9  # share of an engine's KV cache


@dataclass(frozen=True, slots=True)
class Load:
    """The load that one request puts on its member.

    Args:
        group: shared by the requests of one prompt, or a session.
        tokens: of its prompt and its expected completion.
        replayed: tokens that another member had computed already; 0 for a new request.
        is_turn: whether the group is a session and this is one of its turns.
    """

    group: Hashable
    tokens: int = 1
    replayed: int = 0
    is_turn: bool = False


@dataclass(slots=True)
class Member:
    """One member in one term. Only the table changes it; `gateway_status.MemberStatus` is its public form.

    `is_suspected` is set by a failed request and cleared by the next announcement. `is_unresponsive` is
    set when it does not answer the gateway and cleared when it does, whatever its agent announces. `is_stuck` is
    set when it answers and makes no tokens, and cleared by a token or another policy.
    """

    term: int
    node: str
    boot_id: str
    address: str
    policy: str | None
    max_requests: int
    announced_at_s: float
    target: str = ""  # the policy that it is to hold; empty before any is requested
    is_suspected: bool = False
    is_unresponsive: bool = False
    is_stuck: bool = False
    unfit: str = ""  # why its agent has stopped trying to load the wanted policy
    running: int = 0
    outstanding: int = 0  # tokens of the running requests
    replaying: int = 0  # of these, tokens still to be computed again
    allowed: int = EASE_IN_REQUESTS
    kv_tokens: int = 0
    engine: EngineStats | None = None  # the latest stats
    stage: Stage | None = None
    engines: int = 1

    @property
    def free_slots(self) -> int:
        """How many more requests it may get."""
        return max(0, min(self.allowed, self.max_requests) - self.running)

    @property
    def keeps_session(self) -> bool:
        """Whether it takes one more turn of a session that it has served.

        Slow start does not apply: the member has proved itself to this session. A full engine has lost its cache.
        """
        is_full = self.engine is not None and self.engine.waiting > 0 and self.engine.kv_usage >= KV_FULL
        return self.running < self.max_requests and not is_full

    def has_room(self, load: Load) -> bool:
        """Whether it has room for this load."""
        if not self.free_slots:
            return False
        return not load.replayed or not self.replaying or self.replaying + load.replayed <= REPLAY_TOKENS_MAX


@dataclass(frozen=True, slots=True)
class Change:
    """A change of the table.

    Args:
        nodes: the affected members.
        description: a description for people.
        ended_terms: terms that ended.
    """

    nodes: tuple[str, ...]
    description: str
    ended_terms: tuple[int, ...] = ()

    @property
    def reason(self) -> str:
        """The change in one line, as in a MembershipChange."""
        return f"{', '.join(self.nodes)}: {self.description}"


class Membership:
    """The members of one gateway."""

    def __init__(self) -> None:
        self._rows: dict[str, Member] = {}
        self._terms = 0
        self._draining: set[str] = set()  # nodes or whole machines, whatever their boot
        self._void: set[str] = set()  # boots
        self._group_nodes: dict[Hashable, str] = {}  # group -> the node of its last request
        self.session_nodes: dict[Hashable, str] = {}  # session -> the node of its last turn

    @property
    def members(self) -> tuple[Member, ...]:
        """All members, in the order in which they joined."""
        return tuple(self._rows.values())

    def member(self, node: str) -> Member | None:
        """Return the member's row, or None if it is no member."""
        return self._rows.get(node)

    def is_draining(self, node: str) -> bool:
        """Whether the node finishes its requests and leaves."""
        return bool(self._draining) and not self._draining.isdisjoint((node, machine_of(node)))

    def on_machine(self, machine: str) -> tuple[Member, ...]:
        """Return the members on that machine; given a member's name, that member."""
        return tuple(row for row in self._rows.values() if machine in (row.node, machine_of(row.node)))

    def is_void(self, boot_id: str) -> bool:
        """Whether that boot was replaced or has left, so that it can never be a member again."""
        return boot_id in self._void

    def announce(self, node: str, announcement: Announce, now_s: float) -> Change | None:
        """Add a node, or update it from its announcement."""
        boot_id, policy = announcement.boot_id, announcement.policy
        if boot_id in self._void:
            return None
        is_leaving = announcement.draining and not self.is_draining(node)
        if is_leaving:
            self._draining.add(node)
        row, holds = self._rows.get(node), f"holds {policy or 'base weights'}{', drains' if is_leaving else ''}"
        if row is not None and row.boot_id == boot_id:
            before, doubted, unfit = row.policy, row.is_suspected, row.unfit
            self._update_engine(row, announcement)
            row.address, row.policy, row.max_requests = announcement.address, policy, announcement.max_requests
            row.announced_at_s, row.is_suspected, row.stage = now_s, False, announcement.stage
            row.unfit = announcement.unfit
            row.is_stuck = row.is_stuck and before == policy
            if unfit != announcement.unfit:
                return Change((node,), f"{holds}, {self._unfit_note(announcement.unfit)}")
            if before != policy:
                return Change((node,), f"{holds}, before: {before or 'base weights'}")
            if not (is_leaving or doubted):
                return None
            return Change((node,), f"{holds}{', no longer suspected' if doubted else ''}")
        self._terms += 1
        self._rows[node] = Member(
            self._terms,
            node,
            boot_id,
            announcement.address,
            policy,
            announcement.max_requests,
            announced_at_s=now_s,
            unfit=announcement.unfit,
            kv_tokens=announcement.kv_tokens,
            engine=announcement.engine,
            stage=announcement.stage,
            engines=announcement.engines,
        )
        unfit = f", {self._unfit_note(announcement.unfit)}" if announcement.unfit else ""
        if row is None:
            return Change((node,), f"joined as boot {boot_id}, {holds}{unfit}")
        self._void.add(row.boot_id)
        return Change((node,), f"boot {boot_id} replaces {row.boot_id}, {holds}{unfit}", (row.term,))

    def _update_engine(self, row: Member, announcement: Announce) -> None:
        """Store the engine's stats, and send no more requests to an engine whose KV cache is full.

        Further requests would wait there or preempt others; waiting in the gateway, they can go to any member.
        Each first token allows one more request again.
        """
        before, engine = row.engine, announcement.engine
        row.engine, row.kv_tokens = engine, announcement.kv_tokens
        if before is None or engine is None:
            return
        is_full = engine.waiting > 0 and engine.kv_usage >= KV_FULL
        if is_full or engine.preemptions > before.preemptions:
            row.allowed = min(row.allowed, max(EASE_IN_REQUESTS, engine.running))

    def _unfit_note(self, unfit: str) -> str:
        if not unfit:
            return "no longer unfit"
        are_all_unfit = len(self._rows) > 1 and all(row.unfit for row in self._rows.values())
        return f"unfit: {unfit}{ALL_UNFIT_NOTE if are_all_unfit else ''}"

    def connection_lost(self, node: str, boot_id: str) -> Change | None:
        """Remove the boot whose announcing connection broke; it may announce itself again."""
        return self._drop(self._in_boot(node, boot_id), "lost its announcing connection")

    def leave(self, node: str, boot_id: str) -> Change | None:
        """Remove a boot that has ended; it need not be a member."""
        self._void.add(boot_id)
        return self._drop(self._in_boot(node, boot_id), "left")

    def remove(self, node: str) -> Change | None:
        """Remove a node, or all of a machine's, for good: these boots never return."""
        rows = self.on_machine(node)
        self._void |= {row.boot_id for row in rows}
        return self._drop(rows, "removed")

    def drain(self, node: str) -> Change | None:
        """Send no new requests to a node, or to a machine's nodes, in this boot or a later one."""
        if self.is_draining(node):
            return None
        self._draining.add(node)
        rows = self.on_machine(node)
        names = tuple(row.node for row in rows) or (node,)
        return Change(names, f"drains, {sum(row.running for row in rows)} requests running")

    def suspect(self, node: str, term: int, why: str, *, whole: bool = False) -> Change | None:
        """Suspect a member: a request failed there or, with `whole`, it makes no tokens any more.

        It gets no new request until it has announced itself again.
        """
        row = self._in_term(node, term)
        if row is None:
            return None
        # Its other requests may be fine.
        row.allowed = RETRY_REQUESTS if whole else min(row.allowed, max(EASE_IN_REQUESTS, row.running - 1))
        row.is_stuck = row.is_stuck or whole
        before, row.is_suspected = row.is_suspected, True
        return None if before else Change((node,), f"suspected: {why}")

    def mark_unresponsive(self, node: str, term: int, why: str) -> Change | None:
        """Mark a member as unresponsive: it gets no requests until it answers, even if its agent announces it."""
        row = self._in_term(node, term)
        if row is None:
            return None
        row.allowed = RETRY_REQUESTS
        before, row.is_unresponsive = row.is_unresponsive, True
        return None if before else Change((node,), f"unresponsive: {why}")

    def mark_responsive(self, node: str, term: int) -> Change | None:
        """Mark a member as responsive again."""
        row = self._in_term(node, term)
        if row is None or not row.is_unresponsive:
            return None
        row.is_unresponsive = False
        return Change((node,), "responsive again")

    def expire(self, now_s: float) -> Change | None:
        """Remove every member without an announcement for more than SILENT_S. It may announce itself again."""
        silent = [row for row in self._rows.values() if now_s - row.announced_at_s > SILENT_S]
        return self._drop(silent, f"no announcement for {SILENT_S:g} s")

    def serving(self, policy: str) -> tuple[Member, ...]:
        """Return the members that may serve this policy, whether or not they have room for a request.

        They hold it and are not draining, suspected or unresponsive. Members that are to keep it come alone, if
        there are any.
        """
        holders = tuple(
            row
            for row in self._rows.values()
            if row.policy == policy and not (row.is_suspected or row.is_unresponsive or self.is_draining(row.node))
        )
        return tuple(row for row in holders if row.target in ("", policy)) or holders

    def loading(self, policy: str) -> tuple[Member, ...]:
        """Return the members that do not hold the policy yet and can load it."""
        return tuple(
            row
            for row in self._rows.values()
            if row.policy != policy and row.target in ("", policy) and self._may_load(row)
        )

    def loadable(self) -> tuple[Member, ...]:
        """Return the members that can hold a policy."""
        return tuple(row for row in self._rows.values() if self._may_load(row))

    def set_targets(self, targets: Mapping[str, str]) -> tuple[str, ...]:
        """Set the policy that each machine's members are to hold; return the members for which it changed."""
        rows = [row for row in self._rows.values() if targets.get(machine_of(row.node), row.target) != row.target]
        for row in rows:
            row.target = targets[machine_of(row.node)]
        return tuple(row.node for row in rows)

    def choose(
        self,
        policy: str,
        load: Load,
        avoid: frozenset[str] = frozenset(),
        refused_by: frozenset[str] = frozenset(),
    ) -> Member | None:
        """Choose the member for one more request; None if none has room.

        Choose the member with the fewest outstanding tokens, or the member of the group's last request while that
        has not many more. A session's first turn goes to the member with the fewest sessions: most sessions are
        idle at any time, and their later turns follow. A stuck member is chosen only if no other has room.

        Args:
            policy: the label of the policy that the member must hold.
            load: the request.
            avoid: nodes where the request just failed; chosen only if no other has room, so that a recovered node
                does not idle while the others are full.
            refused_by: nodes that refused it; chosen only if no other serves.
        """
        serving = self.serving(policy)
        serving = tuple(row for row in serving if row.node not in refused_by) or serving
        working = tuple(row for row in serving if not row.is_stuck)
        others = tuple(row for row in working if row.node not in avoid)
        best = next((rows for rows in (others, working) if any(row.free_slots for row in rows)), serving)
        last_node = self.session_nodes.get(load.group) if load.is_turn else None
        if any(row.node == last_node and row.keeps_session for row in best):
            with_room = [row for row in best if row.node == last_node or row.has_room(load)]
        else:
            with_room = [row for row in best if row.has_room(load)]
        if not with_room:
            return None
        if load.is_turn and last_node is None:
            return self._fewest_sessions(with_room)
        least_loaded = min(with_room, key=lambda row: row.outstanding)
        last_node = last_node or self._group_nodes.get(load.group)
        lead_tokens = (SESSION_LEAD_TURNS if load.is_turn else GROUP_LEAD_REQUESTS) * load.tokens
        for row in with_room:
            if row.node == last_node and row.outstanding < least_loaded.outstanding + lead_tokens:
                return row
        return least_loaded

    def request_started(self, node: str, load: Load) -> None:
        """Count a request that was sent to the node."""
        row = self._rows[node]
        row.running += 1
        row.outstanding += load.tokens
        row.replaying += load.replayed
        last_nodes = self.session_nodes if load.is_turn else self._group_nodes
        if len(last_nodes) == GROUPS_MAX:
            last_nodes.clear()
        last_nodes[load.group] = node

    def first_token(self, node: str, term: int, load: Load) -> None:
        """Note a request's first token: its prompt is computed, and the member works."""
        row = self._in_term(node, term)
        if row is not None:
            row.replaying -= load.replayed
            row.is_stuck = False
            row.allowed = min(row.allowed + 1, row.max_requests)

    def request_finished(self, node: str, term: int, load: Load, *, got_token: bool) -> None:
        """Count the end, of whatever kind, of a request sent in that term. `got_token`: it got a token there."""
        row = self._in_term(node, term)
        if row is not None:
            row.running -= 1
            row.outstanding -= load.tokens
            row.replaying -= 0 if got_token else load.replayed

    def forget_groups(self) -> None:
        """Forget which member has which prompt cached: new weights void the caches."""
        self._group_nodes.clear()

    def end_session(self, session: Hashable) -> None:
        """Forget a session that has ended."""
        self.session_nodes.pop(session, None)

    def _fewest_sessions(self, rows: Sequence[Member]) -> Member:
        sessions = Counter(self.session_nodes.values())
        return min(rows, key=lambda row: (sessions[row.node], row.outstanding))

    def _may_load(self, row: Member) -> bool:
        return not (row.is_unresponsive or row.is_stuck or row.unfit or self.is_draining(row.node))

    def _in_term(self, node: str, term: int) -> Member | None:
        row = self._rows.get(node)
        return row if row is not None and row.term == term else None

    def _in_boot(self, node: str, boot_id: str) -> list[Member]:
        row = self._rows.get(node)
        return [row] if row is not None and row.boot_id == boot_id else []

    def _drop(self, rows: Sequence[Member], event: str) -> Change | None:
        for row in rows:
            del self._rows[row.node]
        return Change(tuple(row.node for row in rows), event, tuple(row.term for row in rows)) if rows else None
