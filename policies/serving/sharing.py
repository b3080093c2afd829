"""Rebalance running requests over the members of one policy, when a member joins late or is done early.

The first member that holds a new policy gets all requests. When others join, few requests have finished. A request
that moves loses only the time to compute its prompt again, and without a token not even that. So all requests are
handed out immediately and moved later, instead of being held back.

The more requests a member has, the more slowly each gets its tokens. The load is balanced when all members finish
at the same time. It is rebalanced where that saves a twentieth of the remaining time, and at least 0.3 s. Members
with speeds close to the median count as equally fast, so that measurement noise causes no moves.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from grpo_orch.policies.serving.membership import REPLAY_TOKENS_MAX

# Requests that double a member's time per token: reading their keys and values then costs as much as reading the
# weights. 32 to 128 for dense models of 7B to 32B at 2,000 to 8,000 tokens a request.
DOUBLING_REQUESTS = 64
SAVED_S = 0.3
SAVED_SHARE = 0.05  # of the time until the last request is done
ALIKE_SHARE = 0.2  # of a speed: the error of a measurement of one second
EVEN_SHARE = 0.02  # once begun, rebalancing continues until it would save no more than this share


@dataclass(frozen=True, slots=True)
class Move:
    """Move a request to a node, where it continues."""

    request: int
    node: str


@dataclass(frozen=True, slots=True)
class Movable:
    """A running request that may move.

    Args:
        request: its number.
        tokens_left: tokens that it is still expected to get.
        replay: tokens to compute again as its prompt; 0 if nothing was computed yet.
    """

    request: int
    tokens_left: float
    replay: int


@dataclass(slots=True)
class MemberLoad:
    """A member among which requests are balanced.

    Args:
        node: its name.
        speed_tokens_s: of a single request running alone on it.
        running: its number of requests.
        tokens_left: tokens that all of them are still expected to get.
        free: how many more requests it takes.
        prefill_tokens_s: how fast it computes a prompt.
        replaying: tokens of requests that moved there and are still to be computed again.
        movable: its requests that may move, in order; read lazily.
    """

    node: str
    speed_tokens_s: float
    running: int
    tokens_left: float
    free: int
    prefill_tokens_s: float
    replaying: int
    movable: Iterable[Movable] = ()
    _offer: Movable | None = None

    def ends_s(self, more: Movable | None = None) -> float:
        """Return when its requests are done, with one more or without."""
        left, running, replay = self.tokens_left, self.running, self.replaying
        if more is not None:
            left, running, replay = left + more.tokens_left, running + 1, replay + more.replay
        if not running:
            return 0.0
        replay_s = replay / self.prefill_tokens_s if replay and self.prefill_tokens_s > 0 else 0.0
        return replay_s + left / running * (1 + running / DOUBLING_REQUESTS) / self.speed_tokens_s

    def takes(self, request: Movable) -> bool:
        """Whether it has room, by the rule of `policies.serving.membership`."""
        replay = self.replaying + request.replay
        return self.free > 0 and (replay <= REPLAY_TOKENS_MAX or 0 in (self.replaying, request.replay))

    def offer(self) -> Movable | None:
        """Return its next request to move."""
        if self._offer is None:
            self.movable = iter(self.movable)
            self._offer = next(self.movable, None)
        return self._offer

    def give(self, request: Movable) -> None:
        self.running -= 1
        self.tokens_left = max(0.0, self.tokens_left - request.tokens_left)
        self._offer = None

    def take(self, request: Movable) -> None:
        self.running += 1
        self.tokens_left += request.tokens_left
        self.free -= 1
        self.replaying += request.replay


def tokens_left(arrived: int, expected_tokens: float, max_tokens: int) -> float:
    """Return the expected remaining tokens: at least half of what was expected in total."""
    return min(max_tokens - arrived, max(expected_tokens - arrived, expected_tokens / 2))


def single_request_rate(rate_tokens_s: float, requests: float) -> float:
    """Return the rate of a request alone on a member, from the rate that each of `requests` gets there."""
    return rate_tokens_s * (1 + requests / DOUBLING_REQUESTS)


def balance_requests(members: Sequence[MemberLoad], *, is_rebalancing: bool = False) -> list[Move] | None:
    """Return the moves that balance the load, as far as they are possible now; None if they would save too little.

    Args:
        members: the members that hold one policy, each once.
        is_rebalancing: rebalancing has begun, so a smaller gain suffices.
    """
    measured = [member for member in members if member.speed_tokens_s > 0]
    if len(measured) < 2:
        return None
    median = sorted(member.speed_tokens_s for member in measured)[len(measured) // 2]
    loads = [
        replace(member, speed_tokens_s=median)
        if abs(member.speed_tokens_s - median) < ALIKE_SHARE * median
        else replace(member)
        for member in measured
    ]
    now_s = max(load.ends_s() for load in loads)
    saved_s = now_s - _balanced_s(loads)
    if saved_s < (EVEN_SHARE * now_s if is_rebalancing else max(SAVED_S, SAVED_SHARE * now_s)):
        return None
    moves: list[Move] = []
    while True:
        givers = sorted(loads, key=MemberLoad.ends_s, reverse=True)
        giver = next((load for load in givers if load.offer() is not None), None)
        request = None if giver is None else giver.offer()
        if giver is None or request is None:
            return moves
        takers = [load for load in loads if load is not giver and load.takes(request)]
        if not takers:
            return moves
        taker = min(takers, key=lambda load: (load.ends_s(request), load.node))
        if taker.ends_s(request) >= giver.ends_s():
            return moves
        giver.give(request)
        taker.take(request)
        moves.append(Move(request.request, taker.node))


def _balanced_s(loads: Sequence[MemberLoad]) -> float:
    """Return when all requests would be done, balanced over the useful members, the fastest first."""
    running = sum(load.running for load in loads)
    tokens_each = sum(load.tokens_left for load in loads) / max(1, running)
    balanced_s, speed = float("inf"), 0.0
    for number, load in enumerate(sorted(loads, key=lambda load: -load.speed_tokens_s), 1):
        speed += load.speed_tokens_s
        balanced_s = min(balanced_s, tokens_each * (running / DOUBLING_REQUESTS + number) / speed)
    return balanced_s
