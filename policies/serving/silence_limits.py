"""Limit how long to wait for a silent member: tolerate slow members, detect stopped engines in bounded time.

At the soft limit the gateway probes the member: a machine that is gone does not answer. At the hard limit it
abandons a member that does answer: its HTTP server works, but its engine has stopped. Legitimate reasons for
silence are a prompt that waits or is being computed, kernels that are being compiled, and other requests' prompts,
which are computed in chunks of seconds without decoding. So a hard limit is a multiple of the longest recent wait,
with a floor for causes that were not seen yet.

Each term of a member has its own limits: a node that is ten times slower than the rest is judged by its own pace,
and a new one may be cold. A member's silence is measured from the last event of any of its requests: while others
progress, a request without events is waiting its turn.
"""

from __future__ import annotations

from typing import Final

# With the probe's second and the sweep, a vanished machine is removed within 3 s. A probe costs almost nothing.
SOFT_S = 1.0
# A lost SYN is sent again after 1 s; a second loss in a row fails the connection.
CONNECT_S = 2.5

TIMES = 3.0  # the longest recent wait: load grows, but not threefold from one wait to the next
HALF_LIFE_S = 60.0  # of observed waits; a node meets new shapes mostly in its first minute or two
FIRST_TOKEN_FLOOR_S = 45.0  # kernels compile for 25 s, longer under load
NEXT_FLOOR_S = 15.0  # other requests' prompts stall decoding for 2 to 5 s
LIMIT_MAX_S = 240.0  # upper bound
START_FIRST_TOKEN_S = 120.0  # the limits before anything was observed
START_NEXT_S = 60.0
PROMPT_TOKEN_S = 1 / 200  # for each prompt token: slower than any useful node


class SilenceLimits:
    """The limits for one member in one term, learnt from its own waits. An observation costs one comparison.

    Attributes:
        connect_s: how long a connection may take.
        soft_s: the silence after which the member is probed.
    """

    __slots__ = ("_first_token_s", "_gap_s", "_passed_s")

    connect_s: Final = CONNECT_S
    soft_s: Final = SOFT_S

    def __init__(self) -> None:
        self._first_token_s = START_FIRST_TOKEN_S / TIMES
        self._gap_s = START_NEXT_S / TIMES
        self._passed_s = 0.0

    def record_first_token(self, after_s: float, prompt_tokens: int) -> None:
        """Record a first token that came `after_s` after its request was sent."""
        if self._passed_s:
            self._forget()
        self._first_token_s = max(self._first_token_s, after_s - prompt_tokens * PROMPT_TOKEN_S)

    def record_gap(self, gap_s: float) -> None:
        """Record a gap between two events of one request.

        A silence for which the member was abandoned counts too; otherwise the limits of a fleet that has become
        slow would never grow.
        """
        if self._passed_s:
            self._forget()
        if gap_s > self._gap_s:
            self._gap_s = gap_s

    def age(self, elapsed_s: float) -> None:
        """Age the observations by `elapsed_s`, time in which the member had requests.

        This takes effect with the next event, so that no limit falls during the silence it applies to.
        """
        self._passed_s += elapsed_s

    def first_token_s(self, prompt_tokens: int) -> float:
        """Return how long a member may be silent before the first token of any of its requests.

        Args:
            prompt_tokens: of the longest prompt among them.
        """
        longest_s = max(self._first_token_s, self._gap_s)  # causes that stall decoding stall a first token too
        return _limit_s(FIRST_TOKEN_FLOOR_S, longest_s) + prompt_tokens * PROMPT_TOKEN_S

    @property
    def hard_s(self) -> float:
        """How long a member may be silent in the middle of its requests, although it answers probes."""
        return _limit_s(NEXT_FLOOR_S, self._gap_s)

    def _forget(self) -> None:
        decay = 0.5 ** (self._passed_s / HALF_LIFE_S)
        self._first_token_s *= decay
        self._gap_s *= decay
        self._passed_s = 0.0


def _limit_s(floor_s: float, longest_s: float) -> float:
    return min(LIMIT_MAX_S, max(floor_s, TIMES * longest_s))
