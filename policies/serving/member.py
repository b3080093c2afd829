"""One member of the gateway's table, what a request costs it, and what a change of it is."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from policies.serving.joining import Stage
from policies.serving.wire import EngineWord

# A new member may be cold, or not work at all: it gets so many requests first, and one more for each that gets its
# first token, which doubles them with every round.
EASE_IN_REQUESTS = 8
# The tokens of requests that are handed over are computed again as prompts, which stalls whoever decodes there. So
# many at a time are two of vLLM's own steps of 8,192.
REPLAY_TOKENS_MAX = 16_384
KV_FULL = 0.9  # of an engine's room for keys and values


@dataclass(frozen=True, slots=True)
class Load:
    """What one request means for the member that gets it.

    Args:
        group: what the requests of one prompt have in common.
        tokens: its prompt and what is expected to come.
        replayed: how many of them another member had computed already; 0 for a new request.
        is_turn: the group is a session, and this one of its turns.
    """

    group: Hashable
    tokens: int = 1
    replayed: int = 0
    is_turn: bool = False


@dataclass(slots=True)
class Row:
    """One member, in one term: the table's own state, which the table alone changes. What others are told of it is
    `policies.serving.gateway_status.MemberStatus`, whose shape is that of the runs' stores.

    `doubted` is set by a failed request and cleared by the next announcement; `mute` is set when it does not
    answer the gateway, whatever its agent says, and cleared when it does; `stuck` is set when it answers and makes
    no token, and cleared by a token or another policy.
    """

    term: int
    node: str
    boot_id: str
    address: str
    policy: str | None
    max_requests: int
    seen_at_s: float
    target: str = ""  # the policy that it is to hold; empty before any is asked for
    doubted: bool = False
    mute: bool = False
    stuck: bool = False
    unfit: str = ""  # why its agent has stopped trying to load what is wanted
    running: int = 0
    outstanding: int = 0  # tokens of the requests that run
    replaying: int = 0  # of them those that are still to be computed again
    allowed: int = EASE_IN_REQUESTS
    kv_tokens: int = 0
    engine: EngineWord | None = None  # the last
    join_s: dict[str, float] = field(default_factory=dict)
    stage: Stage | None = None
    engines: int = 1

    @property
    def places(self) -> int:
        """For how many more requests there is room."""
        return max(0, min(self.allowed, self.max_requests) - self.running)

    @property
    def keeps_session(self) -> bool:
        """Whether it takes one more turn of a session that it has had: a member that is new to others has proved
        itself to that one, and only an engine that is full cannot have the session's tokens any more."""
        full = self.engine is not None and self.engine.waiting > 0 and self.engine.kv_usage >= KV_FULL
        return self.running < self.max_requests and not full

    def takes(self, load: Load) -> bool:
        """Whether there is room for it."""
        if not self.places:
            return False
        return not load.replayed or not self.replaying or self.replaying + load.replayed <= REPLAY_TOKENS_MAX


@dataclass(frozen=True, slots=True)
class Change:
    """What an occurrence did to the table.

    Args:
        nodes: to whom it happened.
        what: in words, for people.
        ended: terms.
        news: whether anything is different now.
    """

    nodes: tuple[str, ...]
    what: str
    ended: tuple[int, ...] = ()
    news: bool = True

    @property
    def reason(self) -> str:
        """All of it in one line, as a MembershipChange has it."""
        return f"{', '.join(self.nodes)}: {self.what}" if self.nodes else self.what
