"""Describe each kind of event in one sentence, and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, assert_never

from grpo_orch.checkpoint.journal import Record
from grpo_orch.checkpoint.records.documents import RehearsedFault
from grpo_orch.checkpoint.store.codec import event_to_plain
from grpo_orch.orchestrator.views.formatting import duration, effect_words, moment, skipped_words, start_words
from grpo_orch.policies.model import exit_codes
from grpo_orch.policies.model.events import (
    BudgetNeared,
    BudgetReached,
    BudgetRefused,
    BudgetSet,
    BuyingResumed,
    BuyingStopped,
    CapacityShortage,
    CommandTaken,
    ControllerTookOver,
    DeadlineMissed,
    Diverged,
    DivergenceCleared,
    DivergenceSuspected,
    DocumentUnreadable,
    Event,
    Exported,
    FleetMoved,
    FleetSized,
    GatewayRestarted,
    HealthyChosen,
    JobExited,
    JobRestarted,
    MachineBought,
    NodeMoved,
    NodeRequested,
    NodesGenerate,
    PitfallFound,
    ProbationPassed,
    RebalanceRecommended,
    RollbackStarted,
    RunCreated,
    RunMoved,
    SpecProved,
    StoreCaughtUp,
    StoreSlowed,
    TimelineForked,
    TimelineResumed,
    TrainerFenced,
    TrainerGenerates,
)
from grpo_orch.policies.model.vocabulary import Market, NodePhase, Refusal, RunPhase

REHEARSED = "RehearsedFault"


@dataclass(frozen=True, slots=True)
class EventLine:
    """One event and its position: `number` of its journal entry, `index` within that entry.

    A rehearsed fault is not a journal entry; it has its own number and epoch 0.
    """

    number: int
    index: int
    epoch: int
    time_s: float
    type: str
    fields: dict[str, Any]
    text: str


def lines(record: Record) -> list[EventLine]:
    """Describe a journal entry. Raises Corrupt for an event that this version does not know."""
    found = []
    for index, event in enumerate(record.decoded()):
        fields = event_to_plain(event)
        kind = fields.pop("type")
        found.append(
            EventLine(record.number, index, record.epoch, record.time_s, kind, fields, text=sentence(event))
        )
    return found


def rehearsed_line(fault: RehearsedFault) -> EventLine:
    """Describe a rehearsed fault."""
    fields = {"fault": fault.fault, "target": fault.target, "at_step": fault.at_step, "detail": fault.detail}
    detail = f" ({fault.detail})" if fault.detail else ""
    text = f"Rehearsal: {fault.fault.replace('_', ' ')} {fault.target} at step {fault.at_step}{detail}"
    return EventLine(fault.number, 0, 0, fault.time_s, REHEARSED, fields, text)


def event_json(line: EventLine) -> dict[str, Any]:
    """Return `{number, epoch, time_s, type, ...fields, text}`."""
    header = {"number": line.number, "epoch": line.epoch, "time_s": line.time_s, "type": line.type}
    return {**header, **line.fields, "text": line.text}


def sentence(event: Event) -> str:
    """Describe an event in one sentence, without its time and without a full stop."""
    match event:
        case RunCreated():
            return f"Run {event.name} was created"
        case ControllerTookOver():
            return f"Controller {event.host}/{event.pid} took over the run: {event.reason}"
        case RunMoved():
            return f"Run {_RUN_VERBS[event.phase]}: {event.reason}"
        case NodeRequested() | NodeMoved() | RebalanceRecommended() | MachineBought():
            return _machine(event)
        case BuyingStopped() | BuyingResumed() | FleetSized() | CapacityShortage() | DeadlineMissed():
            return _fleet(event)
        case BudgetReached() | BudgetRefused() | BudgetNeared() | BudgetSet():
            return _money(event)
        case JobExited():
            why = f": {event.reason}" if event.reason else ""
            ended = f"{event.node} {_end_words(event.exit_code)} at step {event.step}"
            return f"{ended} (attempt {event.attempt}){why}"
        case JobRestarted():
            return f"{event.node} restarts its job (attempt {event.attempt}): {event.reason}"
        case GatewayRestarted():
            return f"The gateway is a new process ({event.boot_id[:8]})"
        case CommandTaken():
            return f"The command '{event.kind}' was accepted"
        case (
            DivergenceSuspected()
            | DivergenceCleared()
            | Diverged()
            | PitfallFound()
            | HealthyChosen()
            | Exported()
        ):
            return _health(event)
        case RollbackStarted() | TimelineForked() | TrainerFenced() | TimelineResumed() | FleetMoved():
            return _rollback(event)
        case ProbationPassed():
            return f"Timeline {event.timeline} passed its probation at step {event.step}"
        case StoreSlowed():
            newest = f"the newest stored checkpoint is of step {event.stored_step}"
            stored = newest if event.stored_step else "no checkpoint is stored yet"
            return f"The store is slow: the checkpoint of step {event.step} is postponed; {stored}"
        case StoreCaughtUp():
            stored = f"the checkpoint of step {event.stored_step} is stored"
            return f"The store has caught up at step {event.step}: {stored}"
        case TrainerGenerates():
            waited = (
                "" if event.waited_s is None else f" and no machine was available for {duration(event.waited_s)}"
            )
            return f"No rollout node is serving{waited}: the trainer generates completions from step {event.step}"
        case NodesGenerate():
            before = f"the trainer did so for {duration(event.lasted_s)}"
            return f"Rollout nodes generate completions again from step {event.step}; {before}"
        case SpecProved():
            return "The trainer works with this run.yaml: rollout nodes may be requested from now on"
        case DocumentUnreadable():
            return f"{event.key} in the store cannot be read and is ignored: {event.reason}"
        case _:
            assert_never(event)


def _machine(event: NodeRequested | NodeMoved | RebalanceRecommended | MachineBought) -> str:
    match event:
        case NodeRequested():
            most = f", for at most {event.max_usd_per_h:.2f} USD an hour" if event.max_usd_per_h else ""
            return f"{event.node} was requested {_market_words(event.market)}{most}: {event.reason}"
        case NodeMoved(phase=NodePhase.REFUSED):
            why = _REFUSALS[event.refusal or Refusal.UNKNOWN]
            return f"{event.node} was refused, {why}: {event.reason}"
        case NodeMoved():
            return f"{event.node} {_NODE_VERBS[event.phase]}: {event.reason}"
        case RebalanceRecommended():
            return f"{event.node} received a rebalance recommendation: {event.reason}"
        case MachineBought():
            where = event.where or "on this computer"
            price = f"{event.price_usd_per_h:.2f} USD an hour"
            is_cheaper = event.price_usd_per_h < event.on_demand_usd_per_h
            other = f" ({event.on_demand_usd_per_h:.2f} on demand)" if is_cheaper else ""
            return f"{event.node} has a machine {_market_words(event.market)}, {where}, at {price}{other}"
        case _:
            assert_never(event)


def _fleet(event: BuyingStopped | BuyingResumed | FleetSized | CapacityShortage | DeadlineMissed) -> str:
    match event:
        case BuyingStopped():
            return f"Buying stopped for {event.kind}, except for an occasional test machine: {event.reason}"
        case BuyingResumed():
            return f"Buying resumed for {event.kind}"
        case FleetSized():
            return f"The fleet should have {event.nodes} rollout nodes instead of {event.before}: {event.reason}"
        case CapacityShortage():
            return f"The run is waiting for machines: {event.reason}"
        case DeadlineMissed():
            return _late(event)
        case _:
            assert_never(event)


def _money(event: BudgetReached | BudgetRefused | BudgetNeared | BudgetSet) -> str:
    match event:
        case BudgetReached():
            action = "stop all machines" if event.at == "down" else event.at
            return f"The budget is reached, the run will {action}: {event.reason}"
        case BudgetRefused():
            return f"No more {event.role} machines are bought: {event.reason}"
        case BudgetNeared():
            return f"80 % of the budget is spent: {event.spent_usd:.2f} of {event.usd:.2f} USD"
        case BudgetSet():
            return f"The budget is now {event.usd:.2f} USD"
        case _:
            assert_never(event)


def _late(event: DeadlineMissed) -> str:
    where = f"step {event.step} of {event.steps}"
    if event.expected_end_s is None or event.step_s is None:
        return f"The deadline, {moment(event.deadline_s)}, has passed at {where}; the run continues"
    pace = f"from {where}, even {event.nodes} rollout nodes at {event.step_s:.0f} s a step"
    until = f"need until {moment(event.expected_end_s)}; the run continues at the cheapest fleet size"
    return f"The deadline, {moment(event.deadline_s)}, cannot be met: {pace} {until}"


def _health(
    event: DivergenceSuspected | DivergenceCleared | Diverged | PitfallFound | HealthyChosen | Exported,
) -> str:
    match event:
        case DivergenceSuspected():
            onset = f"Possible divergence since step {event.onset_step}, detected at step {event.step}"
            return _with_evidence(onset, event.evidence)
        case DivergenceCleared():
            return f"The possible divergence has passed at step {event.step}"
        case Diverged():
            seen = f"detected at step {event.step} by the {event.seen_by}"
            return _with_evidence(f"The run has diverged since step {event.onset_step}, {seen}", event.evidence)
        case PitfallFound():
            return f"Warning at step {event.step}: {event.advice}"
        case HealthyChosen(version=None):
            return "There is no healthy checkpoint: all are from after the divergence began"
        case HealthyChosen():
            return f"The last healthy checkpoint is {event.version}; its weights will be exported"
        case Exported(prefix=""):
            hint = f"`grpo-orch checkpoints verify {event.version}` shows why"
            return f"The weights of {event.version} could not be exported; {hint}"
        case Exported():
            return f"The weights of {event.version} are exported to {event.prefix} in the store"
        case _:
            assert_never(event)


def _rollback(event: RollbackStarted | TimelineForked | TrainerFenced | TimelineResumed | FleetMoved) -> str:
    match event:
        case RollbackStarted():
            fork = event.fork
            target = (
                f"Rollback from step {event.from_step} to {start_words(fork.start)}, as timeline {fork.timeline}"
            )
            changed = ", ".join(f"{key} {value:g}" for key, value in fork.changes.items())
            other = " and ".join(part for part in (changed, skipped_words(fork.skipped)) if part)
            effects = effect_words(event.effects)
            changes = f", with {other}" if other else ""
            return f"{target}{changes}: {event.reason}{f' ({effects})' if effects else ''}"
        case TimelineForked():
            return f"Timeline {event.timeline} is in the store: trainers of older timelines can no longer continue"
        case TrainerFenced():
            return f"The old trainer has stopped; timeline {event.timeline} can start"
        case TimelineResumed():
            return f"Timeline {event.timeline} is training, from step {event.step}"
        case FleetMoved():
            return f"The fleet serves timeline {event.timeline}, policy {event.policy}"
        case _:
            assert_never(event)


def _with_evidence(finding: str, evidence: Sequence[str]) -> str:
    return f"{finding}; {'; '.join(evidence)}" if evidence else finding


def _market_words(market: Market) -> str:
    match market:
        case Market.SPOT:
            return "on spot"
        case Market.ON_DEMAND:
            return "on demand"
        case _:
            assert_never(market)


def _end_words(exit_code: int) -> str:
    if exit_code == exit_codes.STOPPED:
        return "stopped as requested"
    return "finished its job" if exit_code == exit_codes.OK else f"ended with {_exit_words(exit_code)}"


def _exit_words(exit_code: int) -> str:
    """Return `signal 9` for a process that a signal killed, `exit code N` otherwise."""
    return f"signal {-exit_code}" if exit_code < 0 else f"exit code {exit_code}"


_RUN_VERBS = {
    RunPhase.STARTING: "is starting",
    RunPhase.TRAINING: "is training",
    RunPhase.PARKED: "is parked",
    RunPhase.FINISHED: "has finished",
    RunPhase.STOPPING: "is stopping",
    RunPhase.STOPPED: "has stopped",
    RunPhase.FAILED: "has failed",
    RunPhase.PAUSED: "is paused",
    RunPhase.GAVE_UP: "has given up",
}
_NODE_VERBS = {
    NodePhase.REQUESTED: "was requested",
    NodePhase.BOOTING: "is booting",
    NodePhase.SERVING: "is running",
    NodePhase.DRAINING: "is draining",
    NodePhase.TERMINATING: "is terminating",
    NodePhase.GONE: "is gone",
    NodePhase.REFUSED: "was refused",
}
_REFUSALS = {  # refusals by a cloud; the others are of machines that it provided
    Refusal.NO_CAPACITY: "no capacity",
    Refusal.QUOTA: "over quota",
    Refusal.CREDENTIALS: "credentials do not allow it",
    Refusal.UNKNOWN: "reason unknown",
}
