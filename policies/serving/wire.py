"""The HTTP protocol between trainer, gateway and rollout nodes. JSON bodies are decoded into these types.

| client, server | request | body | response |
|---|---|---|---|
| node agent, gateway | `POST /members/{node}` | Announce | AnnounceReply, held until it changes or `HOLD_S` |
| node agent while vLLM starts, gateway | `POST /joining/{node}` | Stage | AnnounceReply, immediately |
| node agent, gateway | `DELETE /members/{node}?boot=ID` | | 204 |
| trainer, gateway | `POST /v1/rollouts` | lines: Batch, PromptLine ... | lines: BatchLine, as each is done |
| trainer, gateway | `PUT /sessions/{id}` | OpenSession | 204 |
| agent, gateway | `POST /sessions/{id}/v1/chat/completions` | OpenAI's | OpenAI's |
| trainer, gateway | `GET /sessions/{id}` | | Trace |
| trainer, gateway | `DELETE /sessions/{id}` | | 204 |
| controller, gateway | `POST /members/{node}/drain` | | 204 |
| gateway, node | `POST /v1/completions` | vLLM's | vLLM's events |
| gateway, node | `POST /v1/chat/completions/render`, `/derender` | vLLM's | vLLM's |
| node agent, its own vLLM | `PUT /grpo/policy` | LoadPolicy | 204, or 422 with the reason |

All other processes read the GatewayStatus that the gateway writes to the run's store, as they may not reach it.

A node with one engine is one member, under its own name. A machine with several engines is several members,
NODE.0, NODE.1 and so on (`policies.model.vocabulary.member_of`). In `drain`, and in `DELETE` without a boot, the
machine's name means all of them.

A session is an agent's conversation with one policy version, recorded token by token. The gateway records each
turn before the agent gets it. It never tokenizes text itself: vLLM renders the messages, and where they continue a
recorded turn, the recorded tokens replace the rendered ones. Otherwise a new branch begins. A restarted trainer
may open a session again. Requests that were answered before then get the recorded answer, and a trace holds only
turns that were answered since.

Every request carries `Authorization: Bearer TOKEN`, the run's secret. Requests from the gateway to a node also
carry `X-Grpo-Boot` and `X-Grpo-Policy`. A node with another boot or policy answers 409, so a node that returned
on the same address with other weights never answers in place of the old one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from grpo_orch.policies.model.vocabulary import PolicyVersion, Recovery
from grpo_orch.policies.serving.canary import Canary
from grpo_orch.policies.serving.joining import Stage

HEADER_BOOT = "X-Grpo-Boot"
HEADER_POLICY = "X-Grpo-Policy"
HOLD_S = 1.0  # the gateway holds an announcement this long; it doubles as the heartbeat interval
SILENT_S = 2.5  # a member without an announcement for this long is removed
REFUSED = "refused"  # finish reason of a completion that no node accepts
STATUS_S = 2.0  # maximum time between the gateway's status writes to the store
ROLLOUTS = "/v1/rollouts"
JOINING = "/joining"
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
RENDER = CHAT + "/render"  # vLLM's: a chat's prompt as tokens
DERENDER = CHAT + "/derender"  # vLLM's: an answer's tokens as a message
MODEL = "policy"  # the name under which every node serves
# The gateway closes an idle connection before the node does, so that it never sends a request while the node is
# closing. Long enough for the pause in which a trainer applies a step.
GATEWAY_IDLE_S = 300.0
NODE_IDLE_S = 360

SESSIONS = "/sessions"
HEADER_SESSION = "X-Session-ID"  # names an open session on the usual path
HEADER_OPENING = "X-Session-Opening"  # a request for an earlier opening of its session gets LOST_CODE
HEADER_REQUEST = "X-Request-ID"  # a repeated request with the same ID gets the same turn
LOST_CODE = "session_not_found"  # error code for a session that is not open
LIMIT_CODE = "session_limit"  # error code for a request beyond a limit of its session
TURNS_MAX = 1000
TURNS_AT_ONCE_MAX = 16


@dataclass(frozen=True, slots=True)
class PolicyRef:
    """The location of a policy version's weights: a manifest's folder in the run's store.

    A restarted trainer repeats its last steps. Where sums depend on their order, the new weights differ in their
    last bits from the old ones of the same version. So nodes and gateway identify a policy by `label`, which
    includes a digest of the content.
    """

    version: str  # PolicyVersion as text
    prefix: str
    digest: str = ""  # of the weights alone, see checkpoint.weights.safetensors.content_digest

    @property
    def label(self) -> str:
        """`0-120@` and 32 hex digits: identifies the policy that a node holds or a request needs."""
        return f"{self.version}@{self.digest}" if self.digest else self.version


def labelled_version(label: str) -> PolicyVersion:
    """Return the version in a label. Raises ValueError for other text."""
    return PolicyVersion.parse(label.partition("@")[0])


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Stats of a node's engine. The last two are counters since its start."""

    running: int = 0  # requests
    waiting: int = 0  # requests, for KV cache or for their prompt's turn
    kv_usage: float = 0.0  # used share of its KV cache, from 0 to 1
    preemptions: int = 0  # requests that lost their KV cache to others
    tokens: int = 0  # of prompts and completions


@dataclass(frozen=True, slots=True)
class PolicyStages:
    """How long a node took to load a policy. If it was fetched while vLLM started, `fetch_s` is no wait."""

    policy: str  # its label
    fetch_s: float = 0.0  # with verifying every digest, and applying deltas
    fetched_bytes: int = 0
    load_s: float = 0.0  # while the node serves no requests, the canary included


