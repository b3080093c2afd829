"""What trainer, gateway and rollout nodes say to each other over HTTP. JSON bodies, decoded into these types.

| who asks whom | request | body | answer |
|---|---|---|---|
| node agent, gateway | `POST /members/{node}` | Announce | AnnounceReply, held until it changes or `HOLD_S` |
| node agent whose vLLM starts, gateway | `POST /comers/{node}` | Stage | AnnounceReply, at once |
| node agent, gateway | `DELETE /members/{node}?boot=ID` | | 204 |
| trainer, gateway | `POST /v1/rollouts` | lines: Batch, PromptLine ... | lines: BatchLine, as each is done |
| controller, gateway | `POST /members/{node}/drain` | | 204 |
| gateway, node | `POST /v1/completions` | vLLM's | vLLM's events |
| gateway, node | `POST /v1/chat/completions/render`, `/derender` | vLLM's | vLLM's |
| node agent, its own vLLM | `PUT /grpo/policy` | LoadPolicy | 204, or 422 with why it is refused |

For all others the gateway writes a GatewayStatus to the run's store, since they may not reach it.

A node of one engine is one member, under its own name. A machine of several is as many members, NODE.0, NODE.1
and so on (`policies.model.vocabulary.member_of`); in `drain` and in `DELETE` without a boot the machine's own name
means all of them.

Every request carries `Authorization: Bearer TOKEN`, the run's secret. What the gateway asks of a node also carries
`X-Grpo-Boot` and `X-Grpo-Policy`; a node that is not that boot or does not hold that policy answers 409, so that a
node that came back on the same address with other weights never answers for the one that was asked.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from policies.model.vocabulary import PolicyVersion, Recovery
from policies.serving.canary import Canary
from policies.serving.joining import Stage

HEADER_BOOT = "X-Grpo-Boot"
HEADER_POLICY = "X-Grpo-Policy"
HOLD_S = 1.0  # the gateway holds an announcement for so long: that is the heartbeat, too
SILENT_S = 2.5  # a member that has announced nothing for so long is out
REFUSED = "refused"  # the finish reason of a completion that no node takes
CUT = "cut"  # of one that is not finished
STATUS_S = 2.0  # the gateway writes its status to the store at least so often
ROLLOUTS = "/v1/rollouts"
COMERS = "/comers"
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
RENDER = CHAT + "/render"  # vLLM's: a chat's prompt as tokens
DERENDER = CHAT + "/derender"  # vLLM's: an answer's tokens as a message
MODEL = "policy"  # the name under which every node serves
# The gateway closes an idle connection before the node does, so that it never sends a request into one that the
# node is closing at that moment. Long enough for the pause in which a trainer applies a step.
GATEWAY_IDLE_S = 300.0
NODE_IDLE_S = 360


@dataclass(frozen=True, slots=True)
class PolicyRef:
    """Where a policy version's weights are: a manifest's folder in the run's store.

    A trainer that is started again makes its last steps anew. Where sums depend on their order, the weights then
    differ in their last bits, and the old ones of the same version must not pass for them. So nodes and gateway
    speak of `label`, which names the content too.
    """

    version: str  # PolicyVersion as text
    prefix: str
    digest: str = ""  # of the weights alone, see checkpoint.weights.safetensors.content_digest

    @property
    def label(self) -> str:
        """`0-120@` and 32 hex digits: what a node holds, a request asks for and a completion was made from."""
        return f"{self.version}@{self.digest}" if self.digest else self.version


def labelled_version(label: str) -> PolicyVersion:
    """The version that a label names. Raises ValueError for other text."""
    return PolicyVersion.parse(label.partition("@")[0])


@dataclass(frozen=True, slots=True)
class EngineWord:
    """What a node's engine says of its work. The last two are counts since its start."""

    running: int = 0  # requests
    waiting: int = 0  # requests, for room or for their prompt's turn
    kv_usage: float = 0.0  # share of its room for keys and values that is used, from 0 to 1
    preemptions: int = 0  # requests that lost their room to others
    tokens: int = 0  # of prompts and completions


@dataclass(frozen=True, slots=True)
class PolicyStages:
    """What it took a node to hold a policy. For one that was fetched while vLLM started `fetch_s` is no wait."""

    policy: str  # its label
    fetch_s: float = 0.0  # with checking every digest, and applying what came as deltas
    fetched_bytes: int = 0
    load_s: float = 0.0  # in which the node serves nobody, the canary included


