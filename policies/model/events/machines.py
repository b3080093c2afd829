"""What is journalled of machines and of the work on them."""

from __future__ import annotations

from dataclasses import dataclass

from policies.model.pools import Pool
from policies.model.vocabulary import Market, NodePhase, Refusal, Role


@dataclass(frozen=True, slots=True)
class NodeRequested:
    """The intent to have a machine, written before it is asked for."""

    node: str
    role: Role
    slot: str
    incarnation: int
    market: Market
    reason: str
    most_usd_per_h: float = 0.0  # that a machine of its kind may cost; 0: not known
    pool: Pool | None = None  # where it is asked for; None: wherever run.yaml's resources allow
    stand_in: bool = False  # on demand, in place of a spot machine that cannot be had
    disk_usd_per_h: float = 0.0  # on top; 0: its own, or not known


@dataclass(frozen=True, slots=True)
class NodeMoved:
    """A node changed its phase. `refusal` is set when the cloud refused the machine, and when the machine is given
    up because it never served or soon broke. One that is GONE with it was given up first, and never bought."""

    node: str
    phase: NodePhase
    reason: str
    refusal: Refusal | None = None


@dataclass(frozen=True, slots=True)
class BuyingStopped:
    """No more machines of a kind are requested, except one now and then to see whether it works again."""

    kind: str  # vocabulary.kind_of
    reason: str


@dataclass(frozen=True, slots=True)
class BuyingResumed:
    """Machines of a kind are requested again."""

    kind: str


@dataclass(frozen=True, slots=True)
class FleetSized:
    """There are to be so many rollout nodes from now on, in place of `before`: a step is cheapest with them."""

    nodes: int
    before: int
    reason: str


@dataclass(frozen=True, slots=True)
class MachineBought:
    """A node's machine was first seen: where, and at what prices."""

    node: str
    market: Market
    where: str
    price_usd_per_h: float
    on_demand_usd_per_h: float
    pool: Pool | None = None  # where it really is, whatever was asked for; None: its cloud has no pools
    disk_usd_per_h: float | None = None  # of its disk there; None: as when it was asked for


@dataclass(frozen=True, slots=True)
class RebalanceRecommended:
    """The cloud recommends to replace a machine, which it may preempt soon. `reason` says how often that followed
    in the same pool."""

    node: str
    reason: str


@dataclass(frozen=True, slots=True)
class JobExited:
    """The work of a node ended while its machine is up. `attempt` says which run of the work; `reason` is its last
    line, empty where it left none."""

    node: str
    attempt: int
    exit_code: int
    step: int
    reason: str = ""


@dataclass(frozen=True, slots=True)
class JobRestarted:
    """The intent to run a node's work again on the same machine, as `attempt`."""

    node: str
    attempt: int
    reason: str


MachineEvent = (
    NodeRequested
    | NodeMoved
    | BuyingStopped
    | BuyingResumed
    | FleetSized
    | MachineBought
    | RebalanceRecommended
    | JobExited
    | JobRestarted
)
