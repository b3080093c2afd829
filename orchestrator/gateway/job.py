"""One completion on its way: what is asked for, and what of it has arrived, whichever nodes it came from.

A job outlives the nodes that work at it. `orchestrator.gateway.nodes.upstream` fills it event by event,
`orchestrator.gateway.routing.dispatch` moves it, and its asker may look at it at any time.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from policies.model.vocabulary import Recovery
from policies.serving import recovery
from policies.serving.wire import HandOver

VLLM_DEFAULT_TOKENS = 16
_INCOMPLETE_CHARACTER = "\N{REPLACEMENT CHARACTER}"


@dataclass(slots=True, eq=False)
class Job:
    """One completion.

    Args:
        body: vLLM's parameters: `prompt` (text or token ids), `seed`, sampling. With a seed, the completion does
            not depend on the nodes that make it.
        policy: the label of the version that makes all of it.
        group: what the requests of one prompt, or the turns of one session, have in common; they go to one node
            while that is sensible.
        prompt_tokens: the prompt's length, or a guess.
        recovery: whether it goes on where it was cut, if its parameters allow that, or always starts over.
        is_turn: the group is a session, and this one of its turns.
        admitted: it is part of something that was let in as a whole, and is not refused for a full queue.
        prompt_size: bytes that it keeps in memory while it waits; None: as many as a list of its tokens.
        keep_text: keep `text`, `tokens` and `top_logprobs` as well, at several times the CPU time per event.
        arrived: called after each event that brought tokens or text, on the event loop: be quick.

    After a start-over all that arrived is empty and grows anew. With a seed it grows to the same, on nodes that
    compute the same last bits. Where it does not, what the asker was told already stays true: the job takes that
    up again and goes on from there.
    """

    body: dict[str, Any]
    policy: str
    group: Hashable
    prompt_tokens: int
    recovery: Recovery = "continue"
    is_turn: bool = False
    is_admitted: bool = False
    prompt_size: int | None = None
    keep_text: bool = False
    on_progress: Callable[[], None] | None = None

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)  # of each token
    text: str = ""
    tokens: list[str] = field(default_factory=list)  # each token's text, as vLLM's logprobs have it
    top_logprobs: list[dict[str, float]] = field(default_factory=list)  # for each token, where they were asked for
    prompt_token_ids: Sequence[int] | None = None  # known from the first event on, of a token prompt at once
    is_waiting: bool = False  # for a member
    handovers: int = 0
    handed_over: list[HandOver] = field(default_factory=list)  # by nodes that had made some of it
    discarded: int = 0  # tokens that arrived and were thrown away
    saved: int = 0  # tokens that arrived and were kept when their node was lost
    last_failure: str = ""
    first_token_at_s: float | None = None  # on the event loop's clock
    refused_by: frozenset[str] = frozenset()  # nodes that will not take it
    streamed_tokens: int = 0  # tokens that the asker knows of
    _before_restart: PartialOutput | None = None  # what the asker was told of, until it has arrived again
    rebalances: int = 0  # how often it was moved for an even division
    _is_continuable: bool | None = None

    @property
    def max_tokens(self) -> int:
        """The most that it may get; where the body does not say, vLLM's default."""
        limit = recovery.limit_of(self.body)
        return VLLM_DEFAULT_TOKENS if limit is None else limit

    def can_continue(self) -> bool:
        """Whether it can go on from what has arrived, and would become the undisturbed completion."""
        return (
            self.recovery == "continue"
            and bool(self.token_ids)
            and self.prompt_token_ids is not None
            and len(self.token_ids) < self.max_tokens
            and self._has_continuable_parameters()
            and (not self.keep_text or self._ends_on_whole_character())
        )

    @property
    def is_catching_up(self) -> bool:
        """Whether it started over and has not yet come to what its asker was told."""
        return self._before_restart is not None

    def whole_character_tokens(self) -> int:
        """With `keep_text`, how many tokens there are up to the last one that ends with a whole character."""
        count = len(self.tokens)
        while count and (not self.tokens[count - 1] or self.tokens[count - 1].endswith(_INCOMPLETE_CHARACTER)):
            count -= 1
        return count

    def matches_streamed(self) -> bool:
        """Whether what arrives again is what the asker was told, as far as it has arrived."""
        if self._before_restart is None:
            return True
        again = min(len(self.token_ids), self.streamed_tokens)
        if self.token_ids[:again] != self._before_restart.token_ids[:again]:
            return False
        if again == self.streamed_tokens:
            self._before_restart = None
        return True

    def restore_streamed(self) -> int:
        """Take up again what the asker was told, because something else arrived. Returns how many tokens are lost.

        From here on it goes on from what has arrived, whatever another node would have made. Raises CannotContinue.
        """
        kept, lost = self._before_restart, len(self.token_ids)
        assert kept is not None
        nearly = self.recovery == "continue" and recovery.nearly_continues(self.body)
        if not nearly or self.prompt_token_ids is None or kept.whole_character_tokens < self.streamed_tokens:
            raise CannotContinue
        self.token_ids, self.logprobs = (
            kept.token_ids[: kept.whole_character_tokens],
            kept.logprobs[: kept.whole_character_tokens],
        )
        self.tokens, self.top_logprobs = (
            kept.tokens[: kept.whole_character_tokens],
            kept.top_logprobs[: kept.whole_character_tokens],
        )
        # vLLM holds text back that a stop string may begin with.
        shown = "".join(self.tokens)
        self.text = shown if shown.startswith(kept.text) else kept.text
        self._before_restart, self._is_continuable = None, True
        return lost - len(self.token_ids)

    def start_over(self) -> int:
        """Forget what has arrived. Returns how many tokens it was."""
        lost = len(self.token_ids)
        if self.streamed_tokens and self._before_restart is None:
            arrived = self.token_ids, self.logprobs, self.tokens, self.top_logprobs
            self._before_restart = PartialOutput(*arrived, self.text, self.whole_character_tokens())
        self.token_ids, self.logprobs, self.tokens, self.top_logprobs = [], [], [], []
        self.text = ""
        self.handed_over = [replace(one, tokens=0) for one in self.handed_over]
        return lost

    def _has_continuable_parameters(self) -> bool:
        if self._is_continuable is None:
            self._is_continuable = recovery.continues(self.body)
        return self._is_continuable

    def _ends_on_whole_character(self) -> bool:
        """Whether the node had sent all text of the tokens that arrived: another node could not know what it still
        held back of a character that the next tokens complete."""
        return (
            bool(self.tokens)
            and bool(self.tokens[-1])
            and not self.text.endswith(_INCOMPLETE_CHARACTER)
            and "".join(self.tokens) == self.text
        )


@dataclass(frozen=True, slots=True)
class PartialOutput:
    """What had arrived of a job before it started over; `whole` as its method says."""

    token_ids: list[int]
    logprobs: list[float]
    tokens: list[str]
    top_logprobs: list[dict[str, float]]
    text: str
    whole_character_tokens: int


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
    """No serving node takes the request, which is its own fault.

    Args:
        message: why, in vLLM's words.
        status: a 4xx.
        limit_tokens: the longest sequence on that node, where the request is too long for it.
    """

    def __init__(self, message: str, status: int = 400, limit_tokens: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.limit_tokens = limit_tokens


class WeightsRefused(RequestRefused):
    """A node computes no numbers with these weights: every node would say so, of any request."""


class OutputDiverged(Exception):
    """A node makes other tokens than the asker was told: it computes other last bits than the one before it."""


class CannotContinue(Exception):
    """What the asker was told cannot be made again, and the parameters do not allow going on from it."""


class QueueFull(Exception):
    """Too many requests wait for a node already: ask again later."""
