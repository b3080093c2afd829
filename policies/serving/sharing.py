"""Which running requests move to a member that has come late or is done early, so that the division is even again.

The first member that holds a new policy gets all there is to do. When the others come, little of it is done, and a
request that moves loses only the time in which its prompt is computed again; one without a token does not lose
even that. So requests are given out and taken back, rather than kept from a member that could begin with them.

The more requests a member has, the more slowly each gets its tokens. A division is even when all members are done
at the same time; it is made anew where that saves a twentieth of the time left, and 0.3 s at least. So small a
gain can be told from noise because members about as fast as the middle one are taken to be alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from policies.serving.member import REPLAY_TOKENS_MAX

# With so many more requests a token takes a member twice as long: reading their keys and values then costs as much
# as reading the weights. For dense models of 7B to 32B at 2,000 to 8,000 tokens a request it is 32 to 128.
DOUBLING_REQUESTS = 64
SAVED_S = 0.3
SAVED_SHARE = 0.05  # of the time until the last is done
ALIKE_SHARE = 0.2  # of a speed: a measurement of one second is off by so much
EVEN_SHARE = 0.02  # once begun, dividing goes on until no more than this is to be gained


@dataclass(frozen=True, slots=True)
class Move:
    """The request continues at the node."""

    request: int
    node: str


@dataclass(frozen=True, slots=True)
class Movable:
    """A request under way that loses nothing when it moves.

    Args:
        request: names it.
        left: tokens that it is still expected to get.
        replay: tokens to be computed again as its prompt; 0 where nothing was computed yet.
    """

    request: int
    left: float
    replay: int


@dataclass(frozen=True, slots=True)
class Sharer:
    """A member that takes part in the division.

    Args:
        node: its name.
        speed_tokens_s: of a request that it would have alone.
        running: its requests.
        left: tokens that each of them is still expected to get, in the mean; meaningless where none runs.
        free: how many more requests it takes.
        prefill_tokens_s: how fast it computes a prompt.
        replaying: tokens of requests that moved there before and are still to be computed again.
        movable: those of its requests that may move, in the order in which they would; read no further than
            needed.
    """

    node: str
    speed_tokens_s: float
    running: int
    left: float
    free: int
    prefill_tokens_s: float
    replaying: int
    movable: Iterable[Movable] = ()


def tokens_left(arrived: int, expected_tokens: float, max_tokens: int) -> float:
    """Return the tokens to come. A request longer than expected is taken to get half of the expectation more."""
    return min(max_tokens - arrived, max(expected_tokens - arrived, expected_tokens / 2))


def alone_tokens_s(rate_tokens_s: float, requests: float) -> float:
    """The rate of a request that is alone on a member, from the rate that each of so many gets there."""
    return rate_tokens_s * (1 + requests / DOUBLING_REQUESTS)


def share_out(sharers: Sequence[Sharer], *, begun: bool = False) -> list[Move] | None:
    """Return the moves that make the division even, as far as they can be made now; None where that does not pay.

    Args:
        sharers: the members that hold one policy, each once.
        begun: dividing has begun: what is still to be gained may be little.
    """
    known = [one for one in sharers if one.speed_tokens_s > 0]
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

    def __init__(self, sharer: Sharer, middle: float) -> None:
        alike = abs(sharer.speed_tokens_s - middle) < ALIKE_SHARE * middle
        self.node, self.running = sharer.node, sharer.running
        self.speed = middle if alike else sharer.speed_tokens_s
        self.left = sharer.left * sharer.running  # tokens of all
        self._offers = iter(sharer.movable)
        self._offer: Movable | None = None
        self._free, self._prefill_tokens_s = sharer.free, sharer.prefill_tokens_s
        self._replay = sharer.replaying

    def ends_s(self) -> float:
        """When its requests are done."""
        return self._ends_s(self.left, self.running, self._replay)

    def ends_with_s(self, request: Movable) -> float:
        """When they would be with that one more."""
        return self._ends_s(self.left + request.left, self.running + 1, self._replay + request.replay)

    def takes(self, request: Movable) -> bool:
        """Whether there is room, by the rule of `policies.serving.member`."""
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
