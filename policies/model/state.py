"""What the controller knows of a run: a fold of the journal, and of nothing else: `policies.model.fold`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from policies.model.buying import MachineKind
from policies.model.events import Diverged, DivergenceWatched
from policies.model.phases import LIVE_NODE
from policies.model.pools import Pool, PoolRecord
from policies.model.reports import ASIDE, BY_TRAINER, GENERATION, SLOW, STORE, Reports
from policies.model.timelines import Fork, probation_until
from policies.model.vocabulary import Cause, Market, NodePhase, Refusal, Role, RollbackStage, RunPhase


@dataclass(frozen=True, slots=True)
class Node:
    """One machine in one slot. `attempt` counts the runs of its work on that machine, from 1."""

    id: str
    role: Role
    slot: str
    incarnation: int
    market: Market
    phase: NodePhase
    since_s: float  # when it came into this phase
    requested_at_s: float
    reason: str = ""
    attempt: int = 1
    price_usd_per_h: float = 0.0  # known once its machine was seen; then 0 is a machine of one's own
    on_demand_usd_per_h: float = 0.0
    most_usd_per_h: float = 0.0  # that it may cost, until its price is known
    attempt_ended_at_s: float | None = None  # when this attempt's work ended, until it is restarted
    kind: str = ""  # what was asked for, `vocabulary.kind_of`
    served: bool = False  # ever
    pool: Pool | None = None  # where it was asked for; once its machine was seen, where that is
    came_at_s: float | None = None  # when its machine was seen in its pool
    stand_in: bool = False  # on demand, in place of a spot machine that cannot be had
    disk_usd_per_h: float = 0.0  # by list price, from its request on
    rebalance_recommended: bool = False  # its cloud gave a rebalance recommendation

    @property
    def may_be_working(self) -> bool:
        """Whether its work was seen, and has not been seen to end since."""
        return self.phase in (NodePhase.SERVING, NodePhase.DRAINING) and self.attempt_ended_at_s is None

    @property
    def machine_usd_per_h(self) -> float:
        """Its price or, until that is known, the most that it may be."""
        return self.most_usd_per_h if self.came_at_s is None else self.price_usd_per_h

    @property
    def usd_per_h(self) -> float:
        """The same, its disk included."""
        return self.machine_usd_per_h + self.disk_usd_per_h

    def cost_usd(self, now_s: float) -> float:
        """What it has cost, from its request on."""
        return self.usd_per_h * max(0.0, now_s - self.requested_at_s) / 3600

    def on_demand_cost_usd(self, now_s: float) -> float:
        """What it would have cost on demand, where that price is known."""
        machine = self.on_demand_usd_per_h or self.machine_usd_per_h
        return (machine + self.disk_usd_per_h) * max(0.0, now_s - self.requested_at_s) / 3600


@dataclass(frozen=True, slots=True)
class Slot:
    """What outlives the incarnations of a place: how many there were, and how launching it has gone lately."""

    incarnations: int = 0
    job_restarts: int = 0
    refusals_in_a_row: int = 0
    refused_at_s: float = 0.0
    last_refusal: Refusal | None = None


@dataclass(frozen=True, slots=True)
class Rollback:
    """One rollback: under way, or passed. `from_step` is how far the timeline before had come."""

    fork: Fork
    cause: Cause
    from_step: int
    stage: RollbackStage
    since_s: float  # when it came into this stage
    passed: bool = False

    @property
    def probation_until_step(self) -> int:
        return probation_until(self.from_step, self.fork.start_at)


@dataclass(frozen=True, slots=True)
class Money:
    """What was spent, as far as the journal has it: `policies.fleet.budget`."""

    spent_usd: float = 0.0  # on machines that are gone
    spent_on_demand_usd: float = 0.0  # what they would have cost on demand
    cap_usd: float | None = None  # `budget.usd` as a user has set it since; None: run.yaml's
    is_reached: bool = False  # the cap, which is why the run stops or has stopped
    unspent_usd: float = 0.0  # counted until then for requests that turned out to have bought nothing
    trainer_usd_per_h: float = 0.0  # what the trainer's last machine cost, disk included; 0: not known


@dataclass(frozen=True, slots=True)
class FleetSize:
    """How many rollout nodes there are to be, and since when. None: as many as run.yaml allows."""

    nodes: int | None = None
    at_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Shortages:
    """Since when machines have been missing; None: they are not."""

    spot_since_s: float | None = None  # rollout machines on spot were refused or lost, and none held before
    trainer_since_s: float | None = None  # there has been no machine for the trainer
    rollout_since_s: float | None = None  # no rollout node has served


@dataclass(frozen=True, slots=True)
class TrainerFailures:
    """Exits of the trainer in a row, without one step of progress between them."""

    count: int = 0
    step: int = -1
    alike: int = 0  # of these failures, the last ones with one and the same last line
    reason: str = ""  # that line


@dataclass(frozen=True, slots=True)
class RunState:
    """Everything the controller knows that it must not forget."""

    name: str = ""
    phase: RunPhase = RunPhase.STARTING
    reason: str = ""
    epoch: int = 0
    told_s: float = 0.0  # time of the last event, on the clock of the controller that journalled it
    nodes: Mapping[str, Node] = field(default_factory=lambda: MappingProxyType({}))
    slots: Mapping[str, Slot] = field(default_factory=lambda: MappingProxyType({}))
    kinds: Mapping[str, MachineKind] = field(default_factory=lambda: MappingProxyType({}))
    pools: Mapping[str, PoolRecord] = field(default_factory=lambda: MappingProxyType({}))  # by a pool's text
    money: Money = field(default_factory=Money)
    size: FleetSize = field(default_factory=FleetSize)
    shortages: Shortages = field(default_factory=Shortages)
    parked_at_s: float | None = None  # while it is parked
    reports: Reports = field(default_factory=lambda: MappingProxyType({}))  # the last of each topic
    commands_taken: frozenset[str] = frozenset()
    gateway_boot_id: str | None = None
    failures: TrainerFailures = field(default_factory=TrainerFailures)
    watched: DivergenceWatched | None = None  # what is off on the present timeline
    diverged: Diverged | None = None  # what has tripped on the present timeline
    diverged_at_s: float = 0.0
    rollbacks: tuple[Rollback, ...] = ()  # in order; the last one may be under way
    healthy: str | None = None  # the last healthy checkpoint of a run that ended diverged, PolicyVersion as text
    exported: str | None = None  # that checkpoint, once its weights are exported
    proved_at_s: float | None = None  # when a trainer first came as far as training

    @property
    def is_proved(self) -> bool:
        """Whether a trainer can work with run.yaml: one has come as far as training."""
        return self.proved_at_s is not None

    @property
    def own_generation_since_s(self) -> float | None:
        """Since when the trainer makes the completions, because no rollout node is there; None: it does not."""
        report = self.reports.get(GENERATION)
        return report.at_s if report is not None and report.state == BY_TRAINER else None

    @property
    def is_store_slow(self) -> bool:
        """Whether a checkpoint was put off, and none has found room since."""
        report = self.reports.get(STORE)
        return report is not None and report.state == SLOW

    @property
    def set_aside(self) -> dict[str, str]:
        """What of the store could not be read, and why."""
        found = {name: report.state for name, report in self.reports.items() if name.startswith(f"{ASIDE} ")}
        return {name.removeprefix(f"{ASIDE} "): why for name, why in found.items()}

    @property
    def rollback(self) -> Rollback | None:
        """The one under way, probation included."""
        return self.rollbacks[-1] if self.rollbacks and not self.rollbacks[-1].passed else None

    @property
    def forks(self) -> tuple[Fork, ...]:
        """Those that are in the store for certain, in order."""
        return tuple(one.fork for one in self.rollbacks if one.stage is not RollbackStage.BEGUN)

    @property
    def timeline(self) -> int:
        """What the run is on."""
        return self.forks[-1].timeline if self.forks else 0

    @property
    def trainer_machines(self) -> list[Node]:
        """The trainer's nodes that have a machine and are not going down."""
        return [node for node in self.live(Role.TRAINER) if node.phase is not NodePhase.REQUESTED]

    def live(self, role: Role) -> list[Node]:
        """Nodes of a role that are wanted or working, in slot order."""
        live = [node for node in self.nodes.values() if node.role is role and node.phase in LIVE_NODE]
        return sorted(live, key=lambda node: node.id)
