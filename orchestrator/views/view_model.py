"""The state of a run at one moment: the model that every view draws, also as JSON. None means not known."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from shlex import quote
from statistics import median
from typing import Any

from grpo_orch.checkpoint.records import metrics
from grpo_orch.checkpoint.records.metrics import MetricsRow, StepTiming
from grpo_orch.orchestrator.views.events import EventLine, event_json
from grpo_orch.orchestrator.views.formatting import continue_command, data_size, duration, short, start_words
from grpo_orch.policies.detect.divergence import Health
from grpo_orch.policies.model.phases import TERMINAL_RUN
from grpo_orch.policies.model.state import RunState
from grpo_orch.policies.model.vocabulary import Cause, Market, NodePhase, Role, RollbackStage, RunPhase
from grpo_orch.policies.serving.gateway_status import MemberStatus, VersionSpread
from grpo_orch.policies.serving.joining import Stage


class NodeState(StrEnum):
    """A node's phase; a node that is gone was released or lost. LOADING and IDLE describe the present only."""

    REQUESTED = "requested"
    BOOTING = "booting"
    LOADING = "loading"  # no member of it holds the wanted policy
    SERVING = "serving"
    IDLE = "idle"  # no member of it has requests
    DRAINING = "draining"
    TERMINATING = "terminating"
    LOST = "lost"
    REFUSED = "refused"
    GONE = "gone"  # terminated by the controller


AT_WORK = (NodeState.SERVING, NodeState.IDLE)
FAILED = (NodeState.LOST, NodeState.REFUSED)


def phase_state(phase: NodePhase, before: NodePhase | None) -> NodeState:
    """Return the state of a node that entered `phase` from phase `before`."""
    if phase is NodePhase.GONE:
        return NodeState.GONE if before is NodePhase.TERMINATING else NodeState.LOST
    return NodeState(phase)


def state_now(journalled: NodeState, role: Role, members: Sequence[MemberStatus]) -> NodeState:
    """Return the journalled state; for a serving rollout node, the state that the gateway reports."""
    staying = [member for member in members if not member.draining]
    if journalled is not NodeState.SERVING or role is Role.TRAINER or not staying:
        return journalled
    serving = [member for member in staying if member.serving]
    if not serving:
        return NodeState.LOADING
    return NodeState.SERVING if any(member.requests_running for member in serving) else NodeState.IDLE


@dataclass(frozen=True, slots=True)
class NodeView:
    """One slot and its newest machine.

    `policy` is None if unknown or base weights. With several engines it is the policy that most of them hold.
    """

    slot: str
    node: str
    role: Role
    phase: NodePhase
    reason: str
    market: Market
    policy: str | None
    since_s: float  # start of its phase, seconds since the epoch
    price_usd_per_h: float
    unfit: str  # why it cannot hold the wanted policy, as reported by the node
    stage: Stage | None  # what it is fetching or starting before it is ready
    engines: int  # of a rollout node, as reported by the node
    engines_serving: int
    pool: str  # zone, machine type and market, requested or actual; empty: the cloud has no pools
    state: NodeState  # its phase; loading and idle are reported by the gateway
    tokens_per_s: float | None  # counted by its engines; None before the second look
    running: int | None  # requests on it; None: it is no member of the gateway
    queue: int | None  # of these, waiting in its engines


@dataclass(frozen=True, slots=True)
class MoneyView:
    """The cost of the run's machines, USD."""

    spent_usd: float  # counted from each machine's request
    all_on_demand_usd: float  # the same hours on demand, where that price is known
    saved_usd: float  # the difference; never below 0
    usd_per_h: float  # now
    usd_per_step: float | None  # so far
    usd_per_million_tokens: float | None  # trained tokens, so far
    forecast_usd: float | None  # at the end, at the current speed and price
    budget_usd: float | None  # None: no limit
    not_counted: str


@dataclass(frozen=True, slots=True)
class CheckpointView:
    """The newest checkpoint of the current timeline or its ancestors."""

    version: str
    age_s: float


@dataclass(frozen=True, slots=True)
class HealthView:
    """The detectors' verdict on the current timeline. `step` is the step of detection."""

    health: Health = Health.HEALTHY
    step: int | None = None
    onset_step: int | None = None
    evidence: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RollbackView:
    """The current rollback, including its probation."""

    timeline: int  # the new one
    cause: Cause
    reason: str
    from_step: int
    start: str | None  # the checkpoint it returns to; None: the run's start
    stage: RollbackStage
    since_s: float  # start of that stage, seconds since the epoch
    probation_until_step: int
    text: str  # describes the stage


@dataclass(frozen=True, slots=True)
class UnreadableView:
    """An optional object of the store that could not be read and is ignored."""

    key: str
    reason: str


@dataclass(frozen=True, slots=True)
class StoppedKindView:
    """A kind of machine that is not bought for now, after repeated failures."""

    kind: str  # `rollout on spot`
    reason: str
    since_s: float  # seconds since the epoch
    next_try_s: float  # earliest time of the next test machine, seconds since the epoch
    tries: int  # so far


