"""What one look at the world found, and what a decision may ask to be done."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from policies.costs.steps import StepShape
from policies.detect.divergence import Verdict
from policies.detect.pitfalls import Pitfall
from policies.model.events import Event
from policies.model.pools import Pool, PoolOffer
from policies.model.state import Node
from policies.model.timelines import Fork
from policies.model.vocabulary import (
    MachineState,
    Market,
    PolicyVersion,
    Precedence,
    Refusal,
    machine_of,
    precedence_of,
)
from policies.serving.gateway_status import MemberStatus
from policies.serving.joining import Coming, Stage

HEARTBEAT_FRESH_S = 10.0  # the trainer beats every 2 s
BEFORE_TRAINING = frozenset({"starting", "restoring"})  # activities of a trainer that does not train yet
OWN_GENERATION = "generating by itself"  # of one that replaces rollout nodes
GENERATING = "generating"  # nodes make what it requests
GENERATES = frozenset({GENERATING, "waiting", OWN_GENERATION})


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine as its cloud describes it. `exit_code` is set once the work of `attempt` has ended."""

    node: str
    state: MachineState
    attempt: int = 1
    exit_code: int | None = None
    why: str = ""
    notice: bool = False  # the cloud has said that it will take this machine back
    market: Market = Market.ON_DEMAND
    price_usd_per_h: float = 0.0
    on_demand_usd_per_h: float = 0.0  # what it would cost on that market
    where: str = ""  # cloud/region/zone and what it is, in the cloud's words
    pool: Pool | None = None  # the same, in parts; None: its cloud has no pools
    rebalance_recommended: bool = False  # by the cloud: it may preempt the machine soon
    exit_reason: str = ""  # the last line of the work that ended; empty where it left none


@dataclass(frozen=True, slots=True)
class Trainer:
    """The trainer's last heartbeat in the store."""

    node: str
    attempt: int
    timeline: int
    step: int
    max_steps: int
    activity: str  # starting, restoring, waiting, generating, OWN_GENERATION, training, storing, done
    beat_at_s: float
    kl: float | None = None
    stored_step: int | None = None  # of the newest checkpoint in the store
    store_slow: bool = False  # a checkpoint was put off: earlier ones are still being stored
    verdict: Verdict | None = None  # of the trainer's own guard
    leaving: bool = False  # it knows that it or its machine is to end, and stores what it has
    stage: Stage | None = None  # of what it fetches before it trains, or stores before it ends

    @property
    def precedence(self) -> Precedence:
        """Of two trainers of a run the one with the higher precedence is the newer, and the other stops."""
        return precedence_of(self.timeline, self.node, self.attempt)


@dataclass(frozen=True, slots=True)
class LaunchRefused:
    """A launch that failed since the last look. `left`: it left a machine, which is paid for until it is gone."""

    node: str
    refusal: Refusal
    message: str
    left: bool = False


@dataclass(frozen=True, slots=True)
class Command:
    """What a user asked for through the store: `down`, `down_now`, `rollback`."""

    command_id: str
    kind: str
    start: str | None = None  # rollback: to which PolicyVersion, or `start`; None: where the policy would go
    changes: Mapping[str, float] = field(default_factory=dict)  # rollback: of `grpo`; none: as the policy would


@dataclass(frozen=True, slots=True)
class Watched:
    """What the controller's own detectors say of the rows that a timeline's trainer has stored."""

    timeline: int
    verdict: Verdict
    pitfalls: tuple[Pitfall, ...] = ()  # noticed at the newest rows


@dataclass(frozen=True, slots=True)
class Gateway:
    """The gateway's process. `heard_s`: for how long without a break, where it is heard now; `silent_s`: for how
    long it was not heard, where it is not."""

    boot_id: str | None = None
    age_s: float = 0.0
    heard_s: float = math.inf
    silent_s: float = math.inf


@dataclass(frozen=True, slots=True)
class Stored:
    """The run's store, as far as there was a reason to look."""

    checkpoints: tuple[PolicyVersion, ...] | None = None  # None: there was no reason to look, or `damaged`
    damaged: str = ""  # why the list of checkpoints cannot be read, and what helps
    ever_stored: bool = False  # the store has ever listed a checkpoint; known where `checkpoints` is
    timeline: int = 0  # the newest
    exported_to: str | None = None  # where the requested export lies, once it is done; "": it failed
    unreadable: Mapping[str, str] = field(default_factory=dict)  # optional objects that are damaged: why


@dataclass(frozen=True, slots=True)
class Measured:
    """What the newest steps consist of; None before enough were made."""

    step: StepShape | None = None  # with nodes
    own_step: StepShape | None = None  # whose completions the trainer made, as if by one node