@dataclass(frozen=True, slots=True)
class Announce:
    """A rollout node says what it is. A new `boot_id` is a new process: what was known of the old one is void."""

    boot_id: str
    address: str  # host:port of its vLLM
    policy: str | None  # the version it holds; None while on base weights, or without any
    max_requests: int = 256
    draining: bool = False  # it will be taken away: nothing new, please
    unfit: str = ""  # why it cannot hold what is wanted and has stopped trying; one line, empty where it can
    kv_tokens: int = 0  # of prompts and completions that its engine has room for; 0 where it does not say
    engine: EngineWord | None = None  # a second or two old at most
    stages: PolicyStages | None = None  # of what it holds
    join_s: dict[str, float] = field(
        default_factory=dict
    )  # seconds from its agent's start by part, once it serves
    stage: Stage | None = None  # of the policy that it fetches
    engines: int = 1  # that its machine has, each of them a member


@dataclass(frozen=True, slots=True)
class AnnounceReply:
    """What the gateway wants of the node: the policy to hold, or with `drain` that it leaves, because it was
    drained and nothing runs on it any more, or because a newer boot of it took its place."""

    policy: PolicyRef | None = None
    drain: bool = False


@dataclass(frozen=True, slots=True)
class LoadPolicy:
    """Weights that the agent has fetched and verified, for the vLLM beside it to load; with the canary that vLLM
    must compute before it serves them. An `adapter` is applied to the weights that vLLM has.

    With `base`, the label of the policy that vLLM must hold for it, come `deltas`, paths of what has changed
    since, and the `digests` of the weights before the first and after each: vLLM overwrites what has changed. If
    there is a `path` too it then reloads, to try whether both come to the same.
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
    """For the vLLM beside an agent: compare with the file at `path`, of the policy that it holds, each `step`th
    tensor from the `first`."""

    version: str
    path: str
    first: int
    step: int


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """One completion of one prompt; `index` names it within the batch."""

    index: int
    prompt_token_ids: list[int]
    seed: int


@dataclass(frozen=True, slots=True)
class Batch:
    """What a trainer wants generated. `sampling` holds vLLM's completion parameters.

    A completion whose node is lost goes on elsewhere from the tokens that have arrived, or with `recovery: exact`
    starts over; both give what the undisturbed one would have been. Only nodes that hold `policy` serve.

    Once no node has been there for `patience_s`, the batch ends with what there is of each completion as `cut`.
    """

    policy: PolicyRef
    sampling: dict[str, Any]
    requests: list[CompletionRequest]
    deadline_s: float
    recovery: Recovery = "continue"
    patience_s: float | None = None  # None: up to the deadline


@dataclass(frozen=True, slots=True)
class Sample:
    """One completion of the prompt on whose line it is; as a CompletionRequest has it."""

    index: int
    seed: int


@dataclass(frozen=True, slots=True)
class PromptLine:
    """A prompt of a batch, sent once, and all that is asked of it: as much part of the batch as its `requests`."""

    prompt_token_ids: list[int]
    samples: list[Sample]


@dataclass(frozen=True, slots=True)
class HandOver:
    """A completion left a node that had made some of it; `tokens` of it were there, 0 where it started over."""

    node: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Completion:
    """One finished completion: token ids with the log-probability of each, in natural logarithms.

    For a request that no node took it has no token, and in `refused` vLLM's reason.
    """

    index: int
    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str  # vLLM's, REFUSED or CUT
    policy: str
    node: str
    refused: str = ""
    limit_tokens: int | None = None  # the longest sequence on that node, where the prompt is too long
    handed_over: list[HandOver] = field(default_factory=list)  # in the order of time


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the batch is, a few times a second."""

    tokens: int  # arrived at the gateway and kept so far, of finished completions and others
    discarded: int  # tokens thrown away with a lost node or, before this batch, with a lost asker
    members: int  # that may serve it
    waiting: int  # requests that no member has taken
    moves: int = 0  # how often nodes that are of no use yet have got on, or have worked at another policy
    kept: int = 0  # of `tokens`, those that were there when the batch was asked for: made for an earlier asker


@dataclass(frozen=True, slots=True)
class BatchLine:
    """One line of a batch's answer: exactly one field is set. `end` and `error` end the batch."""

    completion: Completion | None = None
    cut: Completion | None = None  # the tokens so far of one that another may go on with
    progress: Progress | None = None
    end: Progress | None = None
    error: str | None = None
