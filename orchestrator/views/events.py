"""Describe each kind of event in one sentence, and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_orch.checkpoint.journal import Record
from grpo_orch.checkpoint.records.documents import RehearsedFault
from grpo_orch.checkpoint.store.codec import event_to_plain
from grpo_orch.orchestrator.views.formatting import effect_words, skipped_words, start_words
from grpo_orch.policies.model import events, exit_codes
from grpo_orch.policies.model.events import Event
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
        case events.RunMoved():
            return f"Run {_RUN_VERBS[event.phase]}: {event.reason}"
        case events.NodeRequested():
            most = f", for at most {event.max_usd_per_h:.2f} USD an hour" if event.max_usd_per_h else ""
            return f"{event.node} was requested {_MARKETS[event.market]}{most}: {event.reason}"
        case events.NodeMoved(phase=NodePhase.REFUSED):
            why = _REFUSALS[event.refusal or Refusal.UNKNOWN]
            return f"{event.node} was refused, {why}: {event.reason}"
        case events.NodeMoved():
            return f"{event.node} {_NODE_VERBS[event.phase]}: {event.reason}"
        case events.MachineBought():
            where = event.where or "on this computer"
            price = f"{event.price_usd_per_h:.2f} USD an hour"
            is_cheaper = event.price_usd_per_h < event.on_demand_usd_per_h
            other = f" ({event.on_demand_usd_per_h:.2f} on demand)" if is_cheaper else ""
            return f"{event.node} has a machine {_MARKETS[event.market]}, {where}, at {price}{other}"
        case events.BudgetReached():
            return f"The budget is reached; the run will pause: {event.reason}"
        case events.JobExited():
            why = f": {event.reason}" if event.reason else ""
            ended = f"{event.node} {_end_words(event.exit_code)} at step {event.step}"
            return f"{ended} (attempt {event.attempt}){why}"
        case events.DivergenceSuspected():
            onset = f"Possible divergence since step {event.onset_step}, detected at step {event.step}"
            return _with_evidence(onset, event.evidence)
        case events.Diverged():
            seen = f"detected at step {event.step} by the {event.seen_by}"
            return _with_evidence(f"The run has diverged since step {event.onset_step}, {seen}", event.evidence)
        case events.RollbackStarted():
            return _rollback(event)
        case events.StoreSlowed():
            newest = f"the newest stored checkpoint is of step {event.stored_step}"
            stored = newest if event.stored_step else "no checkpoint is stored yet"
            return f"The store is slow: the checkpoint of step {event.step} is postponed; {stored}"
        case _:
            return _SENTENCES[type(event)].format(e=event)


def _rollback(event: events.RollbackStarted) -> str:
    fork = event.fork
    target = f"Rollback from step {event.from_step} to {start_words(fork.start)}, as timeline {fork.timeline}"
    changed = ", ".join(f"{key} {value:g}" for key, value in fork.changes.items())
    other = " and ".join(part for part in (changed, skipped_words(fork.skipped)) if part)
    effects = effect_words(event.effects)
    changes = f", with {other}" if other else ""
    return f"{target}{changes}: {event.reason}{f' ({effects})' if effects else ''}"


def _with_evidence(finding: str, evidence: Sequence[str]) -> str:
    return f"{finding}; {'; '.join(evidence)}" if evidence else finding


def _end_words(exit_code: int) -> str:
    if exit_code == exit_codes.STOPPED:
        return "stopped as requested"
    if exit_code == exit_codes.OK:
        return "finished its job"
    return f"ended with signal {-exit_code}" if exit_code < 0 else f"ended with exit code {exit_code}"


# The events whose sentences need only their fields.
_SENTENCES: Mapping[type[Event], str] = {
    events.RunCreated: "Run {e.name} was created",
    events.ControllerTookOver: "The daemon {e.host}/{e.pid} took over the run: {e.reason}",
    events.RebalanceRecommended: "{e.node} received a rebalance recommendation: {e.reason}",
    events.BuyingStopped: "Buying stopped for {e.kind}, except for an occasional test machine: {e.reason}",
    events.BuyingResumed: "Buying resumed for {e.kind}",
    events.FleetSized: "The target is {e.nodes} rollout nodes instead of {e.before}: {e.reason}",
    events.CapacityShortage: "The run is waiting for machines: {e.reason}",
    events.BudgetRefused: "No more {e.role} machines are bought: {e.reason}",
    events.BudgetNeared: "80 % of the budget is spent: {e.spent_usd:.2f} of {e.usd:.2f} USD",
    events.BudgetSet: "The budget is now {e.usd:.2f} USD",
    events.JobRestarted: "{e.node} restarts its job (attempt {e.attempt}): {e.reason}",
    events.GatewayRestarted: "The gateway is a new process ({e.boot_id:.8})",
    events.CommandTaken: "The command '{e.kind}' was accepted",
    events.DivergenceCleared: "The possible divergence has passed at step {e.step}",
    events.PitfallFound: "Warning at step {e.step}: {e.advice}",
    events.TimelineForked: (
        "Timeline {e.timeline} is in the store: trainers of older timelines can no longer continue"
    ),
    events.TrainerFenced: "The old trainer has stopped; timeline {e.timeline} can start",
    events.TimelineResumed: "Timeline {e.timeline} is training, from step {e.step}",
    events.FleetMoved: "The fleet serves timeline {e.timeline}, policy {e.policy}",
    events.ProbationPassed: "Timeline {e.timeline} passed its probation at step {e.step}",
    events.StoreCaughtUp: (
        "The store has caught up at step {e.step}: the checkpoint of step {e.stored_step} is stored"
    ),
    events.SpecProved: "The trainer works with this run.yaml: rollout nodes may be requested from now on",
    events.DocumentUnreadable: "{e.key} in the store cannot be read and is ignored: {e.reason}",
}
_MARKETS = {Market.SPOT: "on spot", Market.ON_DEMAND: "on demand"}
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
