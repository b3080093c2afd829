"""Which requests at work go over to a member that has come late or is done early: an even division, made anew.

The first member that holds a new policy is given what there is; when the others come, little of it has been made,
and a request loses nothing when it goes on elsewhere but the time in which its prompt is computed once more. One
that has no token yet loses not even that: it has been waiting, or its prompt was about to be computed. So requests
are given out and taken back, rather than kept from a member that could begin with them.

A member makes the tokens of a request more slowly the more requests it has. A division is even when all members
are done at the same time; it is made anew where that saves a twentieth of what is left and 0.3 s at least. So
small a gain can be told from noise because members that are about as fast as the middle one are taken to be alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from policies.serving.membership import REPLAY_TOKENS_MAX
from policies.serving.takeover import Move

# With so many requests more each token takes a member once longer: then reading what they have computed costs as
# much as reading the weights. Dense models of 7B to 32B at 2,000 to 8,000 tokens a request have 32 to 128.
DOUBLING_REQUESTS = 64
SAVED_S = 0.3
SAVED_SHARE = 0.05  # of the time until the last is done
ALIKE_SHARE = 0.2  # of a speed; what is measured in a second is off by so much
EVEN_SHARE = 0.02  # a division that was begun to be made anew goes on until no more than this is to be gained


@dataclass(frozen=True, slots=True)
class Movable:
    """A request under way that loses nothing when it moves.

    Args:
        request: names it.
        left: tokens that it is expected to get yet.
        replay: tokens to be computed again as its prompt; 0 where nothing was computed yet.
    """

    request: int
    left: float
    replay: int


@dataclass(frozen=True, slots=True)
class Bearer:
    """A member and what it bears.

    Args:
        node: its name.
        speed_tokens_s: of a request that it would have alone.
        running: its requests.
        left: the mean of the tokens that each of them is expected to get yet; of no meaning where none runs.
        free: how many requests more it takes.
        prefill_tokens_s: how fast it computes a prompt.
        replaying: tokens of requests that moved there before and are not computed again yet.
        movable: those of its requests that may move, the first to go first; read no further than needed, and not
            at all where nothing pays.
    """

    node: str
    speed_tokens_s: float
    running: int
    left: float
    free: int
    prefill_tokens_s: float
    replaying: int
    movable: Iterable[Movable] = ()


def alone_tokens_s(rate_tokens_s: float, requests: float) -> float:
    """What a request would get that is alone where each of so many gets that rate."""
    return rate_tokens_s * (1 + requests / DOUBLING_REQUESTS)


def share_out(bearers: Sequence[Bearer], *, begun: bool = False) -> list[Move] | None:
    """Return the moves that make the division more even, as far as they can be made now; None where that does not
    pay.

    Args:
        bearers: the members that hold one policy, each once.
        begun: the division is being made anew: what is left to be gained may be little.
    """
    known = [one for one in bearers if one.speed_tokens_s > 0]
    if len(known) < 2:
        return None
    middle = sorted(one.speed_tokens_s for one in known)[len(known) // 2]
    loads = [_Load(one, middle) for one in known]
    now_s = max(one.ends_s() for one in loads)
    saved_s = now_s - _even_s(loads)
    if saved_s < (EVEN_SHARE * now_s if begun else max(SAVED_S, SAVED_SHARE * now_s)):
        return None
    moves: list[Move] = []
    while True:
        givers = sorted(loads, key=_Load.ends_s, reverse=True)
        giver = next((one for one in givers if one.offer() is not None), None)
        request = None if giver is None else giver.offer()
        if giver is None or request is None:
            return moves
        takers = [one for one in loads if one is not giver and one.takes(request)]
        if not takers:
            return moves
        taker = min(takers, key=lambda one: (one.ends_with_s(request), one.node))
        if taker.ends_with_s(request) >= giver.ends_s():
            return moves
        giver.give(request)
        taker.take(request)
        moves.append(Move(request.request, taker.node))


class _Load:
    """A member's requests while they are divided."""

    def __init__(self, bearer: Bearer, middle: float) -> None:
        alike = abs(bearer.speed_tokens_s - middle) < ALIKE_SHARE * middle
        self.node, self.speed, self.running = (
            bearer.node,
            middle if alike else bearer.speed_tokens_s,
            bearer.running,
        )
        self.left = bearer.left * bearer.running  # tokens of all
        self._offers = iter(bearer.movable)
        self._offer: Movable | None = None
        self._free, self._prefill_tokens_s = bearer.free, bearer.prefill_tokens_s
        self._replay = bearer.replaying

    def ends_s(self) -> float:
        """When its requests are done."""
        return self._ends_s(self.left, self.running, self._replay)

    def ends_with_s(self, request: Movable) -> float:
        """When they would be with that one more."""
        return self._ends_s(self.left + request.left, self.running + 1, self._replay + request.replay)

    def takes(self, request: Movable) -> bool:
        """Whether there is room, by the rule of `policies.serving.membership`."""
        again = self._replay + request.replay
        return self._free > 0 and (again <= REPLAY_TOKENS_MAX or 0 in (self._replay, request.replay))

    def offer(self) -> Movable | None:
        """Which of its requests goes next."""
        if self._offer is None:
            self._offer = next(self._offers, None)
        return self._offer

    def give(self, request: Movable) -> None:
        self.running, self.left, self._offer = self.running - 1, max(0.0, self.left - request.left), None

    def take(self, request: Movable) -> None:
        self.running, self.left = self.running + 1, self.left + request.left
        self._free, self._replay = self._free - 1, self._replay + request.replay

    def _ends_s(self, left: float, running: int, replay: int) -> float:
        if not running:
            return 0.0
        again_s = replay / self._prefill_tokens_s if replay and self._prefill_tokens_s > 0 else 0.0
        return again_s + left / running * (1 + running / DOUBLING_REQUESTS) / self.speed


def _even_s(loads: Sequence[_Load]) -> float:
    """When all would be done, divided evenly over the members that are of use, the fastest first."""
    running = sum(one.running for one in loads)
    each = sum(one.left for one in loads) / max(1, running)
    even_s, speed = float("inf"), 0.0
    for number, one in enumerate(sorted(loads, key=lambda one: -one.speed), 1):
        speed += one.speed
        even_s = min(even_s, each * (running / DOUBLING_REQUESTS + number) / speed)
    return even_s
