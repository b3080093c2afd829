"""One requested completion, and the output that has arrived so far, from any number of nodes.

A job outlives the nodes that work on it. `orchestrator.gateway.nodes.upstream` adds output event by event,
`orchestrator.gateway.routing.dispatch` moves the job between nodes, and the client's handler may read it at any
time.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from grpo_orch.policies.model.vocabulary import Recovery
from grpo_orch.policies.serving import recovery
from grpo_orch.policies.serving.wire import Handover

VLLM_DEFAULT_TOKENS = 16
_INCOMPLETE_CHARACTER = "\N{REPLACEMENT CHARACTER}"


@dataclass(slots=True, eq=False)
class Job:
    """One completion.

    Args:
        body: vLLM's parameters: `prompt` (text or token ids), `seed`, sampling. With a seed, the completion does
            not depend on the nodes that make it.
        policy: the label of the policy version that makes the whole completion.
        group: shared by the requests of one prompt, or the turns of one session; they go to the same node while
            that is sensible.
        prompt_tokens: the prompt's length, or an estimate.
        recovery: "continue" resumes from the tokens that arrived if the parameters allow it; "exact" always
            starts over.
        is_turn: `group` is a session, and the job is one of its turns.
        is_admitted: part of a batch or session that was admitted as a whole; never refused because the queue is
            full.
        prompt_size: bytes of memory that the prompt takes while the job waits; None: that of its token list.
        keep_text: also keep `text`, `tokens` and `top_logprobs`, at several times the CPU time per event.

    Starting over empties the output, which then grows again. With a seed it becomes the same again on nodes that
    compute the same last bits.
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

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)  # of each token
    text: str = ""
    tokens: list[str] = field(default_factory=list)  # each token's text, as in vLLM's logprobs
    top_logprobs: list[dict[str, float]] = field(default_factory=list)  # of each token, if requested
    prompt_token_ids: Sequence[int] | None = None  # of a text prompt: known from the first event on
    is_waiting: bool = False  # for a place on a member
    handed_over: list[Handover] = field(default_factory=list)  # from nodes that had made some of the tokens
    discarded: int = 0  # tokens that arrived and were thrown away
    saved: int = 0  # tokens that arrived and were kept when their node was lost
    last_failure: str = ""
    first_token_at_s: float | None = None  # on the event loop's clock
    refused_by: frozenset[str] = frozenset()  # nodes that do not accept the request
    rebalances: int = 0  # times it was moved to balance the load
    _is_continuable: bool | None = None

    @property
    def max_tokens(self) -> int:
        """The limit of output tokens; vLLM's default if the body sets none."""
        limit = recovery.limit_of(self.body)
        return VLLM_DEFAULT_TOKENS if limit is None else limit

    def can_continue(self) -> bool:
        """Return whether another node can continue from the tokens so far and give the undisturbed completion."""
        return (
            self.recovery == "continue"
            and bool(self.token_ids)
            and self.prompt_token_ids is not None
            and len(self.token_ids) < self.max_tokens
            and self._has_continuable_parameters()
            and (not self.keep_text or self._ends_on_whole_character())
        )

    def start_over(self) -> int:
        """Drop the output. Returns the number of tokens lost."""
        lost = len(self.token_ids)
        self.token_ids, self.logprobs, self.tokens, self.top_logprobs = [], [], [], []
        self.text = ""
        self.handed_over = [replace(handover, tokens=0) for handover in self.handed_over]
        return lost

    def _has_continuable_parameters(self) -> bool:
        if self._is_continuable is None:
            self._is_continuable = recovery.can_continue(self.body)
        return self._is_continuable

    def _ends_on_whole_character(self) -> bool:
        """Return whether the node has sent all text of the tokens that arrived.

        A node holds back an incomplete character, which another node could not know.
        """
        return (
            bool(self.tokens)
            and bool(self.tokens[-1])
            and not self.text.endswith(_INCOMPLETE_CHARACTER)
            and "".join(self.tokens) == self.text
        )


@dataclass(frozen=True, slots=True)
class Finished:
    """A whole completion: how its job ended.

    Args:
        finish_reason: vLLM's: stop, length, ...
        stop_reason: the stop token or string that ended it.
        node: that finished it.
        first_token_s: after the job was submitted.
        took_s: from there to the end.
    """

    job: Job
    finish_reason: str
    stop_reason: int | str | None
    node: str
    first_token_s: float = 0.0
    took_s: float = 0.0

    @property
    def token_ids(self) -> list[int]:
        """The completion's tokens."""
        return self.job.token_ids

    @property
    def logprobs(self) -> list[float]:
        """The log-probability of each token."""
        return self.job.logprobs


class RequestRefused(Exception):
    """No serving node accepts the request, because of the request itself.

    Args:
        message: the reason, as vLLM words it.
        status: a 4xx.
        limit_tokens: the longest sequence that the node accepts, if the request is too long for it.
    """

    def __init__(self, message: str, status: int = 400, limit_tokens: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.limit_tokens = limit_tokens


class WeightsRefused(RequestRefused):
    """A node computes NaN with these weights. Every node would, for any request."""


class QueueFull(Exception):
    """Too many requests already wait for a node; retry later."""
