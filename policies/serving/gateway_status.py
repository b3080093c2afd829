"""The status of the gateway and its members, which it writes to the run's store for all other processes.

`describe` shows the members as the API, the command line and the metrics do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

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
    changes: list[MembershipChange] = field(default_factory=list)
    versions: list[VersionSpread] = field(default_factory=list)  # the newest, oldest first
    joining: list[JoiningNode] = field(default_factory=list)


class State(StrEnum):
    """A member's state, as the gateway sees it."""

    SERVING = "serving"
    DRAINING = "draining"
    SUSPECTED = "suspected"  # holds the wanted policy, but a request failed there, or it does not answer
    BEHIND = "behind"  # does not hold the wanted policy yet
    UNFIT = "unfit"  # cannot hold the wanted policy, and has stopped trying


@dataclass(frozen=True, slots=True)
class MemberLine:
    """One member, with a state in one word and its last change.

    Its JSON is the public format of `GET /members` and `members ls`; MemberStatus is the internal one.
    """

    node: str
    state: State
    reason: str  # the last change; empty if it is no longer recorded
    policy: str | None
    address: str
    boot_id: str
    requests_running: int
    seen_s_ago: float
    unfit: str  # why it cannot hold the wanted policy; empty if it can


def state_of(member: MemberStatus, wanted: str | None) -> State:
    """Return the member's state. `wanted` is the label of the policy that members are to hold."""
    if member.draining:
        return State.DRAINING
    if member.serving:
        return State.SERVING
    if wanted is not None and member.policy == wanted:
        return State.SUSPECTED
    return State.UNFIT if member.unfit else State.BEHIND


def describe(
    members: Sequence[MemberStatus], changes: Sequence[MembershipChange], wanted: str | None
) -> list[MemberLine]:
    """Describe the members, in their order."""
    last_changes = {node: change.description for change in changes for node in change.nodes}
    return [
        MemberLine(
            node=member.node,
            state=state_of(member, wanted),
            reason=f"unfit: {member.unfit}" if member.unfit else last_changes.get(member.node, ""),
            policy=member.policy,
            address=member.address,
            boot_id=member.boot_id,
            requests_running=member.requests_running,
            seen_s_ago=member.seen_s_ago,
            unfit=member.unfit,
        )
        for member in members
    ]
