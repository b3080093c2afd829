"""A run at one moment: the model that every view draws, and its JSON twin."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from checkpoint.records.metrics import Row, StepTiming
from orchestrator.views.events import EventLine, event_json
from orchestrator.views.measured import NodeState, StepSplit, WeightsView
from orchestrator.views.words import duration, moment
from policies.detect.divergence import Health
from policies.model.phases import TERMINAL_RUN
from policies.model.state import RunState
from policies.model.vocabulary import Cause, Market, NodePhase, Role, RollbackStage, RunPhase
from policies.serving.joining import Stage


@dataclass(frozen=True, slots=True)
class NodeView:
    """One slot and the newest machine in it. `policy` is None where it is not known, or base weights;
    of several engines it is what most of them hold."""

    slot: str
    node: str
    role: Role
    phase: NodePhase
    reason: str
    market: Market
    policy: str | None
    restarts: int  # of the machine and of its work
    since_s: float  # when it came into its phase, seconds since the epoch
    price_usd_per_h: float
    unfit: str = ""  # why it cannot hold the wanted policy, as it says itself
    stage: Stage | None = None  # what it fetches or starts, before it is of use
    engines: int = 1  # of a rollout node, as it says itself
    engines_serving: int = 0
    pool: str = ""  # zone, machine and market where it was asked for or landed; empty: its cloud has none
    state: NodeState = NodeState.REQUESTED  # its phase, and by its gateway whether it loads or is idle
    tokens_per_s: float | None = None  # as its engines count; None before two looks


@dataclass(frozen=True, slots=True)
class FleetView:
    """How many rollout nodes there are to be, and why. What is not measured yet, or not known, is None."""

    nodes: int
    fixed_s: float | None  # seconds of a step that no further node shortens
    generation_node_s: float | None  # node-seconds of generation in a step
    cheapest: float | None  # nodes, not rounded
    reason: str


@dataclass(frozen=True, slots=True)
class DeadlineView:
    """Where the run is on the way to its deadline; times in seconds since the epoch. Not known yet: None."""

    deadline_s: float
    expected_step: float | None  # that a run of even progress has made by now
    behind: bool | None
    nodes: int | None  # rollout nodes that keep it; 0: it is out of reach
    end_s: float | None  # as it goes now
    ended_s: float | None = None  # when the last step of a finished run was made


@dataclass(frozen=True, slots=True)
class MoneyView:
    """What the run's machines cost, USD. What is not known yet, or has no limit, is None."""

    spent_usd: float  # from each machine's request on
    all_on_demand_usd: float  # the same hours on demand, where that price is known
    saved_usd: float  # against those; never below 0
    usd_per_h: float  # now
    usd_per_step: float | None  # so far
    usd_per_million_tokens: float | None  # that were trained on, so far
    forecast_usd: float | None  # at the end, as it goes now
    budget_usd: float | None
    not_counted: str


@dataclass(frozen=True, slots=True)
class CheckpointView:
    """The newest checkpoint of the present line."""

    version: str
    age_s: float


@dataclass(frozen=True, slots=True)
class HealthView:
    """What the detectors say of the present timeline. `step` is that of the notice."""

    health: Health = Health.HEALTHY
    step: int | None = None
    onset_step: int | None = None
    evidence: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RollbackView:
    """The rollback that is under way, its probation included."""

    timeline: int  # the new one
    cause: Cause
    reason: str
    from_step: int
    start: str | None  # the checkpoint to which it goes back; None: the run's start
    stage: RollbackStage
    since_s: float  # when it came into that stage, seconds since the epoch
    probation_until_step: int
    text: str  # what it waits for


@dataclass(frozen=True, slots=True)
class SetAsideView:
    """An optional object of the store that could not be read, and was left out."""

    key: str
    why: str


@dataclass(frozen=True, slots=True)
class StoppedKindView:
    """Machines of one kind are not bought for now: it has failed again and again."""

    kind: str  # `rollout on spot`
    reason: str
    since_s: float  # seconds since the epoch
    tried_again_s: float  # one machine is, not before then; seconds since the epoch
    tries: int  # so far


