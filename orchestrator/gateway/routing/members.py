"""The membership table at work: announcements held open, places lent to requests, silence noticed.

Everything runs on one event loop, so that a change of the table and what follows from it are one step. When a term
ends, the tries that run in it end with NodeFailed.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import structlog

from orchestrator.gateway.job import Job, QueueFull
from orchestrator.gateway.nodes.attempt import Why
from orchestrator.gateway.nodes.connection import Pool
from orchestrator.gateway.nodes.link import Link
from orchestrator.gateway.routing.waiting import Place, Queue, Waiter
from orchestrator.gateway.turns import Turns
from policies.model.vocabulary import Recovery
from policies.serving.membership import Change, Load, Membership, Row, Wanted
from policies.serving.silence import SilenceLimits
from policies.serving.wire import HOLD_S, Announce, AnnounceReply, MembershipChange, MemberStatus, PolicyRef

log = structlog.get_logger()

GONE = "it is no member any more"
# So long the first member with a new policy is given no more than its share while others load it. What it gets
# beyond that and they take back costs a connection each, and what was computed of their prompts.
SHARES_S = 0.25
CHANGES_MAX = 64  # of the membership that are remembered
# A trainer's batch of 4,096 requests waits whole while there is no node, and so do those of some impatient
# clients; beyond this somebody asks in a loop.
WAITING_MAX = 65_536
# Their prompts, at 8 bytes a token: two batches of 4,096 prompts of 16,384 tokens.
WAITING_SIZE_MAX = 1024**3
TOKEN_SIZE = 8


class Members:
    """The rollout nodes as one gateway knows them.

    Args:
        token: the run's secret, which nodes demand.
        tls: for members on other machines.
        limits: makes the silence limits of one member.
    """

    def __init__(
        self, token: str, tls: ssl.SSLContext | None = None, limits: Callable[[], SilenceLimits] = SilenceLimits
    ) -> None:
        self.table = Membership()
        self.wanted: PolicyRef | None = None
        self.recovery: Recovery = "continue"
        self.links: dict[int, Link] = {}  # by term
        self.expected_tokens = 0.0  # the mean length of finished completions; 0 before the first
        self.turns = Turns()
        self._token = token
        self._tls = tls
        self._make_limits = limits
        self._held: dict[str, asyncio.Future[None]] = {}  # by node
        self._told: dict[str, AnnounceReply] = {}  # by boot
        self._queues: dict[Wanted, Queue] = {}
        self._waiting = 0
        self._waiting_size = 0
        self._changed = asyncio.Event()  # set once, by the next change of the table or of what is wanted
        self._shares_until_s: float | None = 0.0  # that are kept for members that load; None: nobody serves yet
        self._started_at_s = time.monotonic()
        self._changes: deque[MembershipChange] = deque(maxlen=CHANGES_MAX)
        self._changes_seen = 0

    def want(self, policy: PolicyRef, recovery: Recovery = "continue") -> None:
        """Tell every member which policy to hold from now on. `recovery` is the run's."""
        self.recovery = recovery
        if policy != self.wanted:
            log.info("policy_wanted", policy=policy.label)
            self.wanted = policy
            self._shares_until_s = None
            self.table.forget_groups()
            self._note_change()
            for node in list(self._held):
                self._answer(node)

    async def announce(self, node: str, said: Announce) -> AnnounceReply:
        """Take an announcement and return the answer: at once if it is news to that boot, else after HOLD_S."""
        self._answer(node)  # an earlier announcement that is still held is superseded
        before = self.table.row(node)
        tokens = before.engine.tokens if before is not None and before.engine is not None else None
        self.apply(self.table.announce(node, said, time.monotonic()))
        if tokens is not None and said.engine is not None and said.engine.tokens > tokens:
            self._note_work(node)
        if self.table.is_void(said.boot_id):
            return AnnounceReply(drain=True)
        self._note_first()
        self._serve_waiting()
        if self._reply(node) == self._told.get(said.boot_id):
            await self._hold(node, said.boot_id)
        reply = self._told[said.boot_id] = self._reply(node)
        return reply

    def _note_work(self, node: str) -> None:
        """Its engine has computed tokens since its last word, whether an event has told of them or not."""
        row = self.table.row(node)
        link = None if row is None else self.links.get(row.term)
        if link is not None:
            link.worked_s = asyncio.get_running_loop().time()

    def leave(self, node: str, boot_id: str) -> None:
        """The node says that this boot is over."""
        self.apply(self.table.leave(node, boot_id))
        self._told.pop(boot_id, None)

    def remove(self, node: str) -> bool:
        """Take the node out, for good as this boot of it. Returns whether it was a member."""
        member = self.table.row(node) is not None
        self.apply(self.table.remove(node))
        self._answer(node)
        return member

    def drain(self, node: str) -> None:
        """Send the node nothing new; it is told to leave once nothing runs on it."""
        self.apply(self.table.drain(node))
        self._answer(node)

    def doubt(self, link: Link, why: str, *, whole: bool = False) -> None:
        """A request failed there, or all did: wait for the next announcement, which is asked for at once."""
        self.apply(self.table.doubt(link.node, link.term, why, whole=whole))
        self._answer(link.node)

    def mute(self, link: Link, why: str) -> None:
        """The member does not answer: what runs there goes elsewhere, and nothing goes there until it does."""
        self.apply(self.table.muted(link.node, link.term, why))
        link.give_up(Why.SILENT, f"it does not answer: {why}")

    def unmute(self, link: Link) -> None:
        """The member answers."""
        self.apply(self.table.answered(link.node, link.term))
        self._serve_waiting()

    async def place(self, job: Job, load: Load, avoid: frozenset[str]) -> Place:
        """Return a place on a member that may serve the job, waiting for as long as there is none.

        Raises QueueFull.
        """
        wanted = Wanted(job.policy, job.max_staleness_steps)
        if wanted not in self._queues or load.replayed:
            row = self._choose(wanted, job, load, avoid)
            if row is not None:
                return self._place_on(row, load)
        with self._counted(job):
            waiter = Waiter(job, load, avoid, asyncio.get_running_loop().create_future())
            self._queues.setdefault(wanted, Queue()).add(waiter)
            self._serve_waiting()  # those before it may have gone away
            try:
                return await waiter.place
            except asyncio.CancelledError:
                if waiter.place.done() and not waiter.place.cancelled():
                    self.give_back(waiter.place.result())
                raise

    async def another(self, job: Job) -> bool:
        """Return whether a member may serve the job that has not refused it, waiting for as long as one loads what
        the job wants and none does.

        Raises QueueFull.
        """
        wanted = Wanted(job.policy, job.max_staleness_steps)
        if self._not_refused(job, self.table.serving(wanted)):
            return True
        with self._counted(job):
            while self.wanted and wanted.accepts(self.wanted.label):
                if not self._not_refused(job, self.table.loading(wanted)):
                    break
                await self._changed.wait()
                if self._not_refused(job, self.table.serving(wanted)):
                    return True
        return False

    def _not_refused(self, job: Job, rows: tuple[Row, ...]) -> bool:
        return any(row.node not in job.refused_by for row in rows)

    @contextmanager
    def _counted(self, job: Job) -> Iterator[None]:
        """As one that waits. Raises QueueFull."""
        size = job.prompt_tokens * TOKEN_SIZE if job.prompt_size is None else job.prompt_size
        if not job.admitted:
            self.check_room(size)
        self._waiting += 1
        self._waiting_size += size
        job.waiting = True
        try:
            yield
        finally:
            self._waiting -= 1
            self._waiting_size -= size
            job.waiting = False

    def begun(self, place: Place) -> None:
        """The job at this place got its first token there."""
        place.begun = True
        self.table.first_token(place.link.node, place.link.term, place.load)
        self._serve_waiting()

    def give_back(self, place: Place) -> None:
        """A job has left its place, in whatever way."""
        node = place.link.node
        self.table.finished(node, place.link.term, place.load, begun=place.begun)
        if self.table.draining(node) and self._reply(node).drain:
            self._answer(node)
        self._serve_waiting()

    def waiting(self) -> int:
        """How many jobs have no place."""
        return self._waiting

    def check_room(self, size: int = 0) -> None:
        """Raise QueueFull if no more may wait, of prompts of so many bytes."""
        if self._waiting >= WAITING_MAX or self._waiting_size + size > WAITING_SIZE_MAX:
            raise QueueFull(
                f"{self._waiting} requests of {self._waiting_size >> 20} MiB wait for a node: no more are taken"
            )

    @property
    def waiting_bytes(self) -> int:
        """The size of their prompts."""
        return self._waiting_size

    def changes(self) -> list[MembershipChange]:
        """The last changes of the table, the oldest first."""
        return list(self._changes)

    def status(self) -> list[MemberStatus]:
        """Every member, in the order in which they came."""
        now_s = time.monotonic()
        serving = () if self.wanted is None else self.table.serving(Wanted(self.wanted.label))
        return [self._describe(row, row in serving, now_s) for row in self.table.rows]

    def expire(self) -> None:
        """Take out those from whom nothing was heard for too long."""
        self.apply(self.table.expire(time.monotonic()))

    async def close(self) -> None:
        """Close every connection."""
        for term in list(self.links):
            self._end(term, "the gateway ends")
        await asyncio.sleep(0)

    async def _hold(self, node: str, boot_id: str) -> None:
        held: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._held[node] = held
        try:
            await asyncio.wait({held}, timeout=HOLD_S)
        except asyncio.CancelledError:  # the connection broke
            if self._held.get(node) is held:
                self.apply(self.table.connection_lost(node, boot_id))
            raise
        finally:
            if self._held.get(node) is held:
                del self._held[node]

    def _answer(self, node: str) -> None:
        """Answer the node's held announcement now, if there is one."""
        held = self._held.pop(node, None)
        if held is not None and not held.done():
            held.set_result(None)

    def _reply(self, node: str) -> AnnounceReply:
        row = self.table.row(node)
        if row is None or not self.table.draining(node):
            return AnnounceReply(policy=self.wanted)
        return AnnounceReply(drain=row.running == 0)

    def apply(self, change: Change) -> None:
        """Note what happened to the table, and end what it ended."""
        if change.news:
            log.info("membership", change=change.reason)
            self._changes_seen += 1
            at_s = time.monotonic() - self._started_at_s
            self._changes.append(MembershipChange(self._changes_seen, at_s, change.reason))
            self._note_change()
        for term in change.ended:
            self._end(term, GONE)

    def _note_change(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _end(self, term: int, why: str) -> None:
        link = self.links.pop(term, None)
        if link is not None:
            link.close(why)

    def waits(self, policy: str) -> bool:
        """Whether a job has no place that a member with this policy could have."""
        return any(wanted.accepts(policy) for wanted in self._queues)

    def _note_first(self) -> None:
        """The first member that serves a new policy is given its share; the others may be there in a moment."""
        if self._shares_until_s is None and self.wanted and self.table.serving(Wanted(self.wanted.label)):
            self._shares_until_s = time.monotonic() + SHARES_S
            asyncio.get_running_loop().call_later(SHARES_S, self._serve_waiting)

    def _has_its_share(self, wanted: Wanted, row: Row) -> bool:
        """Whether the rest is kept for members that load."""
        if self._shares_until_s is None or time.monotonic() >= self._shares_until_s:
            return False
        serving, loading = self.table.serving(wanted), self.table.loading(wanted)
        if not loading:
            return False
        queue = self._queues.get(wanted)
        tokens = sum(one.outstanding for one in serving) + (queue.tokens if queue else 0)
        return row.outstanding * (len(serving) + len(loading)) >= tokens

    def _choose(self, wanted: Wanted, job: Job, load: Load, avoid: frozenset[str]) -> Row | None:
        """A completion is of one policy: that which made what has arrived, while anybody serves that."""
        if job.token_ids and job.made_from != wanted.label:
            same = Wanted(job.made_from)
            if self.table.serving(same):
                return self.table.choose(same, load, avoid, job.refused_by)
        row = self.table.choose(wanted, load, avoid, job.refused_by)
        return None if row is not None and not load.replayed and self._has_its_share(wanted, row) else row

    def _serve_waiting(self) -> None:
        """Give places to those who wait, in their order, for as long as there are any."""
        for wanted, queue in list(self._queues.items()):
            for waiters in (queue.handed_over, queue.new):
                aside = []  # what one member has refused does not keep the others from that member
                while waiters:
                    waiter = waiters[0]
                    if not waiter.place.done():
                        row = self._choose(wanted, waiter.job, waiter.load, waiter.avoid)
                        if row is None and waiter.job.refused_by:
                            aside.append(waiters.popleft())
                            continue
                        if row is None:
                            break
                        waiter.place.set_result(self._place_on(row, waiter.load))
                    queue.tokens -= waiters.popleft().load.tokens
                waiters.extendleft(reversed(aside))
            if not queue:
                del self._queues[wanted]

    def _place_on(self, row: Row, load: Load) -> Place:
        link = self.links.get(row.term)
        if link is None:
            pool = Pool(row.address, self._tls)
            link = Link(
                row.node, row.boot_id, row.term, row.address, self._token, pool, self._make_limits(), self.turns
            )
            self.links[row.term] = link
        self.table.started(row.node, load)
        assert row.policy is not None
        return Place(link, row.policy, load)

    def _describe(self, row: Row, serving: bool, now_s: float) -> MemberStatus:
        return MemberStatus(
            node=row.node,
            boot_id=row.boot_id,
            address=row.address,
            policy=row.policy,
            serving=serving,
            draining=self.table.draining(row.node),
            requests_running=row.running,
            seen_s_ago=now_s - row.seen_at_s,
            max_requests=row.max_requests,
            kv_tokens=row.kv_tokens,
            engine=row.engine,
            unfit=row.unfit,
        )
