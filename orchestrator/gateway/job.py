"""One completion on its way: what is asked for, and what of it has arrived, whichever nodes it came from.

A job outlives the nodes that work at it. `orchestrator.gateway.nodes.upstream` fills it event by event; the
completer moves it; who wants it looks at it at any time, and is called after each event if it asks for that.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from policies.model.vocabulary import Recovery
from policies.serving import recovery
from policies.serving.wire import COMPLETIONS

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
        prompt_size: bytes that waiting for a member keeps in memory; None: as a list of its tokens would.
        keep_text: keep `text`, `tokens` and `top_logprobs` as well, at several times the CPU time per event.
        arrived: called after each event that brought tokens or text, on the event loop: be quick.

    After a start-over everything that arrived is empty again and grows anew. With a seed it grows to the same, on
    nodes that compute the same last bits; where it does not, and the asker was told of tokens already, these stay
    true: they are taken up again, and gone on from.
    """

    body: dict[str, Any]
    policy: str
    group: Hashable
    prompt_tokens: int
    max_staleness_steps: int = 0
    path: str = COMPLETIONS
    recovery: Recovery = "continue"
    admitted: bool = False
    prompt_size: int | None = None
    keep_text: bool = False
    arrived: Callable[[], None] | None = None

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)  # of each token
    text: str = ""
    tokens: list[str] = field(default_factory=list)  # each token's text, as vLLM's logprobs have it
    top_logprobs: list[dict[str, float]] = field(default_factory=list)  # for each token, where they were asked for
    prompt_token_ids: Sequence[int] | None = (
        None  # known from the first event on, for token prompts from the start
    )
    made_from: str = ""  # the label of the version that made what has arrived
    waiting: bool = False  # for a member
    handovers: int = 0
    discarded: int = 0  # tokens that arrived and were thrown away
    saved: int = 0  # tokens that arrived and were kept when their node was lost
    last_failure: str = ""
    first_token_s: float | None = None  # on the event loop's clock
    taken_over: bool = False  # moved once to finish sooner; not again
    refused_by: frozenset[str] = frozenset()  # nodes that will not take it
    context_tokens: int | None = None  # how long a sequence may be, where a node has said so
    told: int = 0  # of the tokens, those that the asker knows of
    _kept: Arrived | None = None  # what he was told of, until it has arrived again
    shared: int = 0  # times that it was moved for an even division
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

    @property
    def regrowing(self) -> bool:
        """Whether it started over and is not yet where its asker is."""
        return self._kept is not None

    def whole(self) -> int:
        """How many tokens there are up to the last that ends with a whole character; with keep_text."""
        count = len(self.tokens)
        while count and (not self.tokens[count - 1] or self.tokens[count - 1].endswith(_HALF_A_CHARACTER)):
            count -= 1
        return count

    def agrees(self) -> bool:
        """Whether what arrives again is what the asker was told."""
        if self._kept is None:
            return True
        again = min(len(self.token_ids), self.told)
        if self.token_ids[:again] != self._kept.token_ids[:again]:
            return False
        if again == self.told:
            self._kept = None
        return True

    def go_back(self) -> int:
        """Take up again what the asker was told, for it does not arrive again. Returns how many tokens are lost.

        From here on it goes on from what has arrived, though another node would have come to something else.
        Raises CannotGoOn.
        """
        kept, lost = self._kept, len(self.token_ids)
        assert kept is not None
        nearly = self.recovery == "continue" and recovery.nearly_continues(self.body)
        if not nearly or self.prompt_token_ids is None or kept.whole < self.told:
            raise CannotGoOn
        self.token_ids, self.logprobs = kept.token_ids[: kept.whole], kept.logprobs[: kept.whole]
        self.tokens, self.top_logprobs = kept.tokens[: kept.whole], kept.top_logprobs[: kept.whole]
        # vLLM holds text back that a stop string may begin with.
        shown = "".join(self.tokens)
        self.text = shown if shown.startswith(kept.text) else kept.text
        self._kept, self._continues = None, True
        return lost - len(self.token_ids)

    def start_over(self) -> int:
        """Forget what has arrived. Returns how many tokens that were."""
        lost = len(self.token_ids)
        if self.told and self._kept is None:
            arrived = self.token_ids, self.logprobs, self.tokens, self.top_logprobs
            self._kept = Arrived(*arrived, self.text, self.whole())
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
class Arrived:
    """What had arrived of a job before it started over; `whole` as the job's."""

    token_ids: list[int]
    logprobs: list[float]
    tokens: list[str]
    top_logprobs: list[dict[str, float]]
    text: str
    whole: int


@dataclass(frozen=True, slots=True)
class Finished:
    """A whole completion."""

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str  # vLLM's: stop, length, ...
    stop_reason: int | str | None  # the stop token or string that ended it
    text: str | None  # with keep_text
    prompt_token_ids: Sequence[int] | None
    policy: str  # the label of the version that made every token
    node: str  # that finished it
    handovers: int
    first_token_s: float  # from when it was asked for
    took_s: float


class RequestRefused(Exception):
    """No node that serves takes the request: its own fault.

    Args:
        message: why, in vLLM's words.
        status: a 4xx.
        limit_tokens: how long a sequence may be on that node, where the request is too long for it.
    """

    def __init__(self, message: str, status: int = 400, limit_tokens: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.limit_tokens = limit_tokens


class WeightsRefused(RequestRefused):
    """What a node computes with these weights are no numbers: every node would say so, of any request."""


class ToldOtherwise(Exception):
    """A node makes other tokens than the asker was told of: it computes other last bits than the one before."""


class CannotGoOn(Exception):
    """What the asker was told cannot be made again, and its parameters do not allow to go on from it."""


class QueueFull(Exception):
    """So many requests wait for a node already that no more are taken: ask again later."""
