"""The snapshot of a run's environment, and the actions of a decision."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from grpo_orch.policies.costs.steps import StepShape
from grpo_orch.policies.detect.divergence import Verdict
from grpo_orch.policies.detect.pitfalls import Pitfall
from grpo_orch.policies.model.events import Event
from grpo_orch.policies.model.pools import Pool, PoolOffer
from grpo_orch.policies.model.state import Node
from grpo_orch.policies.model.timelines import Fork
from grpo_orch.policies.model.vocabulary import (
    MachineState,
    Market,
    PolicyVersion,
    Precedence,
    Refusal,
    machine_of,
    precedence_of,
)
from grpo_orch.policies.serving.gateway_status import MemberStatus
from grpo_orch.policies.serving.joining import JoiningNode, Stage

HEARTBEAT_FRESH_S = 10.0  # the trainer sends a heartbeat every 2 s
BEFORE_TRAINING = frozenset({"starting", "restoring"})  # activities of a trainer that does not train yet
GENERATES = frozenset({"generating", "waiting"})  # activities of a trainer that needs rollout nodes now


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine as its cloud describes it. `exit_code` is set once the work of `attempt` has ended."""

    node: str
    state: MachineState
    attempt: int = 1
    exit_code: int | None = None
    reason: str = ""
    notice: bool = False  # it has a preemption notice
    market: Market = Market.ON_DEMAND
    price_usd_per_h: float = 0.0
    on_demand_usd_per_h: float = 0.0  # its price on that market
    where: str = ""  # cloud/region/zone and instance type, by the cloud's names
    pool: Pool | None = None  # the same, in parts; None: its cloud has no pools
    rebalance_recommended: bool = False  # by the cloud, which may preempt the machine soon
    exit_reason: str = ""  # the last line of the work that ended; empty: none


@dataclass(frozen=True, slots=True)
class Trainer:
    """The trainer's last heartbeat in the store."""

    node: str
    attempt: int
    timeline: int
    step: int
    max_steps: int
    activity: str  # starting, restoring, waiting, generating, training, storing, done
    beat_at_s: float
    kl: float | None = None
    stored_step: int | None = None  # of the newest checkpoint in the store
    store_slow: bool = False  # a checkpoint is postponed, because earlier ones are still being stored
    verdict: Verdict | None = None  # of the trainer's own detector
    leaving: bool = False  # it or its machine is about to end, and it stores its state
    stage: Stage | None = None  # of a download before it trains, or an upload before it ends

    @property
    def precedence(self) -> Precedence:
        """The newer of two trainers of a run has the higher precedence; the other one stops."""
        return precedence_of(self.timeline, self.node, self.attempt)


@dataclass(frozen=True, slots=True)
class LaunchRefused:
    """A launch that failed since the last snapshot. `machine_exists`: it left one that costs until it is gone."""

    node: str
    refusal: Refusal
    message: str
    machine_exists: bool = False


@dataclass(frozen=True, slots=True)
class Command:
    """A user's command in the store: `down`, `down_now`, `rollback`, `budget`."""

    command_id: str
    kind: str
    start: str | None = None  # rollback: a PolicyVersion, or `start`; None: the automatic target
    changes: Mapping[str, float] = field(default_factory=dict)  # rollback: of `grpo`; empty: the automatic ones


@dataclass(frozen=True, slots=True)
class ControllerVerdict:
    """The verdict of the controller's own detectors on a timeline's stored rows."""

    timeline: int
    verdict: Verdict
    pitfalls: tuple[Pitfall, ...] = ()  # in the newest rows


@dataclass(frozen=True, slots=True)
class Gateway:
    """The gateway's process.

    `contact_s`: for how long it has been in contact without a break. `silent_s`: for how long it has not, if it is
    not in contact now.
    """

    boot_id: str | None = None
    age_s: float = 0.0
    contact_s: float = math.inf
    silent_s: float = math.inf


@dataclass(frozen=True, slots=True)
class Stored:
    """The run's store, as far as it was read."""

    checkpoints: tuple[PolicyVersion, ...] | None = None  # None: not read, or `damaged`
    damaged: str = ""  # why the list of checkpoints cannot be read, and the fix
    ever_stored: bool = False  # the store has ever listed a checkpoint; known if `checkpoints` is
    timeline: int = 0  # the newest
    unreadable: Mapping[str, str] = field(default_factory=dict)  # damaged optional objects, with the reasons


