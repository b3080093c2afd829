"""The journal's events. A run's state is the fold of these alone.

Fields hold JSON types and the enums of `vocabulary`. A new field needs a default, so that older journals can be
read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import get_args

from grpo_orch.policies.model.pools import Pool
from grpo_orch.policies.model.timelines import Fork
from grpo_orch.policies.model.vocabulary import Cause, Market, NodePhase, Refusal, Role, RunPhase

# Of the run as a whole, and of its store.


@dataclass(frozen=True, slots=True)
class RunCreated:
    """The first entry: the run exists and its spec is in the store."""

    name: str
    run_id: str


@dataclass(frozen=True, slots=True)
class ControllerTookOver:
    """A controller took over the run; the entry's number is its epoch.

    `since_last_event_s`: time since the event before it was journalled, by the store's clock; 0: unknown.
    """

    host: str
    pid: int
    reason: str
    since_last_event_s: float = 0.0


@dataclass(frozen=True, slots=True)
class RunMoved:
    """The run changed its phase. `parked_s`: how long it was parked, if it was until now."""

    phase: RunPhase
    reason: str
    parked_s: float | None = None


@dataclass(frozen=True, slots=True)
class GatewayRestarted:
    """The gateway is a new process."""

    boot_id: str


@dataclass(frozen=True, slots=True)
class CommandTaken:
    """A user's command was read from the store and will not be read again."""

    command_id: str
    kind: str


@dataclass(frozen=True, slots=True)
class PitfallFound:
    """A pitfall was found in the metrics; `advice` describes it and the fix."""

    kind: str
    step: int
    advice: str


@dataclass(frozen=True, slots=True)
class StoreSlowed:
    """A checkpoint was postponed at `step`, because earlier ones are still being stored.

    `stored_step`: of the newest stored checkpoint; 0: none.
    """

    step: int
    stored_step: int


@dataclass(frozen=True, slots=True)
class StoreCaughtUp:
    """The store can take checkpoints again."""

    step: int
    stored_step: int


@dataclass(frozen=True, slots=True)
class SpecProved:
    """A trainer has trained: run.yaml, its data and its rewards work."""


@dataclass(frozen=True, slots=True)
class DocumentUnreadable:
    """An optional object of the store, or part of it, cannot be read and is ignored; a command is moved away."""

    key: str
    reason: str


RunEvent = (
    RunCreated
    | ControllerTookOver
    | RunMoved
    | GatewayRestarted
    | CommandTaken
    | PitfallFound
    | StoreSlowed
    | StoreCaughtUp
    | SpecProved
    | DocumentUnreadable
)


# Budget and capacity.


@dataclass(frozen=True, slots=True)
class BudgetRefused:
    """Machines of a role are no longer bought, because they do not fit under the budget. The run continues."""

    role: str
    reason: str


@dataclass(frozen=True, slots=True)
class BudgetReached:
    """The run stores its state and stops: the remaining budget only pays for that."""

    spent_usd: float
    reason: str


@dataclass(frozen=True, slots=True)
class BudgetNeared:
    """Four fifths of `budget.usd` are spent. The run continues."""

    spent_usd: float
    usd: float


@dataclass(frozen=True, slots=True)
class CapacityShortage:
    """For an hour the trainer has had no machine, or no rollout node has served. Machines are still requested."""

    role: str
    since_s: float  # seconds since the epoch
    reason: str


@dataclass(frozen=True, slots=True)
class BudgetSet:
    """A user has set another `budget.usd` for this run."""

    usd: float


MoneyEvent = BudgetRefused | BudgetReached | BudgetNeared | CapacityShortage | BudgetSet


# Machines and the work on them.


@dataclass(frozen=True, slots=True)
class NodeRequested:
    """The intent to buy a machine, journalled before it is requested."""

    node: str
    role: Role
    slot: str
    incarnation: int
    market: Market
    reason: str
    max_usd_per_h: float = 0.0  # maximum price of a machine of its kind; 0: unknown
    pool: Pool | None = None  # where it is requested; None: wherever run.yaml's resources allow
    is_fallback: bool = False  # a fallback node: on demand instead of unavailable spot
    disk_usd_per_h: float = 0.0  # additional; 0: none, or unknown