@dataclass(frozen=True, slots=True)
class DaemonView:
    """The holder of the controller lease; None without one."""

    alive: bool
    host: str | None = None
    pid: int | None = None


@dataclass(frozen=True, slots=True)
class WeightsView:
    """The transfer of one policy, or of several: means for publishing, medians for reaching the nodes.

    Values of nodes are those of the slowest node. They are None until a node holds a policy.
    """

    policies: int  # published
    weights_bytes: float  # of one policy
    sent_bytes: float  # uploaded for one policy
    publish_s: float  # until the policy was in the store, encoding included
    encode_s: float  # until all of it was encoded; the upload starts earlier
    members: int | None = None  # when the last policy was wanted
    ready: int | None = None  # members that loaded it
    fetch_s: float | None = None  # download and verification
    fetched_bytes: float | None = None
    load_s: float | None = None  # the node serves no requests meanwhile
    first_ready_s: float | None = None  # since the policy was wanted
    last_ready_s: float | None = None


@dataclass(frozen=True, slots=True)
class RunView:
    """A run at one moment."""

    name: str
    store: str
    now_s: float
    phase: RunPhase
    reason: str
    timeline: int
    rollbacks: int  # so far, including the current one
    rollback: RollbackView | None
    health: HealthView
    step: int
    max_steps: int | None
    activity: str | None  # as reported by the trainer
    reward: float | None
    kl: float | None
    kl_limit: float | None  # initial KL plus `policies.kl.limit`; None until the initial KL is known
    step_s: float | None  # median of the last steps
    tokens_per_s: float | None
    eta_s: float | None
    requests_waiting: int | None  # None without a recent gateway status
    nodes: tuple[NodeView, ...]
    rollouts_wanted: int | None  # None: the run has no rollout nodes
    money: MoneyView
    buying_stopped: tuple[StoppedKindView, ...]
    checkpoint: CheckpointView | None
    store_slow: bool  # a checkpoint was postponed because earlier ones are still being uploaded
    unreadable: tuple[UnreadableView, ...]  # unreadable objects so far, each once
    daemon: DaemonView
    recent: tuple[MetricsRow, ...]
    events: tuple[EventLine, ...]  # the newest last
    plan: str = ""  # of the fleet, one sentence; empty while nothing is compared
    weights: WeightsView | None = None  # transfer of the newest policy; None before the first
    parked_s: float | None = None  # seconds parked; None: not parked
    step_timing: StepTiming | None = None  # medians of the last steps

    @property
    def over(self) -> bool:
        """True if the run has ended and has no controller; any machines left need `resume` or `down`."""
        return self.phase in TERMINAL_RUN and not self.daemon.alive


def to_json(view: RunView) -> dict[str, Any]:
    """Return the view as JSON data. Every key is always present; unknown values are null."""
    plain = asdict(view)
    plain["recent"] = [
        {"step": row.step, "reward": row.values.get("reward"), "kl": row.values.get("kl")} for row in view.recent
    ]
    plain["events"] = [event_json(line) for line in view.events]
    return plain


def health_of(state: RunState) -> HealthView:
    """Return the journalled health of the current timeline."""
    if state.diverged is not None:
        diverged = state.diverged
        return HealthView(Health.TRIPPED, diverged.step, diverged.onset_step, diverged.evidence)
    if state.suspected is not None:
        return HealthView(Health.WATCH, state.suspected.step, state.suspected.onset_step, state.suspected.evidence)
    return HealthView()


# Descriptions for the terminal and the run page.


def headline(view: RunView) -> str:
    """Describe in a few words what matters most right now."""
    if view.phase in TERMINAL_RUN:
        hint = continue_command(view.phase, view.reason, view.store)
        return f"{view.reason}; {hint}" if hint else view.reason
    if view.phase is RunPhase.STOPPING:
        return view.reason
    if not view.daemon.alive:
        return f"no daemon; run: grpo-orch resume {quote(view.store)}"
    if view.rollback is not None and view.rollback.stage is not RollbackStage.PROBATION:
        return f"rolling back to {start_words(view.rollback.start)}"
    if view.parked_s is not None:
        return f"for {duration(view.parked_s)}: {view.reason}"
    if view.phase is RunPhase.TRAINING and view.activity:
        waiting = f", {view.requests_waiting} requests waiting" if view.requests_waiting else ""
        slow = ", the store is slow" if view.store_slow else ""
        return f"trainer is {view.activity}{waiting}{slow}"
    return view.reason or "waiting for the trainer's first heartbeat"


def troubles(view: RunView) -> list[tuple[str, str]]:
    """Describe a divergence, a rollback, and machines that are not bought: a label and words each."""
    health, rollback, found = view.health, view.rollback, list[tuple[str, str]]()
    if health.health is not Health.HEALTHY:
        label = "diverged" if health.health is Health.TRIPPED else "watch"
        since = f"since step {health.onset_step}, detected at step {health.step}"
        found.append((label, f"{since}: {'; '.join(health.evidence)}" if health.evidence else since))
    if rollback is not None:
        passed = duration(view.now_s - rollback.since_s)
        start = rollback.start or "the start"
        found.append(("rollback", f"timeline {rollback.timeline}, from {start}, {rollback.text} ({passed})"))
    for stopped in view.buying_stopped:
        wait = duration(stopped.next_try_s - view.now_s)
        found.append(("not bought", f"{stopped.kind}, next test machine in {wait}: {stopped.reason}"))
    return found


