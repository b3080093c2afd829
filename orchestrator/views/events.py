"""What happened, told to people: one sentence for every kind of event, and the same as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, assert_never

from checkpoint.journal import Record
from checkpoint.records.documents import RehearsedFault
from checkpoint.store.codec import event_to_plain
from orchestrator.views.words import duration, effect_words, moment, skipped_words, start_words
from policies.model import exit_codes
from policies.model.events import (
    BudgetNeared,
    BudgetReached,
    BudgetRefused,
    BudgetSet,
    BuyingResumed,
    BuyingStopped,
    CapacityMissing,
    CommandTaken,
    DataSetAside,
    DeadlineMissed,
    Diverged,
    DivergenceCleared,
    DivergenceWatched,
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
    Noticed,
    ProbationPassed,
    RebalanceRecommended,
    RollbackBegun,
    RunCreated,
    RunMoved,
    SpecProved,
    StoreCaughtUp,
    StoreSlowed,
    TimelineForked,
    TimelineResumed,
    TookOver,
    TrainerFenced,
    TrainerGenerates,
)
from policies.model.vocabulary import Market, NodePhase, Refusal, RunPhase

REHEARSED = "RehearsedFault"


@dataclass(frozen=True, slots=True)
class EventLine:
    """One event with its place. `number` is the journal entry's, `index` the event's place in that entry; a
    rehearsed fault, which is no journal entry, has its own number and epoch 0."""

    number: int
    index: int
    epoch: int
    time_s: float
    type: str
    fields: dict[str, Any]
    text: str


def lines(record: Record) -> list[EventLine]:
    """Tell a journal entry. Raises Corrupt for an event that this version does not know."""
    told = []
    for index, event in enumerate(record.decoded()):
        fields = event_to_plain(event)
        kind = fields.pop("type")
        told.append(
            EventLine(record.number, index, record.epoch, record.time_s, kind, fields, text=sentence(event))
        )
    return told


def rehearsed_line(fault: RehearsedFault) -> EventLine:
    """Tell a rehearsed fault."""
    fields = {"fault": fault.fault, "target": fault.target, "at_step": fault.at_step, "detail": fault.detail}
    detail = f" ({fault.detail})" if fault.detail else ""
    text = f"Rehearsal: {fault.fault.replace('_', ' ')} {fault.target} at step {fault.at_step}{detail}"
    return EventLine(fault.number, 0, 0, fault.time_s, REHEARSED, fields, text)


def event_json(line: EventLine) -> dict[str, Any]:
    """`{number, epoch, time_s, type, ...fields, text}`."""
    place = {"number": line.number, "epoch": line.epoch, "time_s": line.time_s, "type": line.type}
    return {**place, **line.fields, "text": line.text}


def sentence(event: Event) -> str:
    """One sentence, without time and full stop."""
    match event:
        case RunCreated():
            return f"Run {event.name} was created"
        case TookOver():
            return f"Controller {event.host}/{event.pid} took the run: {event.reason}"
        case RunMoved():
            return f"Run {_RUN_VERBS[event.phase]}: {event.reason}"
        case NodeRequested() | NodeMoved() | RebalanceRecommended() | MachineBought():
            return _machine(event)
        case BuyingStopped() | BuyingResumed() | FleetSized() | CapacityMissing() | DeadlineMissed():
            return _fleet(event)
        case BudgetReached() | BudgetRefused() | BudgetNeared() | BudgetSet():
            return _money(event)
        case JobExited():
            why = f": {event.reason}" if event.reason else ""
            ended = f"{event.node} {_end_words(event.exit_code)} at step {event.step}"
            return f"{ended} (attempt {event.attempt}){why}"
        case JobRestarted():
            return f"{event.node} starts its work again (attempt {event.attempt}): {event.reason}"
        case GatewayRestarted():
            return f"The gateway answers as a new process ({event.boot_id[:8]})"
        case CommandTaken():
            return f"The command '{event.kind}' was taken"
        case DivergenceWatched() | DivergenceCleared() | Diverged() | Noticed() | HealthyChosen() | Exported():
            return _health(event)
        case RollbackBegun() | TimelineForked() | TrainerFenced() | TimelineResumed() | FleetMoved():
            return _rollback(event)
        case ProbationPassed():
            return f"Timeline {event.timeline} has passed its probation at step {event.step}"
        case StoreSlowed():
            newest = f"the newest stored one is of step {event.stored_step}"
            stored = newest if event.stored_step else "none is stored"
            return f"The store is slow: the checkpoint of step {event.step} is put off, {stored}"
        case StoreCaughtUp():
            return f"The store has caught up at step {event.step}: it has the checkpoint of {event.stored_step}"
        case TrainerGenerates():
            waited = "" if event.waited_s is None else f", and no machine for {duration(event.waited_s)}"
            return f"No rollout node is there{waited}: from step {event.step} on the trainer generates by itself"
        case NodesGenerate():
            what = f"after {duration(event.lasted_s)} in which the trainer did"
            return f"From step {event.step} on rollout nodes generate again, {what}"
        case SpecProved():
            return "The trainer can work with run.yaml: rollout nodes are asked for from now on"
        case DataSetAside():
            return f"{event.key} in the store cannot be read and is left out: {event.why}"
        case _:
            assert_never(event)


def _machine(event: NodeRequested | NodeMoved | RebalanceRecommended | MachineBought) -> str:
    match event:
        case NodeRequested():
            most = f", for at most {event.most_usd_per_h:.2f} USD an hour" if event.most_usd_per_h else ""
            return f"{event.node} was asked for {market_words(event.market)}{most}: {event.reason}"
        case NodeMoved(phase=NodePhase.REFUSED):
            why = _REFUSALS[event.refusal or Refusal.UNKNOWN]
            return f"{event.node} was refused, {why}: {event.reason}"
        case NodeMoved():
            return f"{event.node} {_NODE_VERBS[event.phase]}: {event.reason}"
        case RebalanceRecommended():
            return f"{event.node} has a rebalance recommendation of its cloud: {event.reason}"
        case MachineBought():
            where = event.where or "here"
            price = f"{event.price_usd_per_h:.2f} USD an hour"
            dearer = event.on_demand_usd_per_h > event.price_usd_per_h
            other = f" ({event.on_demand_usd_per_h:.2f} on demand)" if dearer else ""
            return f"{event.node} has a machine {market_words(event.market)}, {where}, at {price}{other}"
        case _:
            assert_never(event)


def _fleet(event: BuyingStopped | BuyingResumed | FleetSized | CapacityMissing | DeadlineMissed) -> str:
    match event:
        case BuyingStopped():
            return f"No more machines are bought, {event.kind}, but one now and then to try: {event.reason}"
        case BuyingResumed():
            return f"Machines are bought again, {event.kind}"
        case FleetSized():
            return f"There are to be {event.nodes} rollout nodes instead of {event.before}: {event.reason}"
        case CapacityMissing():
            return f"The run waits for machines: {event.reason}"
        case DeadlineMissed():
            return _late(event)
        case _:
            assert_never(event)


def _money(event: BudgetReached | BudgetRefused | BudgetNeared | BudgetSet) -> str:
    match event:
        case BudgetReached():
            return f"The budget is reached, the run is to {event.at}: {event.reason}"
        case BudgetRefused():
            return f"No more {event.role} machines are bought: {event.reason}"
        case BudgetNeared():
            return f"{event.spent_usd:.2f} of {event.usd:.2f} USD are spent, four fifths of the budget"
        case BudgetSet():
            return f"The budget is {event.usd:.2f} USD from now on"
        case _:
            assert_never(event)


def _late(event: DeadlineMissed) -> str:
    where = f"step {event.step} of {event.steps}"
    if event.expected_end_s is None or event.step_s is None:
        return f"The deadline, {moment(event.deadline_s)}, has passed at {where}; the run goes on"
    pace = f"even {event.nodes} rollout nodes, at {event.step_s:.0f} s a step from {where} on"
    until = f"need until {moment(event.expected_end_s)}"
    return (
        f"The deadline, {moment(event.deadline_s)}, is out of reach: {pace}, {until}; the run goes on as it pays"
    )


def _health(
    event: DivergenceWatched | DivergenceCleared | Diverged | Noticed | HealthyChosen | Exported,
) -> str:
    match event:
        case DivergenceWatched():
            return _evident(f"Watched at step {event.step}: off since step {event.onset_step}", event.evidence)
        case DivergenceCleared():
            return f"What was watched has passed at step {event.step}"
        case Diverged():
            seen = f"seen at step {event.step} by the {event.seen_by}"
            return _evident(f"The run has diverged since step {event.onset_step}, {seen}", event.evidence)
        case Noticed():
            return f"Noticed at step {event.step}: {event.text}"
        case HealthyChosen(version=None):
            return "There is no healthy checkpoint: none is from before the divergence"
        case HealthyChosen():
            return f"The last healthy checkpoint is {event.version}; its weights are to be exported"
        case Exported(prefix=""):
            hint = f"`grpo-orch checkpoints verify {event.version}` says why"
            return f"The weights of {event.version} could not be exported; {hint}"
        case Exported():
            return f"The weights of {event.version} are exported to {event.prefix} in the store"
        case _:
            assert_never(event)


def _rollback(event: RollbackBegun | TimelineForked | TrainerFenced | TimelineResumed | FleetMoved) -> str:
    match event:
        case RollbackBegun():
            fork = event.fork
            whereto = (
                f"Rollback from step {event.from_step} to {start_words(fork.start)}, as timeline {fork.timeline}"
            )
            changed = ", ".join(f"{key} {value:g}" for key, value in fork.changes.items())
            other = " and ".join(part for part in (changed, skipped_words(fork.skipped)) if part)
            does = effect_words(event.effects)
            return f"{whereto}{f', with {other}' if other else ''}: {event.reason}{f' ({does})' if does else ''}"
        case TimelineForked():
            return f"Timeline {event.timeline} is in the store: no trainer of an older one goes on"
        case TrainerFenced():
            return f"The old trainer has ended, as timeline {event.timeline} wants"
        case TimelineResumed():
            return f"Timeline {event.timeline} is trained, from step {event.step}"
        case FleetMoved():
            return f"The fleet serves timeline {event.timeline}, policy {event.policy}"
        case _:
            assert_never(event)


def _evident(what: str, evidence: Sequence[str]) -> str:
    return f"{what}; {'; '.join(evidence)}" if evidence else what


def market_words(market: Market) -> str:
    match market:
        case Market.SPOT:
            return "on spot"
        case Market.ON_DEMAND:
            return "on demand"
        case _:
            assert_never(market)


def _end_words(exit_code: int) -> str:
    if exit_code == exit_codes.STOPPED:
        return "ended, as it was told to,"
    return "finished its work" if exit_code == exit_codes.OK else f"ended with {exit_words(exit_code)}"


def exit_words(exit_code: int) -> str:
    """`signal 9` for a process that a signal ended, `exit code N` otherwise."""
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
    NodePhase.REQUESTED: "was asked for",
    NodePhase.BOOTING: "is booting",
    NodePhase.SERVING: "is at work",
    NodePhase.DRAINING: "is leaving",
    NodePhase.TERMINATING: "is taken down",
    NodePhase.GONE: "is gone",
    NodePhase.REFUSED: "was refused",
}
_REFUSALS = {  # those of a cloud; the others are of machines that it gave
    Refusal.NO_CAPACITY: "no capacity",
    Refusal.QUOTA: "over quota",
    Refusal.CREDENTIALS: "credentials do not allow it",
    Refusal.UNKNOWN: "reason unknown",
}
