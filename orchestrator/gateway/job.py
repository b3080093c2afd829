"""One completion on its way: what is asked for, and what of it has arrived, whichever nodes it came from.

A job outlives the nodes that work at it. `orchestrator.gateway.upstream` fills it event by event; the completer
moves it; who wants it looks at it at any time, and is called after each event if it asks for that.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

from policies import recovery
from policies.recovery import Recovery

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
_HALF_A_CHARACTER = "\N{REPLACEMENT CHARACTER}"


@dataclass(slots=True, eq=False)
class Job:
    """One completion.

    Args:
        body: vLLM's parameters: `prompt` (text or token ids) or, for CHAT, `messages`; `seed`; sampling. With a
            seed, the completion does not depend on the nodes that make it.
        policy: the label of the version that is wanted.
        max_staleness_steps: how many steps older the version may be that it is made from instead.
        group: what the requests of one prompt have in common: they are sent to one node while that is sensible.
        prompt_tokens: the prompt's length, or a guess.
        path: COMPLETIONS or CHAT.
        recovery: whether it goes on where it was cut, if its parameters allow that, or always starts over.
        admitted: it belongs to something that was let in as a whole, and is not refused for a full queue.
        keep_text: keep `text`, `tokens` and `top_logprobs` as well, at several times the CPU time per event.
        arrived: called after each event that brought tokens or text, on the event loop: be quick.

    After a start-over everything that arrived is empty again and grows anew; with a seed it grows to the same.
    """

    body: dict[str, Any]
    policy: str
    group: Hashable
    prompt_tokens: int
    max_staleness_steps: int = 0
    path: str = COMPLETIONS
    recovery: Recovery = "continue"
    admitted: bool = False
    keep_text: bool = False
    arrived: Callable[[], None] | None = None

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)  # of each token
    text: str = ""
    tokens: list[str] = field(default_factory=list)  # each token's text, as vLLM's logprobs have it
    top_logprobs: list[dict[str, float]] = field(default_factory=list)  # for each token, where they were asked for
    prompt_token_ids: list[int] | None = None  # known from the first event on, for token prompts from the start
    made_from: str = ""  # the label of the version that made what has arrived
    waiting: bool = False  # for a member
    handovers: int = 0
    discarded: int = 0  # tokens that arrived and were thrown away
    saved: int = 0  # tokens that arrived and were kept when their node was lost
    last_failure: str = ""
    first_token_s: float | None = None  # on the event loop's clock
    taken_over: bool = False  # moved once to finish sooner; not again
    _continues: bool | None = None

    @property
    def max_tokens(self) -> int:
        """The most it may get; where the body does not say, what vLLM then does."""
        limit = recovery.limit_of(self.body)
        if limit is None:
            return 16 if self.path == COMPLETIONS else sys.maxsize
        return limit

    def may_continue(self) -> bool:
        """Whether what has arrived can be gone on from, and would give the undisturbed completion."""
        return (
            self.recovery == "continue"
            and bool(self.token_ids)
            and self.prompt_token_ids is not None
            and len(self.token_ids) < self.max_tokens
            and self._safe()
            and (not self.keep_text or self._whole_characters())
        )

    def start_over(self) -> int:
        """Forget what has arrived. Returns how many tokens that were."""
        lost = len(self.token_ids)
        self.token_ids, self.logprobs, self.tokens, self.top_logprobs = [], [], [], []
        self.text = self.made_from = ""
        return lost

    def _safe(self) -> bool:
        if self._continues is None:
            self._continues = recovery.continues(self.body)
        return self._continues

    def _whole_characters(self) -> bool:
        """Whether the node had told all text of the tokens that arrived: what it still held back of a character
        that the next tokens complete, another node could not know."""
        return (
            bool(self.tokens)
            and bool(self.tokens[-1])
            and not self.text.endswith(_HALF_A_CHARACTER)
            and "".join(self.tokens) == self.text
        )


@dataclass(frozen=True, slots=True)
class Finished:
    """A whole completion."""

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str  # vLLM's: stop, length, ...
    stop_reason: int | str | None  # the stop token or string that ended it
    text: str | None  # with keep_text
    prompt_token_ids: list[int] | None
    policy: str  # the label of the version that made every token
    node: str  # that finished it
    handovers: int
    first_token_s: float  # from when it was asked for
    took_s: float


class RequestRefused(Exception):
    """No node can serve the request: its own fault. `status` is a 4xx."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


class QueueFull(Exception):
    """So many requests wait for a node already that no more are taken: ask again later."""