@dataclass(frozen=True, slots=True)
class ControllerCost:
    """Cost of the machine of a `--remote` daemon: so far, and an hour."""

    usd: float = 0.0
    usd_per_h: float = 0.0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The observed state of a run's environment.

    `machines` or `members` is None when the cloud or the gateway did not answer: then an absence means nothing.

    `now_s` never goes back or jumps while one controller runs. For the last `steady_s` seconds the controller has
    read store and cloud, and written, without a break: no silence can be known to be longer.
    """

    now_s: float
    machines: Mapping[str, Machine] | None = None
    members: Mapping[str, MemberStatus] | None = None
    joining: Mapping[str, JoiningNode] = field(default_factory=dict)  # known joining nodes
    gateway: Gateway = Gateway()
    trainer: Trainer | None = None
    trainer_moved_at_s: float = -math.inf  # last progress of its machine's downloads and uploads
    refused: tuple[LaunchRefused, ...] = ()
    commands: tuple[Command, ...] = ()
    verdict: ControllerVerdict | None = None
    # Maximum price an hour by `kind_of`. None: not known yet, or not needed.
    prices: Mapping[str, float] | None = None
    # Where machines may be bought, on either market. Empty: there is no choice; None: not known yet.
    pools: tuple[PoolOffer, ...] | None = ()
    prices_trouble: str = ""  # why either is still unknown after several tries
    controller: ControllerCost = ControllerCost()
    step_shape: StepShape | None = None  # measured, of the newest steps; None: before there are enough
    store: Stored = Stored()
    steady_s: float = math.inf

    # The machines of `members`, computed once for fleets of thousands.
    _member_machines: frozenset[str] = field(init=False, repr=False, compare=False, default=frozenset())

    def __post_init__(self) -> None:
        object.__setattr__(self, "_member_machines", frozenset(machine_of(name) for name in self.members or ()))

    def heartbeat_of(self, node: Node) -> Trainer | None:
        """Return the last heartbeat, if the present attempt of the node's work sent it."""
        beat = self.trainer
        return beat if beat is not None and (beat.node, beat.attempt) == (node.id, node.attempt) else None

    def is_member(self, node: Node) -> bool:
        """Whether an engine of the machine is in the membership."""
        return node.id in self._member_machines

    def exit_code_of(self, node: Node) -> int | None:
        """Return the exit code of the present attempt of the node's work; None while it runs."""
        machine = (self.machines or {}).get(node.id)
        return machine.exit_code if machine is not None and machine.attempt == node.attempt else None

    def exit_reason_of(self, node: Node) -> str:
        """Return the last line of the present attempt of the node's work; empty: none."""
        machine = (self.machines or {}).get(node.id)
        return machine.exit_reason if machine is not None and machine.attempt == node.attempt else ""

    def silent_s(self, since_s: float) -> float:
        """Return the seconds since then in which the controller would have noticed activity."""
        return min(self.now_s - since_s, self.steady_s)

    def trainer_only_silent_s(self, since_s: float) -> float:
        """Return the trainer's silence while the gateway shows that its machine works and reaches the store.

        After both were cut off, the gateway may be back first.
        """
        return 0.0 if self.members is None else min(self.silent_s(since_s), self.gateway.contact_s)

    def machine_silent_s(self, since_s: float) -> float:
        """Return the silence of the trainer's whole machine, the gateway included."""
        return 0.0 if self.members is not None else min(self.silent_s(since_s), self.gateway.silent_s)


@dataclass(frozen=True, slots=True)
class Launch:
    """Ensure that the machine exists and that attempt `attempt` of its work was started. Idempotent."""

    node: str
    slot: str
    market: Market
    attempt: int
    timeline: int = 0
    pool: Pool | None = None  # only there; None: wherever run.yaml's resources allow


@dataclass(frozen=True, slots=True)
class Terminate:
    """Ensure that the machine is gone. Idempotent."""

    node: str


@dataclass(frozen=True, slots=True)
class Confirm:
    """Check with the cloud whether a machine with silent work is gone. Idempotent."""

    node: str


@dataclass(frozen=True, slots=True)
class RequestStop:
    """Ensure that the trainer of that attempt is requested to store its state and end. Idempotent."""

    node: str
    attempt: int


@dataclass(frozen=True, slots=True)
class WriteFork:
    """Ensure that the fork is in the store. Idempotent."""

    fork: Fork


Action = Launch | Terminate | Confirm | RequestStop | WriteFork


@dataclass(frozen=True, slots=True)
class Decision:
    """The decision of one tick: events to journal first, then actions, and a sentence with the reason."""

    events: tuple[Event, ...] = ()
    actions: tuple[Action, ...] = ()
    requeue_after_s: float = 1.0
    reason: str = ""
