"""Who may serve which policy version, and who gets the next request: the gateway's table of its nodes.

Every change says what happened and which terms it ended; whoever keeps the table moves the requests of those terms
elsewhere. The table holds no connection and reads no clock: `now_s` is any clock that does not go back.

A boot is one life of a node's server process. A node that announces a new boot voids all that was known of it, and
a boot that was voided or has left never comes back. A term is one uninterrupted membership of one boot: a boot
that fell silent and speaks again is in its second.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence

from policies.model.vocabulary import machine_of
from policies.serving.member import EASE_IN_REQUESTS, KV_FULL, Change, Load, Row
from policies.serving.wire import SILENT_S, Announce

# Requests of one prompt stay together on the member that has the prompt cached, until that member has so many such
# requests more than the least loaded one: up to there a larger batch costs a server hardly more time per token.
GROUP_LEAD_REQUESTS = 8
# A turn of a session stays for longer: all that was said before would be computed again elsewhere.
SESSION_LEAD_TURNS = 32
GROUPS_MAX = 100_000  # remembered; then all are forgotten, which costs each a cached prompt at most
RETRY_REQUESTS = 1  # for a member that failed as a whole, to prove itself
# Nodes break one by one; a policy that no node can load is broken itself.
ALL_UNFIT_NOTE = "; so is every other member, and then it is the policy and not the nodes"


class Membership:
    """One gateway's table."""

    def __init__(self) -> None:
        self._rows: dict[str, Row] = {}
        self._terms = 0
        self._draining: set[str] = set()  # nodes or whole machines, whatever their boot
        self._void: set[str] = set()  # boots
        self._group_nodes: dict[Hashable, str] = {}  # group -> the node that its last request went to
        self._sessions: dict[Hashable, str] = {}  # session -> the node that its last turn went to

    @property
    def rows(self) -> tuple[Row, ...]:
        """Every member, in the order in which they came."""
        return tuple(self._rows.values())

    def row(self, node: str) -> Row | None:
        """The node's row, or None when it is not a member."""
        return self._rows.get(node)

    def draining(self, node: str) -> bool:
        """Whether the node was told to finish what it has and leave."""
        return bool(self._draining) and not self._draining.isdisjoint((node, machine_of(node)))

    def on(self, machine: str) -> tuple[Row, ...]:
        """The members on that machine; of a name that is one member's, that one."""
        return tuple(row for row in self._rows.values() if machine in (row.node, machine_of(row.node)))

    def is_void(self, boot_id: str) -> bool:
        """Whether that boot was replaced or has left: it is no member and will not be one again."""
        return boot_id in self._void

    def announce(self, node: str, said: Announce, now_s: float) -> Change:
        """A node says what it is."""
        if said.boot_id in self._void:
            return Change((node,), f"boot {said.boot_id} is over and was not let in", news=False)
        leaves = said.draining and not self.draining(node)
        if leaves:
            self._draining.add(node)
        row, holds = self._rows.get(node), f"holds {said.policy or 'base weights'}{', drains' if leaves else ''}"
        if row is not None and row.boot_id == said.boot_id:
            before, doubted, unfit = row.policy, row.doubted, row.unfit
            self._update_engine(row, said)
            row.address, row.policy, row.max_requests = said.address, said.policy, said.max_requests
            row.seen_at_s, row.doubted, row.unfit, row.join_s = now_s, False, said.unfit, said.join_s
            row.stage = said.stage
            row.stuck = row.stuck and before == said.policy
            if unfit != said.unfit:
                return Change((node,), f"{holds}, {self._unfit_words(said.unfit)}")
            if before != said.policy:
                return Change((node,), f"{holds}, before: {before or 'base weights'}")
            return Change((node,), f"{holds}{', no longer in doubt' if doubted else ''}", news=leaves or doubted)
        self._terms += 1
        self._rows[node] = Row(
            self._terms,
            node,
            said.boot_id,
            said.address,
            said.policy,
            said.max_requests,
            seen_at_s=now_s,
            unfit=said.unfit,
            kv_tokens=said.kv_tokens,
            engine=said.engine,
            join_s=said.join_s,
            stage=said.stage,
            engines=said.engines,
        )
        unfit = f", {self._unfit_words(said.unfit)}" if said.unfit else ""
        if row is None:
            return Change((node,), f"joined as boot {said.boot_id}, {holds}{unfit}")
        self._void.add(row.boot_id)
        return Change((node,), f"boot {said.boot_id} in place of {row.boot_id}, {holds}{unfit}", (row.term,))

    def _update_engine(self, row: Row, said: Announce) -> None:
        """An engine whose room is full gets no more: that would wait in it or push out others, and what waits here
        can go to any member. With each first token it gets one more again."""
        before, row.engine, row.kv_tokens = row.engine, said.engine, said.kv_tokens
        if before is None or said.engine is None:
            return
        full = said.engine.waiting > 0 and said.engine.kv_usage >= KV_FULL
        if full or said.engine.preemptions > before.preemptions:
            row.allowed = min(row.allowed, max(EASE_IN_REQUESTS, said.engine.running))

    def _unfit_words(self, unfit: str) -> str:
        if not unfit:
            return "no longer unfit"
        every = len(self._rows) > 1 and all(row.unfit for row in self._rows.values())
        return f"unfit: {unfit}{ALL_UNFIT_NOTE if every else ''}"

    def connection_lost(self, node: str, boot_id: str) -> Change:
        """The connection on which the boot announced itself broke; it may announce itself again."""
        return self._out(node, boot_id, "its announcing connection was lost")

    def leave(self, node: str, boot_id: str) -> Change:
        """The node says that this boot is over, member or not."""
        self._void.add(boot_id)
        return self._out(node, boot_id, "left")

    def remove(self, node: str) -> Change:
        """Take the node out by hand, or all of a machine's; these boots do not come back."""
        rows = self.on(node)
        if not rows:
            return Change((node,), "to be removed; it was no member", news=False)
        for row in rows:
            self._void.add(row.boot_id)
            del self._rows[row.node]
        return Change(tuple(row.node for row in rows), "removed", tuple(row.term for row in rows))

    def drain(self, node: str) -> Change:
        """No new request goes to the node, or to any of a machine's, in this boot or a later one; those that run
        go on."""
        news = not self.draining(node)
        self._draining.add(node)
        rows = self.on(node)
        names = tuple(row.node for row in rows) or (node,)
        return Change(names, f"drains, {sum(row.running for row in rows)} requests running", news=news)

    def doubt(self, node: str, term: int, why: str, *, whole: bool = False) -> Change:
        """A request failed there, or with `whole` the member makes no token any more: it gets no new one before it
        has announced itself again."""
        row = self._in_term(node, term)
        if row is None:
            return Change((node,), "no member any more", news=False)
        # What else runs there may be no worse than before.
        row.allowed = RETRY_REQUESTS if whole else min(row.allowed, max(EASE_IN_REQUESTS, row.running - 1))
        row.stuck = row.stuck or whole
        news, row.doubted = not row.doubted, True
        return Change((node,), f"in doubt, {why}", news=news)

    def muted(self, node: str, term: int, why: str) -> Change:
        """The member did not answer the gateway: it gets nothing until it does, whatever its agent says."""
        row = self._in_term(node, term)
        if row is None:
            return Change((node,), "no member any more", news=False)
        row.allowed = RETRY_REQUESTS
        news, row.mute = not row.mute, True
        return Change((node,), f"does not answer, {why}", news=news)

    def answered(self, node: str, term: int) -> Change:
        """The member answered the gateway."""
        row = self._in_term(node, term)
        if row is None or not row.mute:
            return Change((node,), "answers", news=False)
        row.mute = False
        return Change((node,), "answers again")

    def expire(self, now_s: float) -> Change:
        """Take out every member that has said nothing for more than SILENT_S. It may announce itself again."""
        silent = [row for row in self._rows.values() if now_s - row.seen_at_s > SILENT_S]
        for row in silent:
            del self._rows[row.node]
        if not silent:
            return Change((), "nobody is silent", news=False)
        nodes, terms = tuple(row.node for row in silent), tuple(row.term for row in silent)
        return Change(nodes, f"nothing heard for {SILENT_S:g} s", terms)

    def serving(self, policy: str) -> tuple[Row, ...]:
        """The members that hold this policy and are not leaving, in doubt or mute, with or without room.

        If there are any that are to keep it, these alone."""
        holders = tuple(
            row
            for row in self._rows.values()
            if row.policy == policy and not (row.doubted or row.mute or self.draining(row.node))
        )
        return tuple(row for row in holders if row.target in ("", policy)) or holders

    def loading(self, policy: str) -> tuple[Row, ...]:
        """The members that do not hold the policy and, as far as is known, will."""
        return tuple(
            row
            for row in self._rows.values()
            if row.policy != policy and row.target in ("", policy) and self._may_load(row)
        )

    def able(self) -> tuple[Row, ...]:
        """The members that hold some policy or, as far as is known, can load one."""
        return tuple(row for row in self._rows.values() if self._may_load(row))

    def aim(self, targets: Mapping[str, str]) -> tuple[str, ...]:
        """Name the policy that each machine's members are to hold; return the members for which it is another."""
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
    ) -> Row | None:
        """Return the member for one more request, or None when there is none with room.

        It is the one with the fewest tokens to do, or the one that got the group's last request, while that has
        not much more. A session's first turn goes to the one with the fewest sessions: most of them are not at
        work at a time, and what they will ask for comes to where they are. One that was stuck is taken only when
        no other has room.

        Args:
            policy: the label of the policy that the member must hold.
            load: the request.
            avoid: nodes where the request failed last; taken only when no other has room, for a node that has come
                back must not stand idle while the others are full.
            refused_by: nodes that refused it; taken only when no other serves.
        """
        serving = self.serving(policy)
        serving = tuple(row for row in serving if row.node not in refused_by) or serving
        well = tuple(row for row in serving if not row.stuck)
        others = tuple(row for row in well if row.node not in avoid)
        best = next((some for some in (others, well) if any(row.places for row in some)), serving)
        mate = self._sessions.get(load.group) if load.is_turn else None
        if any(row.node == mate and row.keeps_session for row in best):
            able = [row for row in best if row.node == mate or row.takes(load)]
        else:
            able = [row for row in best if row.takes(load)]
        if not able:
            return None
        if load.is_turn and mate is None:
            return self._fewest_sessions(able)
        least = min(able, key=lambda row: row.outstanding)
        mate = mate or self._group_nodes.get(load.group)
        more = (SESSION_LEAD_TURNS if load.is_turn else GROUP_LEAD_REQUESTS) * load.tokens
        for row in able:
            if row.node == mate and row.outstanding < least.outstanding + more:
                return row
        return least

    def started(self, node: str, load: Load) -> None:
        """The request went to the node."""
        row = self._rows[node]
        row.running += 1
        row.outstanding += load.tokens
        row.replaying += load.replayed
        together = self._sessions if load.is_turn else self._group_nodes
        if len(together) == GROUPS_MAX:
            together.clear()
        together[load.group] = node

    def first_token(self, node: str, term: int, load: Load) -> None:
        """The request got its first token there: its prompt is computed, and the member works."""
        row = self._in_term(node, term)
        if row is not None:
            row.replaying -= load.replayed
            row.stuck = False
            row.allowed = min(row.allowed + 1, row.max_requests)

    def finished(self, node: str, term: int, load: Load, *, begun: bool) -> None:
        """A request that the node got in that term is over, in whatever way; `begun`: it got a token there."""
        row = self._in_term(node, term)
        if row is not None:
            row.running -= 1
            row.outstanding -= load.tokens
            row.replaying -= 0 if begun else load.replayed

    def forget_groups(self) -> None:
        """New weights make every cached prompt void."""
        self._group_nodes.clear()

    def end_session(self, session: Hashable) -> None:
        """It has no more turns."""
        self._sessions.pop(session, None)

    def _fewest_sessions(self, rows: Sequence[Row]) -> Row:
        sessions = Counter(self._sessions.values())
        return min(rows, key=lambda row: (sessions[row.node], row.outstanding))

    def _may_load(self, row: Row) -> bool:
        return not (row.mute or row.stuck or row.unfit or self.draining(row.node))

    def _in_term(self, node: str, term: int) -> Row | None:
        row = self._rows.get(node)
        return row if row is not None and row.term == term else None

    def _out(self, node: str, boot_id: str, why: str) -> Change:
        row = self._rows.get(node)
        if row is None or row.boot_id != boot_id:
            return Change((node,), f"boot {boot_id} {why}; it was no member", news=False)
        del self._rows[node]
        return Change((node,), why, (row.term,))
