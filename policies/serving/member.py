"""A member of the gateway's table, the load of a request, and a change of the table."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from grpo_orch.policies.serving.joining import Stage
from grpo_orch.policies.serving.wire import EngineStats

# Slow start: a new member may be cold or broken, so it gets this many requests at first, and one more for each
# that gets its first token. This doubles the limit with every round.
EASE_IN_REQUESTS = 8
# Tokens of requests that move are computed again as prompts, which stalls decoding on their new member. This limit
# is two of vLLM's own steps of 8,192.
REPLAY_TOKENS_MAX = 16_384
KV_FULL = 0.9  # share of an engine's KV cache


@dataclass(frozen=True, slots=True)
class Load:
    """The load that one request puts on its member.

    Args:
        group: shared by the requests of one prompt, or a session.
        tokens: of its prompt and its expected completion.
        replayed: tokens that another member had computed already; 0 for a new request.
        is_turn: whether the group is a session and this is one of its turns.
    """

    group: Hashable
    tokens: int = 1
    replayed: int = 0
    is_turn: bool = False


@dataclass(slots=True)
class Member:
    """One member in one term. Only the table changes it; `gateway_status.MemberStatus` is its public form.

    `is_suspected` is set by a failed request and cleared by the next announcement. `is_unresponsive` is
    set when it does not answer the gateway and cleared when it does, whatever its agent announces. `is_stuck` is
    set when it answers and makes no tokens, and cleared by a token or another policy.
    """

    term: int
    node: str
    boot_id: str
    address: str
    policy: str | None
    max_requests: int
    announced_at_s: float
    target: str = ""  # the policy that it is to hold; empty before any is requested
    is_suspected: bool = False
    is_unresponsive: bool = False
    is_stuck: bool = False
    unfit: str = ""  # why its agent has stopped trying to load the wanted policy
    running: int = 0
    outstanding: int = 0  # tokens of the running requests
    replaying: int = 0  # of these, tokens still to be computed again
    allowed: int = EASE_IN_REQUESTS
    kv_tokens: int = 0
    engine: EngineStats | None = None  # the latest stats
    join_s: dict[str, float] = field(default_factory=dict)
    stage: Stage | None = None
    engines: int = 1

    @property
    def free_slots(self) -> int:
        """How many more requests it may get."""
        return max(0, min(self.allowed, self.max_requests) - self.running)

    @property
    def keeps_session(self) -> bool:
        """Whether it takes one more turn of a session that it has served.

        Slow start does not apply: the member has proved itself to this session. A full engine has lost its cache.
        """
        is_full = self.engine is not None and self.engine.waiting > 0 and self.engine.kv_usage >= KV_FULL
        return self.running < self.max_requests and not is_full

    def has_room(self, load: Load) -> bool:
        """Whether it has room for this load."""
        if not self.free_slots:
            return False
        return not load.replayed or not self.replaying or self.replaying + load.replayed <= REPLAY_TOKENS_MAX


@dataclass(frozen=True, slots=True)
class Change:
    """A change of the table.

    Args:
        nodes: the affected members.
        description: a description for people.
        ended_terms: terms that ended.
        is_new: whether anything changed.
    """

    nodes: tuple[str, ...]
    description: str
    ended_terms: tuple[int, ...] = ()
    is_new: bool = True

    @property
    def reason(self) -> str:
        """The change in one line, as in a MembershipChange."""
        return f"{', '.join(self.nodes)}: {self.description}" if self.nodes else self.description
