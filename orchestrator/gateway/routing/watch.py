"""The gateway's own initiative: find silent members, clear drained ones, balance the others.

All of it ends tries of requests; the completer then places them on another member.
"""

from __future__ import annotations

import asyncio

from orchestrator.gateway.nodes.attempt import NodeFailed, Why
from orchestrator.gateway.nodes.connection import STALLED_S
from orchestrator.gateway.nodes.link import PROBE_S, Link
from orchestrator.gateway.routing.balance import Balance
from orchestrator.gateway.routing.members import Members
from policies.serving.member import Wanted
from policies.serving.silence import MOST_S

LOOK_S = 0.1
SELDOM_S = 1.0  # between two looks at what is in no hurry
# A cloud's notice is 30 s at least. What does not finish in the first half goes on elsewhere, if it can.
DRAIN_S = 15.0


class Watch:
    """Looks at all members, several times a second.

    Args:
        members: of the gateway.
        drain_s: how long a drained member may go on with requests that others could take.
    """

    def __init__(self, members: Members, drain_s: float = DRAIN_S) -> None:
        self._members = members
        self._drain_s = drain_s
        self._drained_at_s: dict[int, float] = {}  # by term
        self._seldom_at_s = 0.0
        self._balance = Balance(members)

    async def run(self) -> None:
        """Look, for ever."""
        loop = asyncio.get_running_loop()
        before_s = loop.time()
        while True:
            await asyncio.sleep(LOOK_S)
            now_s = loop.time()
            if now_s - before_s < STALLED_S:  # else what members said is still unread: hear first, then judge
                self._look(now_s, now_s - before_s)
            before_s = now_s

    def _look(self, now_s: float, elapsed_s: float) -> None:
        self._members.expire()
        links = list(self._members.links.values())
        for link in links:
            if link.running:
                link.limits.pass_time(elapsed_s)
                self._listen(link, now_s)
            row = self._members.row(link.node)
            if row is not None and row.mute:
                self._probe(link, now_s)
        self._clear_drained(now_s)
        self._balance.look(now_s)
        if now_s - self._seldom_at_s >= SELDOM_S:
            self._seldom_at_s = now_s
            for link in links:
                link.pool.tidy(now_s)
                row = self._members.row(link.node)
                queued = row is not None and row.engine is not None and row.engine.waiting > 0
                _end_stuck(link, queued, now_s)

    def _listen(self, link: Link, now_s: float) -> None:
        silent_s = now_s - link.heard_s
        if silent_s > link.limits.soft_s:
            self._probe(link, now_s)
            if now_s - max(link.heard_s, link.worked_s) > link.silence_limit_s():
                link.limits.saw_gap(silent_s)
                self._members.doubt(link, f"no token for {silent_s:.1f} s, although it answers", whole=True)
                link.give_up(Why.SILENT, f"no token for {silent_s:.1f} s")

    def _probe(self, link: Link, now_s: float) -> None:
        if link.probe is None and now_s - link.probed_s > link.limits.soft_s:
            link.probed_s = now_s
            link.probe = asyncio.ensure_future(self._ask(link))

    async def _ask(self, link: Link) -> None:
        loop = asyncio.get_running_loop()
        asked_s = loop.time()
        why = await link.ask_health()
        link.probe = None
        if why is None:
            self._members.unmute(link)
        elif loop.time() - asked_s < PROBE_S + STALLED_S:
            self._members.mute(link, why)

    def _clear_drained(self, now_s: float) -> None:
        members, seen = self._members, {}
        for row in members.rows:
            if not row.running or not members.draining(row.node):
                continue
            seen[row.term] = self._drained_at_s.get(row.term, now_s)
            if now_s - seen[row.term] > self._drain_s and row.policy and members.serving(Wanted(row.policy)):
                for attempt in list(members.links[row.term].running):
                    if attempt.movable:
                        attempt.fail(NodeFailed(Why.DRAINED, f"it drains and was not done in {self._drain_s:g} s"))
        self._drained_at_s = seen


def _end_stuck(link: Link, engine_full: bool, now_s: float) -> None:
    """A try that stands still may wait its turn for however long; once others were served before it, no longer
    than MOST_S."""
    for attempt in list(link.running):
        if engine_full or link.may_wait(attempt):
            attempt.queued_s = now_s
        elif now_s - max(attempt.heard_s, attempt.queued_s) > MOST_S:
            attempt.fail(NodeFailed(Why.SILENT, f"no token for {MOST_S:g} s"))