@dataclass(frozen=True, slots=True)
class Announce:
    """A rollout node's announcement. A new `boot_id` is a new process and voids what was known of the old one."""

    boot_id: str
    address: str  # host:port of its vLLM
    policy: str | None  # the version it holds; None on base weights, or without any
    max_requests: int = 256
    draining: bool = False  # about to be preempted; send no new requests
    unfit: str = ""  # why it has stopped trying to hold the wanted policy, in one line; empty while fit
    kv_tokens: int = 0  # of prompts and completions that its engine has room for; 0: unknown
    engine: EngineStats | None = None  # at most a second or two old
    stages: PolicyStages | None = None  # of the policy that it holds
    stage: Stage | None = None  # of the policy that it fetches
    engines: int = 1  # of its machine, each of them a member


@dataclass(frozen=True, slots=True)
class AnnounceReply:
    """The gateway's instructions for a node: the policy to hold or, with `drain`, to leave.

    A node leaves after it was drained and its last request ended, or because a newer boot replaced it.
    """

    policy: PolicyRef | None = None
    drain: bool = False


@dataclass(frozen=True, slots=True)
class LoadPolicy:
    """Weights that the agent has fetched and verified, for its vLLM to load.

    vLLM must compute the canary before it serves them. An `adapter` is applied to the weights that vLLM holds.

    `base` is the label of the policy that vLLM must hold to apply `deltas`, paths of changes since. `digests` are
    those of the weights before the first delta and after each. With a `path` too, vLLM then reloads the weights
    in full and verifies that both results are equal.
    """

    version: str
    path: str
    canary: Canary | None = None
    adapter: bool = False
    base: str = ""
    deltas: list[str] = field(default_factory=list)
    digests: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class ProvePolicy:
    """Make vLLM compare its policy with the file at `path`, each `step`th tensor from `first`."""

    version: str
    path: str
    first: int
    step: int


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """A request for one completion of one prompt; `index` is its number in the batch."""

    index: int
    prompt_token_ids: list[int]
    seed: int


@dataclass(frozen=True, slots=True)
class Batch:
    """A trainer's request for completions. `sampling` holds vLLM's completion parameters.

    A completion whose node is lost continues on another from the tokens that have arrived or, with `recovery:
    exact`, starts over; both give the completion that the first node would have made. Only nodes that hold
    `policy` serve.
    """

    policy: PolicyRef
    sampling: dict[str, Any]
    requests: list[CompletionRequest]
    deadline_s: float
    recovery: Recovery = "continue"


@dataclass(frozen=True, slots=True)
class Sample:
    """One completion of a PromptLine's prompt; fields as in CompletionRequest."""

    index: int
    seed: int


@dataclass(frozen=True, slots=True)
class PromptLine:
    """A prompt of a batch, sent once, with all its samples; equivalent to entries in `requests`."""

    prompt_token_ids: list[int]
    samples: list[Sample]


@dataclass(frozen=True, slots=True)
class Handover:
    """A completion's move away from a node, with `tokens` kept; 0 where it started over."""

    node: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Completion:
    """One finished completion: token ids and the natural logarithm of each one's probability.

    For a request that no node accepts it has no tokens, and `refused` holds vLLM's reason.
    """

    index: int
    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str  # vLLM's, or REFUSED
    policy: str
    node: str
    refused: str = ""
    limit_tokens: int | None = None  # the node's maximum sequence length, where the prompt is too long
    handed_over: list[Handover] = field(default_factory=list)  # in order of time


@dataclass(frozen=True, slots=True)
class Progress:
    """The batch's progress, sent a few times a second."""

    tokens: int  # received by the gateway and kept so far, of finished and unfinished completions
    discarded: int  # tokens discarded with a lost node or, before this batch, with a lost client
    members: int  # that may serve it
    waiting: int  # requests without a member
    joining_events: int = 0  # progress events of nodes that are still starting, or that work on another policy
    reused: int = 0  # of `tokens`, those that existed before this batch, made for an earlier client


@dataclass(frozen=True, slots=True)
class BatchLine:
    """One line of a batch's response: exactly one field is set. `end` and `error` end the batch."""

    completion: Completion | None = None
    progress: Progress | None = None
    end: Progress | None = None
    error: str | None = None


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
        opening: names the opening, for requests that arrive late. A later one sorts after it; an earlier one is
            refused, and the same one repeated changes nothing.
    """

    policy: PolicyRef
    seed: int
    sampling: dict[str, Any] = field(default_factory=dict)
    recovery: Recovery = "continue"
    turns_max: int = TURNS_MAX
    tokens_max: int = 2**31 - 1
    opening: str = ""


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


def training_trace(trace: Trace) -> dict[str, Any]:
    """Convert a trace to OpenEnv's `TrainingTrace`, version 1: each answer once, with its prompt."""
    turns = [
        {
            "node_id": f"{number}-{turn.start}",
            "prompt_token_ids": branch.token_ids[: turn.start],
            "completion_token_ids": branch.token_ids[turn.start : turn.end],
            "per_token_logps": branch.logprobs[turn.start : turn.end],
            "loss_mask": [0] * turn.start + [1] * (turn.end - turn.start),
            "metadata": {"session_id": trace.session, "policy": trace.policy, "branch": number},
        }
        for number, branch in enumerate(trace.branches)
        for turn in branch.turns
        if any(branch.mask[turn.start : turn.end])
    ]
    return {"schema_version": 1, "turns": turns}
