"""The status of the gateway and its members, which it writes to the run's store for all other processes."""

from __future__ import annotations

from dataclasses import dataclass, field

from grpo_orch.policies.serving.joining import JoiningNode, Stage
from grpo_orch.policies.serving.wire import EngineStats


@dataclass(frozen=True, slots=True)
class MemberStatus:
    """A member, as other processes see it."""

    node: str
    boot_id: str
    address: str
    policy: str | None
    serving: bool  # holds the wanted policy and is not leaving
    draining: bool
    requests_running: int
    seen_s_ago: float
    # The rest as its agent announced it.
    unfit: str = ""  # why it cannot hold the wanted policy
    max_requests: int = 0  # at a time
    kv_tokens: int = 0
    engine: EngineStats | None = None
    join_s: dict[str, float] = field(default_factory=dict)
    stage: Stage | None = None
    engines: int = 1  # of its machine


@dataclass(frozen=True, slots=True)
class MembershipChange:
    """A change of the membership. `seq` counts from 1, `at_s` from the gateway's start.

    `reason` is `NODE, ...: WHAT`. Names contain no blanks or commas; WHAT is for people.
    """

    seq: int
    at_s: float
    reason: str

    @property
    def nodes(self) -> list[str]:
        """The affected members."""
        return self.reason.partition(": ")[0].split(", ")

    @property
    def description(self) -> str:
        """The description, on one line."""
        return " ".join(self.reason.partition(": ")[2].split())


@dataclass(frozen=True, slots=True)
class VersionSpread:
    """How a policy reached the nodes that were members when it was first wanted.

    Values measured by nodes are the maximum over these.
    """

    policy: str  # its label
    members: int
    ready: int = 0  # members that hold it
    first_ready_s: float = 0.0  # since it was wanted
    last_ready_s: float = 0.0
    fetch_s: float = 0.0
    fetched_bytes: int = 0
    load_s: float = 0.0


@dataclass(frozen=True, slots=True)
class GatewayStatus:
    """The gateway's status. Counters and `up_s` are since its start; `changes` are the newest ones, oldest first.

    `seq` grows with each write. Readers have other clocks, and a `seq` that has grown between two reads proves
    that the gateway was alive between them.
    """

    boot_id: str
    policy: str | None
    members: list[MemberStatus] = field(default_factory=list)
    requests_waiting: int = 0
    tokens_delivered: int = 0
    tokens_discarded: int = 0
    handovers: int = 0
    seq: int = 0
    up_s: float = 0.0
    tokens_saved: int = 0  # kept when their request was handed over
    tokens_replayed: int = 0  # computed again as a prompt, for requests that were handed over
    changes: list[MembershipChange] = field(default_factory=list)
    versions: list[VersionSpread] = field(default_factory=list)  # the newest, oldest first
    joining: list[JoiningNode] = field(default_factory=list)
