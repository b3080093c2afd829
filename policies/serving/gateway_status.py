"""What the gateway writes to the run's store about itself and its members, for all who are not the gateway."""

from __future__ import annotations

from dataclasses import dataclass, field

from policies.serving.joining import Coming, Stage
from policies.serving.wire import EngineWord


@dataclass(frozen=True, slots=True)
class MemberStatus:
    """A member of the gateway, for all who are not the gateway: in the run's store, and for the controller."""

    node: str
    boot_id: str
    address: str
    policy: str | None
    serving: bool  # holds the wanted policy and is not leaving
    draining: bool
    requests_running: int
    seen_s_ago: float
    unfit: str = ""  # why it cannot hold the wanted policy, as its agent says
    max_requests: int = 0  # at a time, as its engine says
    kv_tokens: int = 0
    engine: EngineWord | None = None
    join_s: dict[str, float] = field(default_factory=dict)  # as its agent says
    stage: Stage | None = None  # as its agent says
    engines: int = 1  # of its machine, as its agent says


@dataclass(frozen=True, slots=True)
class MembershipChange:
    """Something that happened to the table. `seq` counts from 1, `at_s` from the gateway's start.

    `reason` is `NODE, ...: WHAT`: names have neither blanks nor commas, and WHAT is for people.
    """

    seq: int
    at_s: float
    reason: str

    @property
    def nodes(self) -> list[str]:
        """To whom it happened."""
        return self.reason.partition(": ")[0].split(", ")

    @property
    def what(self) -> str:
        """In words, on one line."""
        return " ".join(self.reason.partition(": ")[2].split())


@dataclass(frozen=True, slots=True)
class VersionSpread:
    """How a policy came to those who were members when it was first wanted. What a node says of itself is here the
    most that any of them did."""

    policy: str  # its label
    members: int
    ready: int = 0  # of them that have come to hold it
    first_ready_s: float = 0.0  # since it was wanted
    last_ready_s: float = 0.0
    fetch_s: float = 0.0
    fetched_bytes: int = 0
    load_s: float = 0.0


@dataclass(frozen=True, slots=True)
class GatewayStatus:
    """What the gateway knows, as it writes it to the store. Counters and `up_s` are since its own start; `changes`
    are the last ones of the membership, the oldest first.

    `seq` grows with each write. Readers have other clocks: a number that has grown between two looks proves that
    the gateway was alive between them.
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
    versions: list[VersionSpread] = field(default_factory=list)  # the last, the oldest first
    coming: list[Coming] = field(default_factory=list)
