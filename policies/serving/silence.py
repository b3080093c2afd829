"""How long to wait for a silent member: slow is not dead, a stopped engine is found in bounded time.

At the soft limit the gateway asks the member whether it lives: a machine that is gone does not answer. At the hard
limit it gives up a member that does answer: its HTTP server lives, but its engine has stopped. Honest reasons for
silence: a prompt that waits or is being computed, kernels that are being compiled, other requests' prompts, which
are computed in chunks of seconds while nobody decodes. So a hard limit is a multiple of the longest recent wait,
with a floor for what has not been seen yet.

Each term of a member has its own limits: a node that is ten times slower than the rest is judged by its own pace,
and a new one may be cold. A member's silence is measured from the last event of any of its requests: while others
move, one that stands still is waiting its turn.
"""

from __future__ import annotations

from typing import Final

# With the probe's own second and the sweep, a vanished machine is out within 3 s. Asking costs next to nothing.
SOFT_S = 1.0
# A lost SYN is sent again after 1 s; a second loss in a row is not waited for.
CONNECT_S = 2.5

TIMES = 3.0  # the longest recent wait: load grows, but not threefold from one wait to the next
HALF_LIFE_S = 60.0  # of what was seen; in the first minute or two a node meets its shapes for the first time
FIRST_TOKEN_FLOOR_S = 45.0  # kernels compile for 25 s, longer beside other work
NEXT_FLOOR_S = 15.0  # other requests' prompts stall everyone for 2 to 5 s
MOST_S = 240.0  # whatever was seen
START_FIRST_TOKEN_S = 120.0  # the limits before anything was seen
START_NEXT_S = 60.0
PROMPT_TOKEN_S = 1 / 200  # granted for each prompt token: slower than any node worth its rent


class SilenceLimits:
    """The limits for one member in one term, learnt from its own waits. Seeing one costs a comparison.

    Attributes:
        connect_s: how long a connection may take.
        soft_s: after how long a silence the member is asked whether it lives.
    """

    __slots__ = ("_first_token_s", "_gap_s", "_passed_s")

    connect_s: Final = CONNECT_S
    soft_s: Final = SOFT_S

    def __init__(self) -> None:
        self._first_token_s = START_FIRST_TOKEN_S / TIMES
        self._gap_s = START_NEXT_S / TIMES
        self._passed_s = 0.0

    def saw_first_token(self, after_s: float, prompt_tokens: int) -> None:
        """A request's first token came `after_s` after it was sent."""
        if self._passed_s:
            self._forget()
        self._first_token_s = max(self._first_token_s, after_s - prompt_tokens * PROMPT_TOKEN_S)

    def saw_gap(self, gap_s: float) -> None:
        """`gap_s` passed between two events of one request.

        A silence for which the member was given up counts too: if longer waits were never seen, a fleet that has
        become slow would be given up for ever.
        """
        if self._passed_s:
            self._forget()
        if gap_s > self._gap_s:
            self._gap_s = gap_s

    def pass_time(self, elapsed_s: float) -> None:
        """The member had requests for `elapsed_s` more: what was seen before counts less.

        It does so from the next event on, so that no limit falls during the silence that it is held against.
        """
        self._passed_s += elapsed_s

    def first_token_s(self, prompt_tokens: int) -> float:
        """How long a member may be silent that has sent no token of any of its requests yet.

        Args:
            prompt_tokens: of the longest prompt among them.
        """
        seen_s = max(self._first_token_s, self._gap_s)  # what stalls decoding stalls a first token too
        return _within(FIRST_TOKEN_FLOOR_S, seen_s) + prompt_tokens * PROMPT_TOKEN_S

    @property
    def hard_s(self) -> float:
        """How long a member may be silent in the middle of its requests, although it answers probes."""
        return _within(NEXT_FLOOR_S, self._gap_s)

    def _forget(self) -> None:
        left = 0.5 ** (self._passed_s / HALF_LIFE_S)
        self._first_token_s *= left
        self._gap_s *= left
        self._passed_s = 0.0


def _within(floor_s: float, seen_s: float) -> float:
    return min(MOST_S, max(floor_s, TIMES * seen_s))
