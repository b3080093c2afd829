"""One machine of the simulated world, as it is; its cloud shows a `Machine` of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from checkpoint.records.metrics import MetricsWriter
from checkpoint.stream.catalog import Catalog
from orchestrator.simulate.store import SimulatedStore, Trouble
from policies.control.snapshot import Machine
from policies.model.pools import Pool
from policies.model.vocabulary import MachineState, Market, PolicyVersion, Precedence, precedence_of, role_of


@dataclass
class Box:
    """A machine, and the work on it."""

    node: str
    store: SimulatedStore
    market: Market
    zone: str  # empty where nobody asks: of machines on demand
    up_at_s: float
    works_in_s: float  # from then on, or from the start of a later attempt
    attempt: int
    timeline: int
    works_at_s: float
    key: str = ""  # of its zone
    pool: Pool | None = None
    speed: float = 1.0
    never_works: bool = False
    exit_code: int | None = None
    reported_code: int | None = None  # what it got through to the store
    gone: bool = False
    notice: bool = False
    taken_at_s: float | None = None  # when the cloud takes it
    rebalance_recommended: bool = False
    step: float = -1.0  # -1: it has not begun
    writes: int = 0  # of its gateway's
    listens_as: str = ""  # the gateway's boot that has told the store where it listens
    cut_off_s: float = 0.0
    sealed: PolicyVersion | None = None  # its newest checkpoint, which may still wait in its spool
    spool: list[PolicyVersion] = field(default_factory=list)
    generated_s: float = 0.0  # in the present step
    generated_node_s: float = 0.0
    own_s: float = 0.0  # of these seconds, those in which its trainer generated itself
    alone_s: float = 0.0  # for which it has had no rollout node
    generates_itself: bool = False

    def __post_init__(self) -> None:
        self.role = role_of(self.node)
        self.catalog = Catalog(self.store, self.node)
        self.log = MetricsWriter(self.store)

    @property
    def precedence(self) -> Precedence:
        return precedence_of(self.timeline, self.node, self.attempt)

    @property
    def is_cut_off(self) -> bool:
        return self.store.trouble is not Trouble.NONE

    @property
    def holds(self) -> bool:
        """Whether it counts among the machines that its zone may give."""
        return not self.gone and not (self.notice and self.taken_at_s is not None)

    def is_up(self, time_s: float) -> bool:
        return not self.gone and time_s >= self.up_at_s

    def at_work(self, time_s: float) -> bool:
        alive = not self.gone and self.exit_code is None and not self.never_works
        return alive and time_s >= self.works_at_s

    def begin(self, attempt: int, timeline: int, time_s: float) -> None:
        """Begin an attempt of its work, once the machine is there."""
        self.attempt, self.timeline = attempt, timeline
        self.exit_code, self.reported_code, self.step = None, None, -1.0
        self.works_at_s = max(time_s, self.up_at_s) + self.works_in_s

    def lose(self) -> None:
        """The cloud takes it, and what lies on it."""
        self.gone = True
        self.spool.clear()

    def shown(self, time_s: float, usd_per_h: float, on_demand_usd_per_h: float) -> Machine:
        """What its cloud says of it."""
        if time_s < self.up_at_s and not self.gone:
            return Machine(self.node, MachineState.STARTING, attempt=0)
        return Machine(
            self.node,
            MachineState.GONE if self.gone else MachineState.UP,
            self.attempt,
            self.reported_code,
            "preempted" if self.gone else "",
            self.notice,
            self.market,
            usd_per_h,
            on_demand_usd_per_h,
            self.zone if self.pool is None else f"{self.pool.place} {self.pool.machine}",
            self.pool,
            self.rebalance_recommended,
        )
