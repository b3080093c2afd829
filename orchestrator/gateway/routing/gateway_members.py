"""The gateway's members: their announcements, the replies to them, and which members are trusted.

Everything runs on one event loop, so a change of the table and its consequences are one step. When a term ends,
its attempts end with NodeFailed.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections import deque
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, replace

import structlog

from grpo_orch.orchestrator.gateway.nodes.connection import Pool
from grpo_orch.orchestrator.gateway.nodes.upstream import HandoverReason, Link, moving_mean
from grpo_orch.orchestrator.gateway.routing.places import Places
from grpo_orch.orchestrator.gateway.time_slices import TimeSlices
from grpo_orch.policies.model.vocabulary import Recovery, machine_of
from grpo_orch.policies.serving.demand import Demand
from grpo_orch.policies.serving.gateway_status import MembershipChange, MemberStatus, VersionSpread
from grpo_orch.policies.serving.joining import JoiningNode, Stage, makes_progress
from grpo_orch.policies.serving.membership import Change, Member, Membership
from grpo_orch.policies.serving.silence_limits import SilenceLimits
from grpo_orch.policies.serving.wire import HOLD_S, Announce, AnnounceReply, PolicyRef, PolicyStages

log = structlog.get_logger()

NOT_A_MEMBER = "left the membership"
# Of those that reported last. Silent nodes are kept: the controller reads how long they have been silent.
JOINING_NODES_MAX = 256
VERSIONS_KEPT = 8
CHANGES_MAX = 64  # membership changes that are kept
LENGTH_SHARE = 0.02  # weight of a finished completion in the mean length


class Members:
    """One gateway's members.

    Args:
        token: the run's secret, sent to the nodes.
        tls: for members on other machines.
        limits: makes the silence limits of a member.

    Attributes:
        table, demand: the members and the requested policies, to read.
        version_spreads: how the last policies reached the members.
        places: assigns the members' places to jobs.
    """

    def __init__(
        self, token: str, tls: ssl.SSLContext | None = None, limits: Callable[[], SilenceLimits] = SilenceLimits
    ) -> None:
        self._token = token
        self._tls = tls
        self._make_limits = limits
        self.time_slices = TimeSlices()  # shared by all long work on this event loop
        self.table = Membership()
        self.places = Places(self.table, self._connect, self._answer_if_drained)
        self.announcements = Announcements()
        self.version_spreads = VersionSpreads()
        self.joining_nodes = JoiningNodes()
        self._last_replies: dict[str, AnnounceReply] = {}  # by boot
        self.demand = Demand()
        self.recovery: Recovery = "continue"  # the run's, from the last batch or session
        self.expected_tokens = 0.0  # mean number of tokens of finished completions; 0 before the first
        self._started_at_s = time.monotonic()
        self._changes: deque[MembershipChange] = deque(maxlen=CHANGES_MAX)

    @property
    def wanted(self) -> PolicyRef | None:
        """The newest requested policy."""
        return self.demand.newest

    async def any_link_except(self, failed: Container[str]) -> Link | None:
        """Return the link to the least loaded member outside `failed`, whatever it holds; None if all have failed.

        Waits while there are no members.
        """
        while not (rows := [row for row in self.table.members if not row.is_unresponsive]):
            await self.places.wait_for_change()
        rows = [row for row in rows if row.node not in failed]
        return self.places.link(min(rows, key=lambda row: row.outstanding)) if rows else None

    def learn_length(self, tokens: int) -> None:
        """Include a finished completion in the mean length."""
        self.expected_tokens = moving_mean(self.expected_tokens, tokens, LENGTH_SHARE)

    @property
    def changes(self) -> list[MembershipChange]:
        """The last CHANGES_MAX changes of the table, the oldest first."""
        return list(self._changes)

    def status(self) -> list[MemberStatus]:
        """Return the status of every member, in the order of joining."""
        now_s = time.monotonic()
        held = {row.policy for row in self.table.members if row.policy and self.demand.is_wanted(row.policy)}
        terms = {row.term for policy in held for row in self.table.serving(policy)}
        return [self._status_of(row, row.term in terms, now_s) for row in self.table.members]

    def want(self, policy: PolicyRef, requests: int = 0, recovery: Recovery = "continue") -> None:
        """Add open requests of a policy. `recovery` is the run's."""
        self.recovery = recovery
        if not self.demand.is_wanted(policy.label):
            log.info("policy_requested", policy=policy.label)
            self.version_spreads.want(policy.label, self.table.members, time.monotonic())
        self._change_demand(lambda: self.demand.add(policy, requests))

    def finish(self, policy: str, requests: int) -> None:
        """Remove open requests of a policy, finished or abandoned."""
        self._change_demand(lambda: self.demand.finish(policy, requests))

    def _change_demand(self, change: Callable[[], None]) -> None:
        before, had_older = self.demand.newest, self.demand.has_older
        change()
        newest = self.demand.newest
        if newest is not None and newest != before:
            self.places.want(newest.label)
        if newest != before or self.demand.has_older != had_older:
            self.divide()

    def divide(self) -> None:
        """Divide the members between the requested policies, and notify those that are to change."""
        newest = self.demand.newest
        if newest is None:
            return
        targets = {machine_of(row.node): newest.label for row in self.table.members}
        if self.demand.has_older:
            targets |= self.demand.targets(self.table.loadable())
        changed = self.table.set_targets(targets)
        for node in changed:
            self.announcements.answer(node)
        if changed:
            self.places.note_change()
            self.places.assign()

    def is_busy_with_other_policy(self, policy: str) -> bool:
        """Return whether a member still runs requests of another policy, which finish first."""
        return any(row.running and row.policy != policy and not row.unfit for row in self.table.members)

    def is_changing_policy(self, node: str, policy: str) -> bool:
        """Return whether the node is to load another policy than this one."""
        row = self.table.member(node)
        return row is not None and row.target not in ("", policy)

    async def announce(self, node: str, announcement: Announce) -> AnnounceReply:
        """Apply an announcement. Return the reply when it differs from that boot's last, or after HOLD_S."""
        self.announcements.answer(node)  # an earlier announcement that is still held is superseded
        before = self.table.member(node)
        tokens = before.engine.tokens if before is not None and before.engine is not None else None
        self._apply(self.table.announce(node, announcement, time.monotonic()))
        if tokens is not None and announcement.engine is not None and announcement.engine.tokens > tokens:
            self._note_work(node)
        if self.table.is_void(announcement.boot_id):
            return AnnounceReply(drain=True)
        self.version_spreads.record(node, announcement, time.monotonic())
        if self.demand.newest is not None and (row := self.table.member(node)) is not None and not row.target:
            self.table.set_targets({machine_of(node): self._target_on(machine_of(node), self.demand.newest.label)})
        if before is None:
            self.joining_nodes.forget(machine_of(node))
        if announcement.stage is None:
            self.joining_nodes.forget(node)
        else:
            self.joining_nodes.update(node, announcement.stage, time.monotonic())
        self.places.assign()
        if self._reply(node) == self._last_replies.get(announcement.boot_id):
            await self.announcements.hold(
                node, lambda: self._apply(self.table.connection_lost(node, announcement.boot_id))
            )
        reply = self._last_replies[announcement.boot_id] = self._reply(node)
        return reply

    def leave(self, node: str, boot_id: str) -> None:
        """Remove this boot of the node, at the node's own request."""
        self._apply(self.table.leave(node, boot_id))
        self._last_replies.pop(boot_id, None)

    def remove(self, node: str) -> bool:
        """Remove the node or all of a machine's members; their boots cannot return. Return whether any existed."""
        rows = self.table.on_machine(node)
        self._apply(self.table.remove(node))
        for row in rows:
            self.announcements.answer(row.node)
        return bool(rows)

    def drain(self, node: str) -> None:
        """Send no new requests to the node, or to a machine's members; each leaves after its last request."""
        self._apply(self.table.drain(node))
        for row in self.table.on_machine(node):
            self.announcements.answer(row.node)

    def suspect(self, link: Link, why: str, *, whole: bool = False) -> None:
        """Send the member nothing new until its next announcement, for a failed request; `whole`: all have failed.

        The held announcement is answered immediately, so that the next one comes soon.
        """
        self._apply(self.table.suspect(link.node, link.term, why, whole=whole))
        self.announcements.answer(link.node)

    def mark_unresponsive(self, link: Link, why: str) -> None:
        """Move the member's requests to others, and send it nothing until it answers again."""
        self._apply(self.table.mark_unresponsive(link.node, link.term, why))
        link.fail_attempts(HandoverReason.SILENT, f"does not answer: {why}")

    def mark_responsive(self, link: Link) -> None:
        """Send requests to the member again, because it has answered."""
        self._apply(self.table.mark_responsive(link.node, link.term))
        self.places.assign()

    def expire(self) -> None:
        """Remove members that have not announced themselves for too long."""
        self._apply(self.table.expire(time.monotonic()))

    async def close(self) -> None:
        """Close every connection."""
        for term in list(self.places.links):
            self.places.end_term(term, "the gateway stops")
        await asyncio.sleep(0)

    def _apply(self, change: Change | None) -> None:
        """Log and record a change of the table, and close the terms that it ended."""
        if change is None:
            return
        log.info("membership_changed", change=change.reason)
        seq = self._changes[-1].seq + 1 if self._changes else 1
        at_s = time.monotonic() - self._started_at_s
        self._changes.append(MembershipChange(seq, at_s, change.reason))
        self.places.note_change()
        for term in change.ended_terms:
            self.places.end_term(term, NOT_A_MEMBER)

    def _note_work(self, node: str) -> None:
        """Record that the node's engine has computed tokens since its last announcement."""
        row = self.table.member(node)
        link = None if row is None else self.places.links.get(row.term)
        if link is not None:
            link.last_work_s = asyncio.get_running_loop().time()

    def _reply(self, node: str) -> AnnounceReply:
        row = self.table.member(node)
        if row is None or not self.table.is_draining(node):
            return AnnounceReply(policy=self.demand.ref(row.target) if row is not None else self.demand.newest)
        return AnnounceReply(drain=row.running == 0)

    def _target_on(self, machine: str, newest: str) -> str:
        """Return the policy of the machine's other engines, since a machine fetches one policy at a time."""
        return next((row.target for row in self.table.on_machine(machine) if row.target), newest)

    def _answer_if_drained(self, node: str) -> None:
        """Called when a job leaves a node; a draining node may leave after its last."""
        if self.table.is_draining(node) and self._reply(node).drain:
            self.announcements.answer(node)

    def _connect(self, row: Member) -> Link:
        pool = Pool(row.address, self._tls)
        return Link(
            row.node, row.boot_id, row.term, row.address, self._token, pool, self._make_limits(), self.time_slices
        )

    def _status_of(self, row: Member, serving: bool, now_s: float) -> MemberStatus:
        return MemberStatus(
            node=row.node,
            boot_id=row.boot_id,
            address=row.address,
            policy=row.policy,
            serving=serving,
            draining=self.table.is_draining(row.node),
            requests_running=row.running,
            seen_s_ago=now_s - row.announced_at_s,
            max_requests=row.max_requests,
            kv_tokens=row.kv_tokens,
            engine=row.engine,
            engines=row.engines,
            unfit=row.unfit,
            stage=row.stage,
        )