def timing_words(timing: StepTiming) -> list[str]:
    """Return `generate 6.1 s`, `train 5.8 s`, `sync 0.4 s`, `idle: trainer 0.3 s, fleet 0.9 s`, `staleness 1`."""
    words = [
        f"generate {short(timing.generate_s)} s",
        f"train {short(timing.train_s)} s",
        f"sync {short(timing.sync_s)} s",
        f"idle: trainer {short(timing.trainer_idle_s)} s, fleet {short(timing.fleet_idle_s)} s",
    ]
    return words if timing.staleness is None else [*words, f"staleness {timing.staleness:g}"]


# The transfer of a policy from the trainer to the nodes, by stage, and what joining nodes fetch.

STAGES_SHOWN = 3


def weights_view(rows: Iterable[MetricsRow], versions: Sequence[VersionSpread]) -> WeightsView | None:
    """Summarize how policies were published and reached the nodes; None if no policy was published."""
    logged = [row.values for row in rows if metrics.PUBLISHED_BYTES in row.values]
    if not logged:
        return None
    policies = round(sum(values[metrics.PUBLISHED] for values in logged))
    names = (metrics.WEIGHTS_BYTES, metrics.PUBLISHED_BYTES, metrics.PUBLISH_S, metrics.ENCODE_S)
    weights, sent, publish_s, encode_s = (sum(values[name] for values in logged) / policies for name in names)
    published = WeightsView(policies, weights, sent, publish_s, encode_s)
    loaded = [spread for spread in versions if spread.ready]
    if not loaded:
        return published
    return replace(
        published,
        members=loaded[-1].members,
        ready=loaded[-1].ready,
        fetch_s=median(spread.fetch_s for spread in loaded),
        fetched_bytes=median(spread.fetched_bytes for spread in loaded),
        load_s=median(spread.load_s for spread in loaded),
        first_ready_s=median(spread.first_ready_s for spread in loaded),
        last_ready_s=median(spread.last_ready_s for spread in loaded),
    )


def newest_weights(rows: Sequence[MetricsRow], versions: Sequence[VersionSpread]) -> WeightsView | None:
    """Summarize the last published policy and the last policy that a node loaded."""
    last = next((row for row in reversed(rows) if metrics.PUBLISHED_BYTES in row.values), None)
    loaded = [spread for spread in versions if spread.ready]
    return None if last is None else weights_view([last], loaded[-1:])


def weights_words(view: WeightsView) -> str:
    """Return `1.2 GiB in 3.1 s (2.0 % of total); all ready in 4.2 to 5.0 s`."""
    share = view.sent_bytes / view.weights_bytes if view.weights_bytes else 1.0
    sent = f"{data_size(round(view.sent_bytes))} in {view.publish_s:.1f} s ({share:.1%} of total)".replace(
        "%", " %"
    )
    if view.first_ready_s is None or view.last_ready_s is None:
        return sent
    members = "all" if view.ready == view.members else f"{view.ready} of {view.members}"
    return f"{sent}; {members} ready in {view.first_ready_s:.1f} to {view.last_ready_s:.1f} s"


def policy_stage_words(view: WeightsView) -> str:
    """Return `encoded in 1.0 s, sent 2.1 s later; fetched in 0.8 s (25.0 MiB), loaded in 1.1 s`."""
    sent = f"encoded in {view.encode_s:.1f} s, sent {view.publish_s - view.encode_s:.1f} s later"
    if view.fetch_s is None or view.load_s is None:
        return sent
    fetched = f"fetched in {view.fetch_s:.1f} s ({data_size(round(view.fetched_bytes or 0))})"
    return f"{sent}; {fetched}, loaded in {view.load_s:.1f} s"


def stages_words(stages: Mapping[str, Stage]) -> list[str]:
    """Describe what joining nodes are doing, a line each, least progress first."""
    by_share = sorted(stages.items(), key=lambda item: item[1].done_bytes / (item[1].total_bytes or 1))
    shown = by_share if len(by_share) <= STAGES_SHOWN else by_share[: STAGES_SHOWN - 1]
    lines = [f"{node} is {_stage_words(stage)}" for node, stage in shown]
    return lines if len(shown) == len(by_share) else [*lines, f"and {len(by_share) - len(shown)} more"]


def _stage_words(stage: Stage) -> str:
    if not stage.total_bytes:
        return stage.name
    if not stage.done_bytes:
        return f"{stage.name}, {data_size(stage.total_bytes)}"
    share = stage.done_bytes / stage.total_bytes
    return f"{stage.name}, {data_size(stage.done_bytes)} of {data_size(stage.total_bytes)} ({share:.0%})"
