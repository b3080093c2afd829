"""The state of a run in the controller: a fold of the journal alone, see `policies.model.fold`."""

from __future__ import annotations

from dataclasses import dataclass, field

from grpo_orch.policies.model.breaker import MachineKind
from grpo_orch.policies.model.events import Diverged, DivergenceSuspected
from grpo_orch.policies.model.phases import LIVE_NODE
from grpo_orch.policies.model.pools import Pool, PoolRecord
from grpo_orch.policies.model.reports import SLOW, STORE, UNREADABLE, Reports
from grpo_orch.policies.model.timelines import Fork, probation_until
from grpo_orch.policies.model.vocabulary import Cause, Market, NodePhase, Role, RollbackStage, RunPhase


@dataclass(frozen=True, slots=True)
class Node:
    """A machine in a slot. `attempt` counts the runs of its work on that machine, from 1."""

    id: str
    role: Role
    slot: str
    incarnation: int
    market: Market
    phase: NodePhase
    since_s: float  # when it entered this phase
    requested_at_s: float
    reason: str = ""
    attempt: int = 1
    price_usd_per_h: float = 0.0  # known once its machine was seen; 0 then means the user's own machine
    on_demand_usd_per_h: float = 0.0
    max_usd_per_h: float = 0.0  # maximum price, used until its price is known
    attempt_ended_at_s: float | None = None  # when this attempt's work ended, until it is restarted
    kind: str = ""  # as requested, see `vocabulary.kind_of`
    served: bool = False  # ever
    pool: Pool | None = None  # as requested; the actual pool once its machine was seen
    arrived_at_s: float | None = None  # when its machine was first seen
    is_fallback: bool = False  # a fallback node: on demand instead of unavailable spot
    disk_usd_per_h: float = 0.0  # list price, from its request on
    rebalance_recommended: bool = False  # by its cloud

    @property
    def may_be_working(self) -> bool:
        """Whether its work has started and was not seen to end."""
        return self.phase in (NodePhase.SERVING, NodePhase.DRAINING) and self.attempt_ended_at_s is None

    @property
    def machine_usd_per_h(self) -> float:
        """Its price or, until that is known, its maximum price."""
        return self.max_usd_per_h if self.arrived_at_s is None else self.price_usd_per_h

    @property
    def usd_per_h(self) -> float:
        """Price of machine and disk."""
        return self.machine_usd_per_h + self.disk_usd_per_h

    def cost_usd(self, now_s: float) -> float:
        """Return its cost since its request."""
        return self.usd_per_h * max(0.0, now_s - self.requested_at_s) / 3600

    def on_demand_cost_usd(self, now_s: float) -> float:
        """Return its cost at the on-demand price, where that is known."""
        machine = self.on_demand_usd_per_h or self.machine_usd_per_h
        return (machine + self.disk_usd_per_h) * max(0.0, now_s - self.requested_at_s) / 3600


@dataclass(frozen=True, slots=True)
class Rollback:
    """A rollback, in progress or passed. `from_step` is the step that the timeline before had reached."""

    fork: Fork
    cause: Cause
    from_step: int
    stage: RollbackStage
    since_s: float  # when it entered this stage
    passed: bool = False

    @property
    def probation_until_step(self) -> int:
        return probation_until(self.from_step, self.fork.start_at)


@dataclass(frozen=True, slots=True)
class Money:
    """The journal's part of the spending, see `policies.fleet.budget`."""

    spent_usd: float = 0.0  # on machines that are gone
    spent_on_demand_usd: float = 0.0  # the same at on-demand prices
    cap_usd: float | None = None  # `budget.usd` as set by a user since; None: run.yaml's
    is_reached: bool = False  # the run stops or has stopped because a cap was reached
    unspent_usd: float = 0.0  # of this, counted for requests that turned out to have bought nothing
    trainer_usd_per_h: float = 0.0  # price of the trainer's last machine, disk included; 0: unknown


@dataclass(frozen=True, slots=True)
class FleetSize:
    """The wanted number of rollout nodes, and since when. None: as many as run.yaml allows."""

    nodes: int | None = None
    at_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Shortages:
    """Since when machines have been missing; None: they are not."""

    spot_since_s: float | None = None  # spot refused or lost rollout machines, and none was stable before
    trainer_since_s: float | None = None  # the trainer has had no machine
    rollout_since_s: float | None = None  # no rollout node has served


@dataclass(frozen=True, slots=True)
class TrainerFailures:
    """Failures of the trainer in a row, without a step of progress between them."""

    count: int = 0
    step: int = -1
    identical: int = 0  # of these, the newest with the same last line
    reason: str = ""  # that line


@dataclass(frozen=True, slots=True)
class RunState:
    """The controller's persistent knowledge of a run."""

    name: str = ""
    phase: RunPhase = RunPhase.STARTING
    reason: str = ""
    epoch: int = 0
    last_event_s: float = 0.0  # time of the last event, on the clock of the controller that journalled it
    nodes: dict[str, Node] = field(default_factory=dict)  # only `fold` changes these four
    slots: dict[str, int] = field(default_factory=dict)  # the number of each slot's incarnations
    kinds: dict[str, MachineKind] = field(default_factory=dict)
    pools: dict[str, PoolRecord] = field(default_factory=dict)  # by a pool's text
    money: Money = field(default_factory=Money)
    size: FleetSize = field(default_factory=FleetSize)
    shortages: Shortages = field(default_factory=Shortages)
    parked_at_s: float | None = None  # None unless it is parked
    reports: Reports = field(default_factory=dict)  # the last of each topic
    commands_taken: frozenset[str] = frozenset()
    gateway_boot_id: str | None = None
    failures: TrainerFailures = field(default_factory=TrainerFailures)
    suspected: DivergenceSuspected | None = None  # a possible divergence on the present timeline
    diverged: Diverged | None = None  # a divergence on the present timeline
    diverged_at_s: float = 0.0
    rollbacks: tuple[Rollback, ...] = ()  # in order; the last may be in progress
    is_proved: bool = False  # a trainer can work with run.yaml: one has trained

    @property
    def is_store_slow(self) -> bool:
        """Whether a checkpoint was postponed and the store has not caught up since."""
        report = self.reports.get(STORE)
        return report is not None and report.state == SLOW

    @property
    def unreadable(self) -> dict[str, str]:
        """Objects of the store that could not be read, with the reasons."""
        found = {name: report.state for name, report in self.reports.items() if name.startswith(f"{UNREADABLE} ")}
        return {name.removeprefix(f"{UNREADABLE} "): reason for name, reason in found.items()}

    @property
    def rollback(self) -> Rollback | None:
        """The rollback in progress, probation included."""
        return self.rollbacks[-1] if self.rollbacks and not self.rollbacks[-1].passed else None

    @property
    def forks(self) -> tuple[Fork, ...]:
        """The forks known to be in the store, in order."""
        return tuple(rollback.fork for rollback in self.rollbacks if rollback.stage is not RollbackStage.BEGUN)

    @property
    def timeline(self) -> int:
        """The present timeline."""
        return self.forks[-1].timeline if self.forks else 0

    @property
    def trainer_machines(self) -> list[Node]:
        """The trainer's nodes with a machine that is not terminating."""
        return [node for node in self.live(Role.TRAINER) if node.phase is not NodePhase.REQUESTED]

    def live(self, role: Role) -> list[Node]:
        """Return the nodes of a role that are wanted or working, in slot order."""
        live = [node for node in self.nodes.values() if node.role is role and node.phase in LIVE_NODE]
        return sorted(live, key=lambda node: node.id)
