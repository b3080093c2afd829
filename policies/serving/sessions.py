"""Sessions: an agent's conversation with the policy, recorded token by token.

A session belongs to one policy version. Its agent requests one turn after the other, as any OpenAI client does, at
`/sessions/{id}/v1/chat/completions`. The gateway records each turn before the agent gets it. The gateway never
tokenizes text itself: vLLM renders the messages, and where they continue a recorded turn, the recorded tokens
replace the rendered ones. Otherwise a new branch begins.

| client, server | request | body | response |
|---|---|---|---|
| trainer, gateway | `PUT /sessions/{id}` | OpenSession | 204 |
| agent, gateway | `POST /sessions/{id}/v1/chat/completions` | OpenAI's | OpenAI's |
| trainer, gateway | `GET /sessions/{id}` | | Trace |
| trainer, gateway | `DELETE /sessions/{id}` | | 204 |

A restarted trainer may open a session again. Requests that were answered before then get the recorded answer, and
a trace holds only turns that were answered since.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from grpo_orch.policies.model.vocabulary import Recovery
from grpo_orch.policies.serving.wire import Handover, PolicyRef

SESSIONS = "/sessions"
HEADER_REQUEST = "X-Request-ID"  # a repeated request with the same ID gets the same turn
LOST_CODE = "session_not_found"  # error code for a session that is not open
LIMIT_CODE = "session_limit"  # error code for a request beyond a limit of its session
TURNS_MAX = 1000
TURNS_AT_ONCE_MAX = 16


@dataclass(frozen=True, slots=True)
class OpenSession:
    """The trainer's request to open a session.

    Args:
        policy: the version that makes all of its turns.
        seed: each turn's seed is derived from this one and the turn's prompt.
        sampling: vLLM's parameters; they replace the agent's own, except `max_tokens`.
        turns_max: requests that the agent may make. The next one is refused with LIMIT_CODE.
        tokens_max: tokens of all turns together. A turn that reaches it is cut there; each of several parallel
            turns may use what was left when it was requested.
    """

    policy: PolicyRef
    seed: int
    sampling: dict[str, Any] = field(default_factory=dict)
    recovery: Recovery = "continue"
    turns_max: int = TURNS_MAX
    tokens_max: int = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Turn:
    """One answer of the model: the tokens `[start:end]` of its branch."""

    start: int
    end: int
    finish_reason: str
    node: str  # that finished it
    handed_over: list[Handover] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Branch:
    """One row to train on: a conversation from its first prompt to its last answer.

    Attributes:
        token_ids: of the whole conversation.
        prompt_tokens: number of tokens before the first answer.
        mask: for each token, 1 if the policy made it in this branch, else 0. A turn that two branches share is in
            the mask of the first.
        logprobs: for each token, in natural logarithms; 0.0 where the mask is 0.
        turns: the answers, in order.
        messages: the conversation in OpenAI's format, the last answer included.
    """

    token_ids: list[int]
    prompt_tokens: int
    mask: list[int]
    logprobs: list[float]
    turns: list[Turn]
    messages: list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Trace:
    """A session's record: its branches, in the order of their last turns.

    Attributes:
        policy: the label of the version that made every token with mask 1.
        discarded: tokens that were made and discarded.
        limit: a description of the limit that its agent exceeded; empty: none.
    """

    session: str
    policy: str
    branches: list[Branch]
    discarded: int = 0
    limit: str = ""