@dataclass(frozen=True, slots=True)
class ControllerCost:
    """What the machine of a `--remote` daemon costs: so far, and an hour."""

    usd: float = 0.0
    usd_per_h: float = 0.0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One look at the world. `machines` or `members` is None when that party did not answer: then nothing
    may be concluded from an absence.

    `now_s` never goes back or jumps while one controller runs. For the last `steady_s` seconds the controller has
    read store and cloud, and written, without a break: nobody can be called silent for longer.
    """

    now_s: float
    machines: Mapping[str, Machine] | None = None
    members: Mapping[str, MemberStatus] | None = None
    coming: Mapping[str, Coming] = field(default_factory=dict)  # nodes that are no members yet, as far as heard
    gateway: Gateway = Gateway()
    trainer: Trainer | None = None
    trainer_moved_at_s: float = -math.inf  # when what its machine fetches or stores last got on
    stepped_at_s: float = -math.inf  # when the step that it is at was first seen
    refused: tuple[LaunchRefused, ...] = ()
    commands: tuple[Command, ...] = ()
    watched: Watched | None = None
    # By `kind_of`: the most that a machine of the kind may cost an hour. None: not known yet, or not asked for.
    prices: Mapping[str, float] | None = None
    # Where machines may be bought, on either market. Empty: there is nothing to choose; None: not known yet.
    pools: tuple[PoolOffer, ...] | None = ()
    prices_trouble: str = ""  # why either is not known though it was asked again and again
    controller: ControllerCost = ControllerCost()
    measured: Measured = Measured()
    store: Stored = Stored()
    steady_s: float = math.inf

    # The machines of `members`, told once: a fleet of thousands asks of each.
    _member_machines: frozenset[str] = field(init=False, repr=False, compare=False, default=frozenset())

    def __post_init__(self) -> None:
        object.__setattr__(self, "_member_machines", frozenset(machine_of(name) for name in self.members or ()))

    def heartbeat_of(self, node: Node) -> Trainer | None:
        """The last heartbeat, if the present attempt of the node's work made it."""
        beat = self.trainer
        return beat if beat is not None and (beat.node, beat.attempt) == (node.id, node.attempt) else None

    def is_member(self, node: Node) -> bool:
        """Whether an engine of the machine is in the membership."""
        return node.id in self._member_machines

    def exit_code_of(self, node: Node) -> int | None:
        """What the present attempt of the node's work has ended with."""
        machine = (self.machines or {}).get(node.id)
        return machine.exit_code if machine is not None and machine.attempt == node.attempt else None

    def exit_reason_of(self, node: Node) -> str:
        """Return the last line of the present attempt of the node's work; empty where it left none."""
        machine = (self.machines or {}).get(node.id)
        return machine.exit_reason if machine is not None and machine.attempt == node.attempt else ""

    def silent_s(self, since_s: float) -> float:
        """Seconds since then in which the controller would have noticed a word."""
        return min(self.now_s - since_s, self.steady_s)

    def trainer_only_silent_s(self, since_s: float) -> float:
        """The same, of the trainer, in which its machine has worked and reached the store, as the gateway on it
        shows. After both were cut off the gateway may be the first that is heard."""
        return 0.0 if self.members is None else min(self.silent_s(since_s), self.gateway.heard_s)

    def machine_silent_s(self, since_s: float) -> float:
        """The same, of the trainer's machine: since then neither the trainer nor the gateway was heard."""
        return 0.0 if self.members is not None else min(self.silent_s(since_s), self.gateway.silent_s)


@dataclass(frozen=True, slots=True)
class Launch:
    """Make sure that the machine exists and that attempt `attempt` of its work was started. Idempotent."""

    node: str
    slot: str
    market: Market
    attempt: int
    timeline: int = 0
    pool: Pool | None = None  # there and nowhere else; None: wherever run.yaml's resources allow


@dataclass(frozen=True, slots=True)
class Terminate:
    """Make sure that the machine is gone. Idempotent."""

    node: str


@dataclass(frozen=True, slots=True)
class Confirm:
    """Ask the cloud about a machine whose work has fallen silent: it may be gone. Idempotent."""

    node: str


@dataclass(frozen=True, slots=True)
class AskToStop:
    """Make sure that the trainer of that attempt knows it is to store what it has and end. Idempotent."""

    node: str
    attempt: int


@dataclass(frozen=True, slots=True)
class WriteFork:
    """Make sure that the fork is in the store. Idempotent."""

    fork: Fork


@dataclass(frozen=True, slots=True)
class Export:
    """Make sure that the checkpoint's weights are exported. Idempotent."""

    version: str  # PolicyVersion as text


Action = Launch | Terminate | Confirm | AskToStop | WriteFork | Export


@dataclass(frozen=True, slots=True)
class Decision:
    """What one tick decided: events to journal first, then actions, and a sentence that says why."""

    events: tuple[Event, ...] = ()
    actions: tuple[Action, ...] = ()
    requeue_after_s: float = 1.0
    reason: str = ""