class Announcements:
    """Announcements that are held open until their reply changes, up to `hold_s`; at most one per node."""

    def __init__(self) -> None:
        self.hold_s = HOLD_S
        self.held: dict[str, asyncio.Future[None]] = {}

    async def hold(self, node: str, lost: Callable[[], None]) -> None:
        """Return when the announcement is to be answered, after `hold_s` at the latest.

        Args:
            node: the sender, whose earlier announcement must have been answered.
            lost: called if the node's connection breaks meanwhile, which cancels this call.
        """
        held: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.held[node] = held
        try:
            await asyncio.wait({held}, timeout=self.hold_s)
        except asyncio.CancelledError:
            if self.held.get(node) is held:
                lost()
            raise
        finally:
            if self.held.get(node) is held:
                del self.held[node]

    def answer(self, node: str) -> None:
        """Answer the node's held announcement now, if there is one."""
        held = self.held.pop(node, None)
        if held is not None and not held.done():
            held.set_result(None)


class JoiningNodes:
    """Nodes that start and are not members yet: their stages, and since when they make no progress.

    `joining_events` counts the progress events of all of them.
    """

    def __init__(self) -> None:
        self.moves = 0
        # By node: its stage, the stage at its last progress, and when that was.
        self._stages: dict[str, tuple[Stage, Stage, float]] = {}

    def update(self, node: str, stage: Stage, now_s: float) -> None:
        """Record a node's stage."""
        before = self._stages.pop(node, None)
        if before is None or makes_progress(before[1], stage):
            self._stages[node] = stage, stage, now_s
            self.moves += 1
        else:
            self._stages[node] = stage, *before[1:]
        while len(self._stages) > JOINING_NODES_MAX:
            del self._stages[next(iter(self._stages))]

    def forget(self, node: str) -> None:
        """Drop a node that has become a member or finished its stage."""
        self._stages.pop(node, None)

    def status(self, machines: Container[str], now_s: float) -> list[JoiningNode]:
        """Return the nodes outside `machines`, the machines that have members."""
        return [
            JoiningNode(node, stage, now_s - progress_at_s)
            for node, (stage, _, progress_at_s) in self._stages.items()
            if machine_of(node) not in machines
        ]


