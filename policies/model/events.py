"""What is journalled. A run's state is the fold of these and of nothing else.

Fields hold JSON's own types and the enums of `vocabulary`; a new field needs a default, so that older journals
still read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import get_args

from policies.model.pools import Pool
from policies.model.timelines import Fork
from policies.model.vocabulary import Cause, Market, NodePhase, Refusal, Role, RunPhase

# Of the run as a whole, and of its store.


@dataclass(frozen=True, slots=True)
class RunCreated:
    """The first entry: the run exists and its spec is in the store."""

    name: str
    run_id: str


@dataclass(frozen=True, slots=True)
class TookOver:
    """A controller took the run; the entry's number is its epoch. `since_told_s`: how long ago the last event
    before it was journalled, by the store's clock; 0: not known."""

    host: str
    pid: int
    reason: str
    since_told_s: float = 0.0


@dataclass(frozen=True, slots=True)
class RunMoved:
    """The run changed its phase. `parked_s`: how long it was parked, where it was until now."""

    phase: RunPhase
    reason: str
    parked_s: float | None = None


@dataclass(frozen=True, slots=True)
class GatewayRestarted:
    """The gateway came back as another process."""

    boot_id: str


@dataclass(frozen=True, slots=True)
class CommandTaken:
    """A user's command was read from the store and will not be read again."""

    command_id: str
    kind: str


@dataclass(frozen=True, slots=True)
class Noticed:
    """A pitfall was seen in the metrics: what it is, and what to do."""

    kind: str
    step: int
    text: str


@dataclass(frozen=True, slots=True)
class StoreSlowed:
    """A checkpoint was put off at `step`: earlier ones are still being stored. `stored_step` is the newest
    stored one's, 0 while there is none."""

    step: int
    stored_step: int


@dataclass(frozen=True, slots=True)
class StoreCaughtUp:
    """There is room for checkpoints again."""

    step: int
    stored_step: int


@dataclass(frozen=True, slots=True)
class TrainerGenerates:
    """No rollout node is there, and the trainer makes the completions itself, from `step` on. `waited_s`: for how
    long there had been no machine; None: there is one, and it does not serve."""

    step: int
    waited_s: float | None = None


@dataclass(frozen=True, slots=True)
class NodesGenerate:
    """They are made by rollout nodes again, after so long."""

    step: int
    lasted_s: float


@dataclass(frozen=True, slots=True)
class SpecProved:
    """A trainer has come as far as training: run.yaml, its data and its rewards can be worked with."""


@dataclass(frozen=True, slots=True)
class DataSetAside:
    """An optional object of the store, or part of it, cannot be read and is left out; a command is moved away."""

    key: str
    why: str


RunEvent = (
    RunCreated
    | TookOver
    | RunMoved
    | GatewayRestarted
    | CommandTaken
    | Noticed
    | StoreSlowed
    | StoreCaughtUp
    | TrainerGenerates
    | NodesGenerate
    | SpecProved
    | DataSetAside
)


# Of money, of time, and of what money cannot buy.


@dataclass(frozen=True, slots=True)
class BudgetRefused:
    """No more machines of a role are bought, for they do not fit under the budget. The run goes on."""

    role: str
    reason: str


@dataclass(frozen=True, slots=True)
class BudgetReached:
    """The run stores what it has and stops: no more money is left than that takes."""

    spent_usd: float
    reason: str
    at: str  # pause, down


@dataclass(frozen=True, slots=True)
class BudgetNeared:
    """Four fifths of `budget.usd` are spent. The run goes on."""

    spent_usd: float
    usd: float


@dataclass(frozen=True, slots=True)
class CapacityMissing:
    """For an hour the trainer has had no machine, or no rollout node has served. Machines are still requested."""

    role: str
    since_s: float  # seconds since the epoch
    reason: str


@dataclass(frozen=True, slots=True)
class DeadlineMissed:
    """The deadline has passed, or is out of reach even with the most nodes that there may be. The run goes on.

    `expected_end_s` with so many `nodes`, each step of `step_s`; None before steps were measured.
    """

    deadline_s: float  # seconds since the epoch
    expected_end_s: float | None
    step: int
    steps: int
    nodes: int
    step_s: float | None


@dataclass(frozen=True, slots=True)
class BudgetSet:
    """A user has set another `budget.usd` for this run."""

    usd: float


MoneyEvent = BudgetRefused | BudgetReached | BudgetNeared | CapacityMissing | DeadlineMissed | BudgetSet


# Of machines and of the work on them.


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


# Of divergence and of rollbacks.


@dataclass(frozen=True, slots=True)
class DivergenceWatched:
    """Something is off since `onset_step`. `evidence` is one sentence per signal, the strongest first."""

    timeline: int
    step: int
    onset_step: int
    evidence: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class DivergenceCleared:
    """What was watched has passed."""

    timeline: int
    step: int


@dataclass(frozen=True, slots=True)
class Diverged:
    """The detectors tripped: the trainer's own or, where it could not tell, the controller's."""

    timeline: int
    step: int
    onset_step: int
    evidence: tuple[str, ...]
    seen_by: str  # trainer, controller


@dataclass(frozen=True, slots=True)
class RollbackBegun:
    """The intent to go on with `fork`: target and changes are chosen, nothing has happened yet."""

    fork: Fork
    cause: Cause
    from_step: int  # how far the timeline before had come
    reason: str
    effects: Mapping[str, str] = field(default_factory=dict)  # what each change does, by key of `grpo`


@dataclass(frozen=True, slots=True)
class TimelineForked:
    """The fork is in the store. From here on the run is on `timeline`, and an older trainer stops."""

    timeline: int


@dataclass(frozen=True, slots=True)
class TrainerFenced:
    """No trainer of an older timeline is left."""

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
    """The new timeline came far enough beyond the old one's trip."""

    timeline: int
    step: int


@dataclass(frozen=True, slots=True)
class HealthyChosen:
    """The run ends diverged: this is its last healthy checkpoint, to be exported. None: there is none."""

    version: str | None  # PolicyVersion as text


@dataclass(frozen=True, slots=True)
class Exported:
    """The weights of a checkpoint lie in the store below `prefix`, as files for `from_pretrained`. If it is
    empty, they could not be exported."""

    version: str
    prefix: str


TimelineEvent = (
    DivergenceWatched
    | DivergenceCleared
    | Diverged
    | RollbackBegun
    | TimelineForked
    | TrainerFenced
    | TimelineResumed
    | FleetMoved
    | ProbationPassed
    | HealthyChosen
    | Exported
)

Event = RunEvent | MoneyEvent | MachineEvent | TimelineEvent

EVENT_TYPES: dict[str, type[Event]] = {cls.__name__: cls for cls in get_args(Event)}
