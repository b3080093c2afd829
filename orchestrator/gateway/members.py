"""The membership table at work: announcements held open, places lent to requests, silence noticed.

Everything runs on one event loop, so that a change of the table and what follows from it are one step. When a term
ends, the requests that run in it are cancelled here and then see NodeFailed.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Coroutine, Hashable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import aiohttp
import structlog

from orchestrator.gateway.upstream import CONNECT_S, NodeFailed
from policies.membership import Change, Membership, Row
from policies.wire import HOLD_S, Announce, AnnounceReply, MemberStatus, PolicyRef

log = structlog.get_logger()
T = TypeVar("T")

SWEEP_S = 0.25
# Less than a node's own limit (tasks.vllm_server), so that a request is never sent into a connection that the node
# is closing at that moment.
KEEPALIVE_S = 30.0
GONE = "it is no member any more"


@dataclass(slots=True)
class Link:
    """The connections to one member in one term, and the requests that run over them."""

    session: aiohttp.ClientSession
    running: set[asyncio.Task[Any]] = field(default_factory=set)
    over: bool = False


@dataclass(frozen=True, slots=True)
class Place:
    """A request's place on a member, to be given back with `Members.give_back`."""

    node: str
    boot_id: str
    term: int
    url: str
    link: Link

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run one request's work here. Raises NodeFailed when the term ends before the work does."""
        if self.link.over:
            work.close()
            raise NodeFailed(GONE)
        task = asyncio.ensure_future(work)
        self.link.running.add(task)
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            raise
        finally:
            self.link.running.discard(task)
        if task.cancelled():
            raise NodeFailed(GONE)
        return task.result()


@dataclass(slots=True)
class _Waiter:
    group: Hashable
    avoid: str | None
    place: asyncio.Future[Place]


class Members:
    """The rollout nodes as one gateway knows them."""

    def __init__(self) -> None:
        self.table = Membership()
        self.wanted: PolicyRef | None = None
        self._links: dict[int, Link] = {}  # by term
        self._held: dict[str, asyncio.Future[None]] = {}  # by node
        self._told: dict[str, AnnounceReply] = {}  # by boot
        self._waiting: dict[str, deque[_Waiter]] = {}  # by policy
        self._closing: set[asyncio.Task[None]] = set()

    def want(self, policy: PolicyRef) -> None:
        """Tell every member which policy to hold from now on."""
        if policy != self.wanted:
            log.info("policy_wanted", policy=policy.label)
            self.wanted = policy
            self.table.forget_groups()
            for node in list(self._held):
                self._answer(node)

    async def announce(self, node: str, said: Announce) -> AnnounceReply:
        """Take an announcement and return the answer: at once if it is news to that boot, else after HOLD_S."""
        self._answer(node)  # an earlier announcement that is still held is superseded
        self._apply(self.table.announce(node, said, time.monotonic()))
        if self.table.is_void(said.boot_id):
            return AnnounceReply(drain=True)
        self._serve_waiting()
        if self._reply(node) == self._told.get(said.boot_id):
            await self._hold(node, said.boot_id)
        reply = self._told[said.boot_id] = self._reply(node)
        return reply

    def leave(self, node: str, boot_id: str) -> None:
        """The node says that this boot is over."""
        self._apply(self.table.leave(node, boot_id))

    def drain(self, node: str) -> None:
        """Send the node nothing new; it is told to leave once nothing runs on it."""
        self._apply(self.table.drain(node))
        self._answer(node)

    def doubt(self, place: Place, why: str) -> None:
        """A request failed there: wait for the next announcement, which is asked for at once."""
        row = self.table.row(place.node)
        if row is not None and row.term == place.term and not row.doubted:
            change = self.table.doubt(place.node, place.term, why)
            log.warning("membership", change=change.reason)
            self._answer(place.node)

    async def place(self, policy: str, group: Hashable, avoid: str | None) -> Place:
        """Return a place on a member that holds the policy, waiting for as long as there is none."""
        waiter = _Waiter(group, avoid, asyncio.get_running_loop().create_future())
        self._waiting.setdefault(policy, deque()).append(waiter)
        self._serve_waiting()
        try:
            return await waiter.place
        except asyncio.CancelledError:
            if waiter.place.done() and not waiter.place.cancelled():
                self.give_back(waiter.place.result())
            raise

    def give_back(self, place: Place) -> None:
        """A request is over, in whatever way."""
        self.table.finished(place.node, place.term)
        if self._reply(place.node).drain:
            self._answer(place.node)
        self._serve_waiting()

    def waiting(self) -> int:
        """How many requests have no place."""
        return sum(not waiter.place.done() for queue in self._waiting.values() for waiter in queue)

    def status(self) -> list[MemberStatus]:
        """Every member, in the order in which they came."""
        now_s = time.monotonic()
        serving = () if self.wanted is None else self.table.serving(self.wanted.label)
        return [self._describe(row, row in serving, now_s) for row in self.table.rows]

    async def sweep(self) -> None:
        """Take out silent members, for ever."""
        while True:
            before_s = time.monotonic()
            await asyncio.sleep(SWEEP_S)
            now_s = time.monotonic()
            # After a stall of this process, announcements wait unread in its sockets: first hear, then judge.
            if now_s - before_s < 2 * SWEEP_S:
                self._apply(self.table.expire(now_s))

    async def close(self) -> None:
        """Close every connection."""
        for term in list(self._links):
            self._end(term)
        await asyncio.gather(*self._closing)

    async def _hold(self, node: str, boot_id: str) -> None:
        held: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._held[node] = held
        try:
            await asyncio.wait({held}, timeout=HOLD_S)
        except asyncio.CancelledError:  # the connection broke
            if self._held.get(node) is held:
                self._apply(self.table.connection_lost(node, boot_id))
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

    def _apply(self, change: Change) -> None:
        for term in change.ended:
            self._end(term)
        if change.ended:
            log.info("membership", change=change.reason)
        else:
            log.debug("membership", change=change.reason)

    def _end(self, term: int) -> None:
        link = self._links.pop(term, None)
        if link is not None:
            link.over = True
            for task in link.running:
                task.cancel()
            closing = asyncio.ensure_future(link.session.close())
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    def _serve_waiting(self) -> None:
        """Give places to those who wait, in their order, for as long as there are any."""
        for policy, queue in list(self._waiting.items()):
            while queue:
                waiter = queue[0]
                if not waiter.place.done():
                    row = self.table.choose(policy, waiter.group, waiter.avoid)
                    if row is None:
                        break
                    self.table.started(row.node, waiter.group)
                    waiter.place.set_result(self._place_on(row))
                queue.popleft()
            if not queue:
                del self._waiting[policy]

    def _place_on(self, row: Row) -> Place:
        link = self._links.get(row.term)
        if link is None:
            link = self._links[row.term] = Link(_session())
        return Place(row.node, row.boot_id, row.term, f"http://{row.address}/v1/completions", link)

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
        )


def _session() -> aiohttp.ClientSession:
    """Connections to one boot alone: closing the session leaves none to a dead one."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
    )
