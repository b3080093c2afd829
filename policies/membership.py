"""Who may serve which policy version: the table that the gateway keeps of the rollout nodes.

Every change says in one sentence what happened and which terms it ended; whoever keeps the table moves the
requests of those terms elsewhere. The table holds no connection and reads no clock: `now_s` is any clock that does
not go back. A boot is one life of a node's server process; a node that announces a new boot voids all that was
known of it, and a boot that was voided or has left never comes back. A term is one uninterrupted membership of one
boot: a boot that fell silent and speaks again is in its second.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace

from policies.wire import SILENT_S, Announce

# Requests of one prompt stay together on the member that has its prompt cached, until that member runs so many
# more requests than the least loaded one: up to there a batch costs a server hardly more time per token.
TOGETHER_REQUESTS = 8


@dataclass(frozen=True, slots=True)
class Row:
    """One member. `doubted` is set by a failed request and cleared by the next announcement."""

    term: int
    node: str
    boot_id: str
    address: str
    policy: str | None
    max_requests: int
    seen_at_s: float
    doubted: bool = False
    running: int = 0


@dataclass(frozen=True, slots=True)
class Change:
    """What an occurrence did to the table: why, and the terms that it ended."""

    reason: str
    ended: tuple[int, ...] = ()


class Membership:
    """The table, for one gateway."""

    def __init__(self) -> None:
        self._rows: dict[str, Row] = {}
        self._terms = 0
        self._draining: set[str] = set()  # nodes; stays true over their boots
        self._void: set[str] = set()  # boots
        self._together: dict[Hashable, str] = {}  # group -> the node that its last request went to

    @property
    def rows(self) -> tuple[Row, ...]:
        """Every member, in the order in which they came."""
        return tuple(self._rows.values())

    def row(self, node: str) -> Row | None:
        """The node's row, or None when it is not a member."""
        return self._rows.get(node)

    def draining(self, node: str) -> bool:
        """Whether the node was told to finish what it has and leave."""
        return node in self._draining

    def is_void(self, boot_id: str) -> bool:
        """Whether that boot was replaced or has left: it is no member and will not be one again."""
        return boot_id in self._void

    def announce(self, node: str, said: Announce, now_s: float) -> Change:
        """A node says what it is."""
        if said.boot_id in self._void:
            return Change(f"{node}: boot {said.boot_id} is over and was not let in")
        row = self._rows.get(node)
        holds = f"holds {said.policy or 'base weights'}"
        if row is not None and row.boot_id == said.boot_id:
            self._put(node, said, now_s, row.term, row.running)
            return Change(f"{node}: {holds}" + ("" if row.policy == said.policy else f", before: {row.policy}"))
        self._terms += 1
        self._put(node, said, now_s, self._terms, 0)
        if row is None:
            return Change(f"{node}: joined as boot {said.boot_id}, {holds}")
        self._void.add(row.boot_id)
        return Change(f"{node}: boot {said.boot_id} in place of {row.boot_id}, {holds}", (row.term,))

    def connection_lost(self, node: str, boot_id: str) -> Change:
        """The connection on which the boot announced itself broke. It may announce itself again."""
        return self._out(node, boot_id, "its announcing connection was lost")

    def leave(self, node: str, boot_id: str) -> Change:
        """The node says that this boot is over, member or not."""
        self._void.add(boot_id)
        return self._out(node, boot_id, "left")

    def drain(self, node: str) -> Change:
        """No new request goes to the node, on this boot or a later one; those that run go on."""
        self._draining.add(node)
        row = self._rows.get(node)
        return Change(f"{node}: drains, {row.running if row else 0} requests running")

    def doubt(self, node: str, term: int, why: str) -> Change:
        """A request failed there: no new one goes to the member before it has announced itself again."""
        row = self._rows.get(node)
        if row is None or row.term != term:
            return Change(f"{node}: no member any more")
        self._rows[node] = replace(row, doubted=True)
        return Change(f"{node}: in doubt, {why}")

    def expire(self, now_s: float) -> Change:
        """Take out every member that has said nothing for more than SILENT_S. It may announce itself again."""
        silent = [row for row in self._rows.values() if now_s - row.seen_at_s > SILENT_S]
        for row in silent:
            del self._rows[row.node]
        if not silent:
            return Change("nobody is silent")
        names = ", ".join(row.node for row in silent)
        return Change(f"{names}: nothing heard for {SILENT_S:g} s", tuple(row.term for row in silent))

    def serving(self, policy: str) -> tuple[Row, ...]:
        """The members that hold the policy, are not leaving and not in doubt, with room or without."""
        return tuple(
            row
            for row in self._rows.values()
            if row.policy == policy and not row.doubted and row.node not in self._draining
        )

    def choose(self, policy: str, group: Hashable, avoid: str | None = None) -> Row | None:
        """Return the member for one more request, or None when there is none with room.

        Args:
            policy: the version that the member must hold.
            group: what the requests of one prompt have in common.
            avoid: the node where the request failed last; taken only when there is no other.
        """
        able = [row for row in self.serving(policy) if row.running < row.max_requests]
        able = [row for row in able if row.node != avoid] or able
        if not able:
            return None
        least = min(able, key=lambda row: row.running)
        mate = self._together.get(group)
        for row in able:
            if row.node == mate and row.running < least.running + TOGETHER_REQUESTS:
                return row
        return least

    def started(self, node: str, group: Hashable) -> None:
        """A request of the group went to the node."""
        self._rows[node] = replace(self._rows[node], running=self._rows[node].running + 1)
        self._together[group] = node

    def finished(self, node: str, term: int) -> None:
        """A request that went to the node in that term is over, in whatever way."""
        row = self._rows.get(node)
        if row is not None and row.term == term:
            self._rows[node] = replace(row, running=row.running - 1)

    def forget_groups(self) -> None:
        """New weights void every prompt that a member has cached."""
        self._together.clear()

    def _put(self, node: str, said: Announce, now_s: float, term: int, running: int) -> None:
        self._rows[node] = Row(
            term=term,
            node=node,
            boot_id=said.boot_id,
            address=said.address,
            policy=said.policy,
            max_requests=said.max_requests,
            seen_at_s=now_s,
            running=running,
        )

    def _out(self, node: str, boot_id: str, why: str) -> Change:
        row = self._rows.get(node)
        if row is None or row.boot_id != boot_id:
            return Change(f"{node}: boot {boot_id} {why}; it was no member")
        del self._rows[node]
        return Change(f"{node}: {why}", (row.term,))
