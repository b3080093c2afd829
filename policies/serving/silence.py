"""How long to wait for a silent member: slow is not dead, a stopped engine is found in bounded time.

At the soft limit the gateway asks the member whether it lives: a machine that is gone does not answer. At the hard
one it gives up a member that answers, for its engine has stopped behind a living HTTP server. Honest reasons for
silence are a prompt that waits or is computed, kernels that are compiled, and the prompts of others, computed in
chunks of seconds during which nobody decodes. So the hard limits are a multiple of the longest wait of late, with
a floor for what has not been seen yet.

Keep one for each term of a member: a node that is ten times slower than the rest is judged by its own pace, and a
new one may be cold. Measure the silence of a member from the last event of any of its requests: while others move,
one that stands still is waiting its turn.
"""

from __future__ import annotations

from typing import Final

# With the probe's own second and the sweep a vanished machine is out within 3 s. Asking costs next to nothing.
SOFT_S = 1.0
# A lost SYN is sent again after 1 s; the second loss of a row is not waited for.
CONNECT_S = 2.5

TIMES = 3.0  # of the longest wait of late: load grows, but not threefold from one wait to the next
HALF_LIFE_S = 60.0  # of what was seen; in the first minute or two a node meets its shapes for the first time
FIRST_TOKEN_FLOOR_S = 45.0  # kernels compile for 25 s, and this beside other work
NEXT_FLOOR_S = 15.0  # the others' prompts stall everyone for 2 to 5 s
MOST_S = 240.0  # whatever was seen
START_FIRST_TOKEN_S = 120.0  # the limits when nothing was seen
START_NEXT_S = 60.0
PROMPT_TOKEN_S = 1 / 200  # granted for each token of a prompt: slower than any node worth its rent


class Patience:
    """The limits for one member, from what it showed. Times are in seconds.

    Observing costs a comparison. An observation outlives the load that made it by a few of HALF_LIFE_S.
    """

    __slots__ = ("_first_token_s", "_gap_s", "_passed_s")

    connect_limit_s: Final = CONNECT_S
    soft_limit_s: Final = SOFT_S

    def __init__(self) -> None:
        self._first_token_s = START_FIRST_TOKEN_S / TIMES
        self._gap_s = START_NEXT_S / TIMES
        self._passed_s = 0.0

    def first_token(self, after_s: float, prompt_tokens: int) -> None:
        """A request's first token came, so long after it was sent."""
        if self._passed_s:
            self._forget()
        self._first_token_s = max(self._first_token_s, after_s - prompt_tokens * PROMPT_TOKEN_S)

    def gap(self, gap_s: float) -> None:
        """So long passed between two events of one request.

        Tell the silence, too, for which the member was given up: were longer waits never seen, a fleet that has
        become slow would be given up for ever.
        """
        if self._passed_s:
            self._forget()
        if gap_s > self._gap_s:
            self._gap_s = gap_s

    def fade(self, elapsed_s: float) -> None:
        """Let time pass in which the member had requests.

        It counts from the next event on: no limit falls during the silence that it is held against.
        """
        self._passed_s += elapsed_s

    def first_token_limit_s(self, prompt_tokens: int) -> float:
        """How long a member may be silent that has sent no token yet of any request it has.

        Args:
            prompt_tokens: of the longest prompt among them.
        """
        seen_s = max(self._first_token_s, self._gap_s)  # what stalls the others stalls a first token
        return _within(FIRST_TOKEN_FLOOR_S, seen_s) + prompt_tokens * PROMPT_TOKEN_S

    @property
    def hard_limit_s(self) -> float:
        """How long a member may be silent in the middle of its requests, although it answers probes."""
        return _within(NEXT_FLOOR_S, self._gap_s)

    def _forget(self) -> None:
        left = 0.5 ** (self._passed_s / HALF_LIFE_S)
        self._first_token_s *= left
        self._gap_s *= left
        self._passed_s = 0.0


def _within(floor_s: float, seen_s: float) -> float:
    return min(MOST_S, max(floor_s, TIMES * seen_s))
