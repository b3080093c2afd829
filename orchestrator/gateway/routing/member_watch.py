"""Periodic checks of all members: find silent ones, move requests off draining ones, balance the load.

Each of these ends attempts; the completer then places their jobs on other members.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from statistics import median

from grpo_orch.orchestrator.gateway.nodes.connection import STALLED_S
from grpo_orch.orchestrator.gateway.nodes.upstream import PROBE_S, Attempt, HandoverReason, Link, NodeFailed
from grpo_orch.orchestrator.gateway.routing.gateway_members import Members
from grpo_orch.policies.serving.membership import Member
from grpo_orch.policies.serving.sharing import MemberLoad, Movable, balance_requests, tokens_left
from grpo_orch.policies.serving.silence_limits import LIMIT_MAX_S

CHECK_S = 0.1
HOUSEKEEPING_S = 1.0
# A cloud gives notice of 30 s or more. Requests that do not finish in the first half of it move, if they can.
DRAIN_S = 15.0
SPEED_S = 1.0
# A rebalancing pass reads the remaining tokens of each request, in about 1 us. A pause of this length per request
# (0.15 s for 2,000 requests, 1.5 s for 20,000) keeps that below 2 % of the event loop's time.
REQUEST_S = 75e-6
REBALANCES_MAX = 2  # of one job, which must make progress even if members join one after another
SLOW_SHARE = 0.5  # of the fastest member's speed: the last requests of a slower member may move


class Watch:
    """Checks all members, every CHECK_S.

    Args:
        members: the gateway's.
        drain_s: how long a draining member may keep requests that others can serve.

    Attributes:
        housekeeping_s: between checks for idle connections and stuck attempts.
        stuck_s: an attempt without an event for so long is stuck.
        balancer: balances the load.
    """

    def __init__(self, members: Members, drain_s: float = DRAIN_S) -> None:
        self._members = members
        self._drain_s = drain_s
        self.housekeeping_s, self.stuck_s = HOUSEKEEPING_S, LIMIT_MAX_S
        self._drained_at_s: dict[int, float] = {}  # by term
        self._housekeeping_at_s = 0.0
        self.balancer = Balancer(members)

    async def run(self) -> None:
        """Check the members, forever."""
        loop = asyncio.get_running_loop()
        before_s = loop.time()
        while True:
            await asyncio.sleep(CHECK_S)
            now_s = loop.time()
            if now_s - before_s < STALLED_S:  # after a stall, read what members sent before judging their silence
                self._check_members(now_s, now_s - before_s)
            before_s = now_s

    def _check_members(self, now_s: float, elapsed_s: float) -> None:
        self._members.expire()
        links = list(self._members.places.links.values())
        for link in links:
            if link.running:
                link.silence_limits.age(elapsed_s)
                self._check_silence(link, now_s)
            row = self._members.table.member(link.node)
            if row is not None and row.is_unresponsive:
                self._probe(link, now_s)
        self._clear_drained(now_s)
        self._members.divide()
        self.balancer.rebalance(now_s)
        if now_s - self._housekeeping_at_s >= self.housekeeping_s:
            self._housekeeping_at_s = now_s
            for link in links:
                link.pool.close_idle(now_s)
                row = self._members.table.member(link.node)
                queued = row is not None and row.engine is not None and row.engine.waiting > 0
                _end_stuck(link, queued, now_s, self.stuck_s)

    def _check_silence(self, link: Link, now_s: float) -> None:
        silent_s = now_s - link.last_event_s
        if silent_s > link.silence_limits.soft_s:
            self._probe(link, now_s)
            if now_s - max(link.last_event_s, link.last_work_s) > link.silence_limit_s():
                link.silence_limits.record_gap(silent_s)
                self._members.suspect(link, f"no token for {silent_s:.1f} s, but health is ok", whole=True)
                link.fail_attempts(HandoverReason.SILENT, f"no token for {silent_s:.1f} s")

    def _probe(self, link: Link, now_s: float) -> None:
        if link.probe is None and now_s - link.last_probe_s > link.silence_limits.soft_s:
            link.last_probe_s = now_s
            link.probe = asyncio.ensure_future(self._run_probe(link))

    async def _run_probe(self, link: Link) -> None:
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        why = await link.check_health()
        link.probe = None
        if why is None:
            self._members.mark_responsive(link)
        elif loop.time() - started_s < PROBE_S + STALLED_S:
            self._members.mark_unresponsive(link, why)

    def _clear_drained(self, now_s: float) -> None:
        members, seen = self._members, {}
        for row in members.table.members:
            if not row.running or not members.table.is_draining(row.node):
                continue
            seen[row.term] = self._drained_at_s.get(row.term, now_s)
            if now_s - seen[row.term] > self._drain_s and row.policy and members.table.serving(row.policy):
                for attempt in list(members.places.links[row.term].running):
                    if attempt.is_movable:
                        why = f"draining; not finished within {self._drain_s:g} s"
                        attempt.fail(NodeFailed(HandoverReason.DRAINED, why))
        self._drained_at_s = seen


def _end_stuck(link: Link, engine_full: bool, now_s: float, stuck_s: float) -> None:
    """End attempts without an event for `stuck_s`, unless they wait in the engine's queue."""
    for attempt in list(link.running):
        if engine_full or link.may_be_queued(attempt):
            attempt.last_queued_s = now_s
        elif now_s - max(attempt.last_event_s, attempt.last_queued_s) > stuck_s:
            attempt.fail(NodeFailed(HandoverReason.SILENT, f"no token for {stuck_s:g} s"))