@dataclass(slots=True)
class _Version:
    spread: VersionSpread
    wanted_at_s: float
    pending: set[str]  # nodes


class VersionSpreads:
    """How the last policies reached the members: times and stages.

    `now_s` is on any monotonic clock. Nodes that join later do not count.
    """

    def __init__(self) -> None:
        self._last: deque[_Version] = deque(maxlen=VERSIONS_KEPT)

    @property
    def last(self) -> list[VersionSpread]:
        """The last wanted policies, the oldest first."""
        return [version.spread for version in self._last]

    def want(self, label: str, rows: Iterable[Member], now_s: float) -> None:
        """Start recording a policy; members that hold it already do not count."""
        if all(version.spread.policy != label for version in self._last):
            nodes = {row.node for row in rows if row.policy != label}
            self._last.append(_Version(VersionSpread(label, len(nodes)), now_s, nodes))

    def record(self, node: str, announcement: Announce, now_s: float) -> None:
        """Record the policy that a member holds."""
        for version in self._last:
            if version.spread.policy == announcement.policy and node in version.pending:
                version.pending.remove(node)
                stages = announcement.stages or PolicyStages("")
                version.spread = _with_member(version.spread, stages, now_s - version.wanted_at_s)


def _with_member(spread: VersionSpread, took: PolicyStages, ready_s: float) -> VersionSpread:
    return replace(
        spread,
        ready=spread.ready + 1,
        first_ready_s=spread.first_ready_s if spread.ready else ready_s,
        last_ready_s=ready_s,
        fetch_s=max(spread.fetch_s, took.fetch_s),
        fetched_bytes=max(spread.fetched_bytes, took.fetched_bytes),
        load_s=max(spread.load_s, took.load_s),
    )
