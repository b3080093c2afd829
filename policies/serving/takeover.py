"""Which running requests idle members should take over, because they finish sooner there.

The last requests of a batch hold the step. A move replays prompt and tokens on the other member, so it is worth it
only against a member that is much slower, and only if an error in the estimate of what is left does no harm: a
request moves when that at least halves its time and saves at least a second.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

TIMES_SOONER = 2.0
SAVED_S = 1.0


@dataclass(frozen=True, slots=True)
class Running:
    """A request under way that was not taken over before, with its own recent rate; 0 while it stalls."""

    request: int
    node: str
    prompt_tokens: int
    arrived: int
    rate_tokens_s: float


@dataclass(frozen=True, slots=True)
class Idle:
    """A member with `free` places, the rate of one more request there, and how fast it computes prompts."""

    node: str
    free: int
    rate_tokens_s: float
    prefill_tokens_s: float


@dataclass(frozen=True, slots=True)
class Move:
    """The request goes on at the node."""

    request: int
    node: str


def take_over(
    running: Sequence[Running], idle: Sequence[Idle], expected_tokens: float, *, max_tokens: int
) -> list[Move]:
    """Return the moves that pay, first that of the request that would finish last.

    Args:
        running: the requests that may be moved.
        idle: the members with room, each once.
        expected_tokens: the mean length of finished completions.
        max_tokens: the most that a completion may have.
    """
    left = {one.request: tokens_left(one.arrived, expected_tokens, max_tokens) for one in running}
    stay_s = {one.request: _seconds(left[one.request], one.rate_tokens_s) for one in running}
    free = {one.node: one.free for one in idle}
    replay = dict.fromkeys(free, 0)  # tokens that a member computes first, one request after another
    moves = []
    for one in sorted(running, key=lambda one: (-stay_s[one.request], one.request)):
        tokens = one.prompt_tokens + one.arrived
        there_s = {
            other.node: _seconds(replay[other.node] + tokens, other.prefill_tokens_s)
            + _seconds(left[one.request], other.rate_tokens_s)
            for other in idle
            if free[other.node] > 0 and other.node != one.node
        }
        if not there_s:
            continue
        node = min(there_s, key=lambda node: (there_s[node], node))
        if _pays(stay_s[one.request], there_s[node]):
            moves.append(Move(one.request, node))
            free[node] -= 1
            replay[node] += tokens
    return moves


def tokens_left(arrived: int, expected_tokens: float, max_tokens: int) -> float:
    """Tokens to come. A request that has outlived the expectation is a long one: expect half of it again."""
    return min(max_tokens - arrived, max(expected_tokens - arrived, expected_tokens / 2))


def _seconds(tokens: float, rate_tokens_s: float) -> float:
    if tokens <= 0:
        return 0.0
    return tokens / rate_tokens_s if rate_tokens_s > 0 else math.inf


def _pays(stay_s: float, there_s: float) -> bool:
    return stay_s >= TIMES_SOONER * there_s and stay_s - there_s > SAVED_S
