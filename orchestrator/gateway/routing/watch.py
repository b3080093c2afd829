"""The gateway's own initiative: find silent members, clear drained ones, balance the others.

All of it ends tries of requests; the completer then places them on another member.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from statistics import median

from orchestrator.gateway.nodes.attempt import Attempt, NodeFailed, Why
from orchestrator.gateway.nodes.connection import STALLED_S
from orchestrator.gateway.nodes.link import PROBE_S, Link
from orchestrator.gateway.routing.members import Members
from policies.serving.member import Row
from policies.serving.sharing import Movable, Sharer, share_out, tokens_left
from policies.serving.silence import MOST_S

LOOK_S = 0.1
SELDOM_S = 1.0  # between two looks at what is in no hurry
# A cloud's notice is 30 s at least. What does not finish in the first half goes on elsewhere, if it can.
DRAIN_S = 15.0
SPEED_S = 1.0  # between two measurements of a member's speed
# A look reads how much is left of each request, in about a microsecond. With so long for each until the next look,
# 0.15 s for 2,000 requests and 1.5 s for 20,000, that is below a fiftieth of the event loop's time.
REQUEST_S = 75e-6
MOVES_MAX = 2  # of one job: members come one after another, but a job must get on
SLOW_SHARE = 0.5  # of the fastest member's speed: the last requests of a slower member may move


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
        if self._members.serves_several:
            self._members.divide()
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
            if now_s - seen[row.term] > self._drain_s and row.policy and members.serving(row.policy):
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


class Balance:
    """Looks at all members, several times a second."""

    def __init__(self, members: Members) -> None:
        self._members = members
        self._begun: set[str] = set()  # policies whose division is being made anew
        self._measured_s = 0.0
        self._next_s = 0.0

    def look(self, now_s: float) -> None:
        """Measure the members' speeds from time to time, and move what is to be moved."""
        if now_s - self._measured_s >= SPEED_S:
            self._measured_s = now_s
            for link in self._members.links.values():
                link.measure(now_s)
        if now_s < self._next_s:
            return
        self._next_s = now_s + REQUEST_S * sum(len(link.running) for link in self._members.links.values())
        held = {row.policy for row in self._members.rows if row.policy is not None}
        for policy in held:
            self._divide(policy)
        self._begun &= held

    def _divide(self, policy: str) -> None:
        rows = [row for row in self._members.serving(policy) if not row.stuck]
        most, least = max((one.running for one in rows), default=0), min((one.running for one in rows), default=0)
        is_even = most - least < 2 and not (most and self._is_any_slow(rows))
        if is_even or self._members.places.awaited(policy):
            return
        attempts: list[Attempt] = []
        moves = share_out(list(self._sharers(policy, rows, attempts)), begun=policy in self._begun)
        (self._begun.discard if moves is None else self._begun.add)(policy)
        for move in moves or ():
            attempt = attempts[move.request]
            attempt.job.shared += 1
            attempt.fail(NodeFailed(Why.SHARED, f"{move.node} has less to do"))

    def _is_any_slow(self, rows: list[Row]) -> bool:
        links = (self._members.links.get(row.term) for row in rows)
        speeds = [link.speed_tokens_s for link in links if link and link.speed_tokens_s]
        return bool(speeds) and min(speeds) < SLOW_SHARE * max(speeds)

    def _sharers(self, policy: str, rows: list[Row], attempts: list[Attempt]) -> Iterator[Sharer]:
        """What is not known of a member yet is taken to be as the others'. Fills `attempts`."""
        links = {row.term: self._members.links.get(row.term) for row in rows}
        speeds = [link.speed_tokens_s for link in links.values() if link and link.speed_tokens_s]
        prefills = [link.most_prompts_tokens_s for link in links.values() if link and link.most_prompts_tokens_s]
        if not speeds:
            return
        for row in rows:
            link = links[row.term]
            running = link.running if link else set[Attempt]()
            left = sum(map(self._left, running)) / max(1, len(running))
            yield Sharer(
                row.node,
                (link.speed_tokens_s if link else 0.0) or median(speeds),
                len(running),
                left,
                min(row.allowed, row.max_requests) - row.running,
                (link.most_prompts_tokens_s if link else 0.0) or (median(prefills) if prefills else 0.0),
                row.replaying,
                self._movable(running, policy, attempts),
            )

    def _movable(self, running: set[Attempt], policy: str, attempts: list[Attempt]) -> Iterator[Movable]:
        for attempt in sorted(running, key=_order):
            if _goes(attempt, policy):
                attempts.append(attempt)
                job = attempt.job
                replay = 0 if job.first_token_s is None else job.prompt_tokens + len(job.token_ids)
                yield Movable(len(attempts) - 1, self._left(attempt), replay)

    def _left(self, attempt: Attempt) -> float:
        most = attempt.max_tokens
        return tokens_left(len(attempt.job.token_ids), self._members.expected_tokens or most, most)


def _goes(attempt: Attempt, policy: str) -> bool:
    return attempt.job.policy == policy and attempt.job.shared < MOVES_MAX and attempt.movable


def _order(attempt: Attempt) -> tuple[bool, float]:
    """First go those that wait for their first token, the newest before the others: it has waited least. Of those
    that have begun, first goes the one with the least to compute again."""
    if attempt.begun_s is None:
        return False, -attempt.sent_s
    return True, attempt.job.prompt_tokens + len(attempt.job.token_ids)
