"""Divides the work again when it has become uneven: a member came late, is done early, or has become slow.

It ends tries, as all that moves requests does; the completer then places their jobs where the least is to be done.
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from orchestrator.gateway.nodes.attempt import Attempt, NodeFailed, Why
from orchestrator.gateway.routing.members import Members
from policies.serving.member import Row, Wanted
from policies.serving.sharing import Movable, Sharer, share_out, tokens_left

SPEED_S = 1.0  # between two measurements of a member's speed
# A look reads how much is left of each request, in about a microsecond. With so long for each until the next look,
# 0.15 s for 2,000 requests and 1.5 s for 20,000, that is below a fiftieth of the event loop's time.
REQUEST_S = 75e-6
MOVES_MAX = 2  # of one job: members come one after another, but a job must get on
SLOW_SHARE = 0.5  # of the fastest member's speed: the last requests of a slower member may move


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
        rows = [row for row in self._members.serving(Wanted(policy)) if not row.stuck]
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
    return attempt.policy == policy and attempt.job.shared < MOVES_MAX and attempt.movable


def _order(attempt: Attempt) -> tuple[bool, float]:
    """First go those that wait for their first token, the newest before the others: it has waited least. Of those
    that have begun, first goes the one with the least to compute again."""
    if attempt.begun_s is None:
        return False, -attempt.sent_s
    return True, attempt.job.prompt_tokens + len(attempt.job.token_ids)