@dataclass(frozen=True, slots=True)
class DaemonView:
    """Who steers, by its lease; all None when nobody does."""

    alive: bool
    host: str | None = None
    pid: int | None = None


@dataclass(frozen=True, slots=True)
class RunView:
    """A run at one moment. What is not known yet is None."""

    name: str
    store: str
    now_s: float
    phase: RunPhase
    reason: str
    timeline: int
    rollbacks: int  # so far, the one under way included
    rollback: RollbackView | None
    health: HealthView
    step: int
    max_steps: int | None
    activity: str | None  # the trainer's own word
    reward: float | None
    kl: float | None
    kl_limit: float | None  # `policies.kl.limit` above the run's own start; None before that is known, too
    step_s: float | None  # median of the last steps
    tokens_per_s: float | None
    eta_s: float | None
    requests_waiting: int | None  # None when the gateway is not heard from
    nodes: tuple[NodeView, ...]
    fleet: FleetView | None  # None: the run has no rollout nodes
    deadline: DeadlineView | None  # None: the run has none
    money: MoneyView
    not_bought: tuple[StoppedKindView, ...]
    checkpoint: CheckpointView | None
    store_slow: bool  # a checkpoint was put off: the ones before it are still on their way
    set_aside: tuple[SetAsideView, ...]  # what could not be read so far, each object once
    daemon: DaemonView
    recent: tuple[Row, ...]
    events: tuple[EventLine, ...]  # the newest last
    weights: WeightsView | None = None  # the newest policy on its way; None before the first
    parked_s: float | None = None  # for how long it has been parked; None: it is not
    step_split: StepSplit | None = None  # where the time of the last steps went; None before there is one
    step_timing: StepTiming | None = None  # the medians of the last steps; None before there is one

    @property
    def over(self) -> bool:
        """The run has ended and nobody steers it any more: its machines are gone, or need a `resume` or `down`."""
        return self.phase in TERMINAL_RUN and not self.daemon.alive


def to_json(view: RunView) -> dict[str, Any]:
    """The view as JSON data. Every key is always there; a value that is not known is null."""
    plain = asdict(view)
    plain["recent"] = [
        {"step": row.step, "reward": row.values.get("reward"), "kl": row.values.get("kl")} for row in view.recent
    ]
    plain["events"] = [event_json(line) for line in view.events]
    return plain


def health_of(state: RunState) -> HealthView:
    """What is journalled of the present timeline's health."""
    if state.diverged is not None:
        seen = state.diverged
        return HealthView(Health.TRIPPED, seen.step, seen.onset_step, seen.evidence)
    if state.watched is not None:
        return HealthView(Health.WATCH, state.watched.step, state.watched.onset_step, state.watched.evidence)
    return HealthView()


# The way to a run's deadline in words, for the terminal and the run page.


def deadline_words(view: RunView) -> list[str]:
    """When it is, where the run is on the way, and what keeps it, the most important first; empty without one."""
    told = view.deadline
    if told is None:
        return []
    words = [moment(told.deadline_s)]
    if told.ended_s is not None:
        apart_s = told.deadline_s - told.ended_s
        return [*words, f"kept, {duration(apart_s)} before" if apart_s >= 0 else f"missed by {duration(-apart_s)}"]
    if told.end_s is not None:
        words.append(f"ends {moment(told.end_s)}")
    if told.expected_step is not None:
        words.append(f"step {view.step:,}, {told.expected_step:,.0f} expected{': behind' * bool(told.behind)}")
    if told.nodes is not None:
        many = "1 node keeps it" if told.nodes == 1 else f"{told.nodes} nodes keep it"
        words.append(many if told.nodes else "out of reach")
    return words


def is_late(view: RunView) -> bool:
    """Whether the deadline is missed, or will be as it goes now."""
    told = view.deadline
    if told is None:
        return False
    ends_s = told.end_s if told.ended_s is None else told.ended_s
    return told.nodes == 0 or (ends_s is not None and ends_s > told.deadline_s)