@dataclass(frozen=True, slots=True)
class NodeMoved:
    """A node changed its phase.

    `refusal` is set when the cloud refused the machine, and when the machine is abandoned because it never served
    or soon broke. A node that is GONE with a refusal was abandoned first and never bought.
    """

    node: str
    phase: NodePhase
    reason: str
    refusal: Refusal | None = None
    is_released: bool = False  # the plan returned it, which is no fault


@dataclass(frozen=True, slots=True)
class BuyingStopped:
    """Machines of a kind are no longer requested, except one at a time to test whether the kind works again."""

    kind: str  # `rollout on spot`: vocabulary.kind_of
    reason: str


@dataclass(frozen=True, slots=True)
class BuyingResumed:
    """Machines of a kind are requested again."""

    kind: str


@dataclass(frozen=True, slots=True)
class FleetSized:
    """The wanted number of rollout nodes changed from `before` to `nodes`, which make a step cheapest."""

    nodes: int
    before: int
    reason: str


@dataclass(frozen=True, slots=True)
class MachineBought:
    """A node's machine was first seen, with its pool and prices."""

    node: str
    market: Market
    where: str
    price_usd_per_h: float
    on_demand_usd_per_h: float
    pool: Pool | None = None  # the actual pool, not the requested one; None: its cloud has no pools
    disk_usd_per_h: float | None = None  # of its disk there; None: as requested


@dataclass(frozen=True, slots=True)
class RebalanceRecommended:
    """The cloud recommends to replace a machine, which it may preempt soon.

    `reason` tells how often a preemption followed in the same pool.
    """

    node: str
    reason: str


@dataclass(frozen=True, slots=True)
class JobExited:
    """A node's work ended while its machine is up.

    `attempt` is the number of this run of the work; `reason` its last line, empty if none.
    """

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


# Divergence and rollbacks.


@dataclass(frozen=True, slots=True)
class DivergenceSuspected:
    """The run may be diverging since `onset_step`. `evidence`: one sentence a signal, the strongest first."""

    timeline: int
    step: int
    onset_step: int
    evidence: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class DivergenceCleared:
    """The possible divergence has passed."""

    timeline: int
    step: int


@dataclass(frozen=True, slots=True)
class Diverged:
    """The detectors tripped: the trainer's own, or else the controller's."""

    timeline: int
    step: int
    onset_step: int
    evidence: tuple[str, ...]
    seen_by: str  # trainer, controller


@dataclass(frozen=True, slots=True)
class RollbackStarted:
    """The intent to continue with `fork`: target and changes are chosen, and nothing has happened yet."""

    fork: Fork
    cause: Cause
    from_step: int  # the step that the timeline before had reached
    reason: str
    effects: Mapping[str, str] = field(default_factory=dict)  # the effect of each change, by key of `grpo`


@dataclass(frozen=True, slots=True)
class TimelineForked:
    """The fork is in the store. From now on the run is on `timeline`, and an older trainer stops."""

    timeline: int


@dataclass(frozen=True, slots=True)
class TrainerFenced:
    """All trainers of older timelines have ended."""

    timeline: int


@dataclass(frozen=True, slots=True)
class TimelineResumed:
    """A trainer trains on the new timeline, from `step`."""

    timeline: int
    step: int


@dataclass(frozen=True, slots=True)
class FleetMoved:
    """The first rollout node serves a policy of the new timeline."""

    timeline: int
    policy: str  # PolicyVersion as text


@dataclass(frozen=True, slots=True)
class ProbationPassed:
    """The new timeline passed the old one's trip by the required number of steps."""

    timeline: int
    step: int


TimelineEvent = (
    DivergenceSuspected
    | DivergenceCleared
    | Diverged
    | RollbackStarted
    | TimelineForked
    | TrainerFenced
    | TimelineResumed
    | FleetMoved
    | ProbationPassed
)

Event = RunEvent | MoneyEvent | MachineEvent | TimelineEvent

EVENT_TYPES: dict[str, type[Event]] = {cls.__name__: cls for cls in get_args(Event)}