class Balancer:
    """Moves requests to members with less load.

    Attributes:
        speed_s: between two measurements of a member's speed.
    """

    def __init__(self, members: Members) -> None:
        self.speed_s = SPEED_S
        self._members = members
        self._rebalancing: set[str] = set()  # policies whose requests are being moved
        self._measured_s = 0.0
        self._next_pass_s = 0.0

    def rebalance(self, now_s: float) -> None:
        """Measure the members' speeds and move requests, each at its own interval."""
        if now_s - self._measured_s >= self.speed_s:
            self._measured_s = now_s
            for link in self._members.places.links.values():
                link.measure(now_s)
        if now_s < self._next_pass_s:
            return
        self._next_pass_s = now_s + REQUEST_S * sum(
            len(link.running) for link in self._members.places.links.values()
        )
        held = {row.policy for row in self._members.table.members if row.policy is not None}
        for policy in held:
            self._rebalance_policy(policy)
        self._rebalancing &= held

    def _rebalance_policy(self, policy: str) -> None:
        serving = self._members.table.serving(policy)
        rows = [row for row in serving if not row.is_stuck]
        running = [row.running for row in rows]
        if 0 in running:
            self._clear_stuck(policy, serving)
        most, least = max(running, default=0), min(running, default=0)
        is_even = most - least < 2 and not (most and self._has_slow_member(rows))
        if is_even or self._members.places.has_waiting(policy):
            return
        attempts: list[Attempt] = []
        moves = balance_requests(
            list(self._sharers(policy, rows, attempts)), is_rebalancing=policy in self._rebalancing
        )
        if moves is None:
            self._rebalancing.discard(policy)
            return
        self._rebalancing.add(policy)
        for move in moves:
            _move(attempts[move.request], f"{move.node} has less load")

    def _clear_stuck(self, policy: str, serving: Iterable[Member]) -> None:
        """Move the request that a stuck member was tried with, because an idle member would finish it sooner."""
        for row in serving:
            link = self._members.places.links.get(row.term) if row.is_stuck else None
            for attempt in list(link.running) if link is not None else ():
                if _is_movable(attempt, policy):
                    _move(attempt, "another member is idle")

    def _has_slow_member(self, rows: list[Member]) -> bool:
        links = (self._members.places.links.get(row.term) for row in rows)
        speeds = [link.speed_tokens_s for link in links if link and link.speed_tokens_s]
        return bool(speeds) and min(speeds) < SLOW_SHARE * max(speeds)

    def _sharers(self, policy: str, rows: list[Member], attempts: list[Attempt]) -> Iterator[MemberLoad]:
        """Yield the members with their movable requests, and add those to `attempts`.

        A member whose speed is unknown counts with the median of the others.
        """
        links = {row.term: self._members.places.links.get(row.term) for row in rows}
        speeds = [link.speed_tokens_s for link in links.values() if link and link.speed_tokens_s]
        prefills = [link.peak_prompt_tokens_s for link in links.values() if link and link.peak_prompt_tokens_s]
        if not speeds:
            return
        for row in rows:
            link = links[row.term]
            running = link.running if link else set[Attempt]()
            yield MemberLoad(
                row.node,
                (link.speed_tokens_s if link else 0.0) or median(speeds),
                len(running),
                sum(map(self._tokens_left, running)),
                min(row.allowed, row.max_requests) - row.running,
                (link.peak_prompt_tokens_s if link else 0.0) or (median(prefills) if prefills else 0.0),
                row.replaying,
                self._movable(running, policy, attempts),
            )

    def _movable(self, running: set[Attempt], policy: str, attempts: list[Attempt]) -> Iterator[Movable]:
        for attempt in sorted(running, key=_move_order):
            if _is_movable(attempt, policy):
                attempts.append(attempt)
                job = attempt.job
                replay = 0 if job.first_token_at_s is None else job.prompt_tokens + len(job.token_ids)
                yield Movable(len(attempts) - 1, self._tokens_left(attempt), replay)

    def _tokens_left(self, attempt: Attempt) -> float:
        limit = attempt.max_tokens
        return tokens_left(len(attempt.job.token_ids), self._members.expected_tokens or limit, limit)


def _move(attempt: Attempt, why: str) -> None:
    attempt.job.rebalances += 1
    attempt.fail(NodeFailed(HandoverReason.REBALANCED, why))


def _is_movable(attempt: Attempt, policy: str) -> bool:
    return attempt.job.policy == policy and attempt.job.rebalances < REBALANCES_MAX and attempt.is_movable


def _move_order(attempt: Attempt) -> tuple[bool, float]:
    """Return the key by which requests are moved.

    First requests without a token, the newest first, since it has waited least; then by tokens to recompute.
    """
    if attempt.first_token_at_s is None:
        return False, -attempt.sent_s
    return True, attempt.job.prompt_tokens + len(attempt.job.token_ids)
