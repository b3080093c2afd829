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


@dataclass(slots=True, eq=False)
class Job:
    """One completion.

    Args:
        body: vLLM's parameters: `prompt` (token ids), `seed`, sampling. The completion does not depend on the
            nodes that make it.
        policy: the label of the policy version that makes the whole completion.
        group: shared by the requests of one prompt, or the turns of one session; they go to the same node while
            that is sensible.
        recovery: "continue" resumes from the tokens that arrived if the parameters allow it; "exact" always
            starts over.
        is_turn: `group` is a session, and the job is one of its turns.
        is_admitted: part of a batch or session that was admitted as a whole; never refused because the queue is
            full.
        prompt_size: bytes of memory that the prompt takes while the job waits; None: that of its token list.

    Starting over empties the output, which then grows again. It becomes the same again on nodes that compute the
    same last bits.
    """

    body: dict[str, Any]
    policy: str
    group: Hashable
    recovery: Recovery = "continue"
    is_turn: bool = False
    is_admitted: bool = False
    prompt_size: int | None = None

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)  # of each token
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
    def prompt(self) -> Sequence[int]:
        """The prompt's token ids."""
        prompt: Sequence[int] = self.body["prompt"]
        return prompt

    @property
    def prompt_tokens(self) -> int:
        """The prompt's length."""
        return len(self.body["prompt"])

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
            and len(self.token_ids) < self.max_tokens
            and self._has_continuable_parameters()
        )

    def start_over(self) -> int:
        """Drop the output. Returns the number of tokens lost."""
        lost = len(self.token_ids)
        self.token_ids, self.logprobs = [], []
        self.handed_over = [replace(handover, tokens=0) for handover in self.handed_over]
        return lost

    def _has_continuable_parameters(self) -> bool:
        if self._is_continuable is None:
            self._is_continuable = recovery.can_continue(self.body)
        return self._is_continuable


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
