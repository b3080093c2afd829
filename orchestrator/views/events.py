"""What happened, told to people: one sentence for every kind of event, and the same as JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, assert_never

from checkpoint.codec import event_to_plain
from checkpoint.entries import Record
from checkpoint.rehearsals import RehearsedFault
from policies.events import (
    CommandTaken,
    Event,
    GatewayRestarted,
    JobExited,
    JobRestarted,
    KlExceeded,
    MachineBought,
    NodeMoved,
    NodeRequested,
    RunCreated,
    RunMoved,
    StoreCaughtUp,
    StoreSlowed,
    TookOver,
)
from policies.vocabulary import Market, NodePhase, Refusal, RunPhase

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
        case NodeRequested():
            return f"{event.node} was asked for {market_words(event.market)}: {event.reason}"
        case NodeMoved(phase=NodePhase.REFUSED):
            why = _REFUSALS[event.refusal or Refusal.UNKNOWN]
            return f"{event.node} was refused, {why}: {event.reason}"
        case NodeMoved():
            return f"{event.node} {_NODE_VERBS[event.phase]}: {event.reason}"
        case MachineBought():
            where = event.where or "here"
            price = f"{event.price_usd_per_h:.2f} USD an hour"
            return f"{event.node} has a machine {market_words(event.market)}, {where}, at {price}"
        case JobExited():
            end = "finished its work" if event.exit_code == 0 else f"ended with {exit_words(event.exit_code)}"
            return f"{event.node} {end} at step {event.step} (attempt {event.attempt})"
        case JobRestarted():
            return f"{event.node} starts its work again (attempt {event.attempt}): {event.reason}"
        case GatewayRestarted():
            return f"The gateway answers as a new process ({event.boot_id[:8]})"
        case CommandTaken():
            return f"The command '{event.kind}' was taken"
        case KlExceeded():
            return f"KL {event.kl:.3g} is above its limit {event.limit:g} at step {event.step}"
        case StoreSlowed():
            newest = f"the newest stored one is of step {event.stored_step}"
            stored = newest if event.stored_step else "none is stored"
            return f"The store is slow: the checkpoint of step {event.step} is put off, {stored}"
        case StoreCaughtUp():
            return f"The store has caught up at step {event.step}: it has the checkpoint of {event.stored_step}"
        case _:
            assert_never(event)


def market_words(market: Market) -> str:
    match market:
        case Market.SPOT:
            return "on spot"
        case Market.ON_DEMAND:
            return "on demand"
        case _:
            assert_never(market)


def exit_words(exit_code: int) -> str:
    """`signal 9` for a process that a signal ended, `exit code N` otherwise."""
    return f"signal {-exit_code}" if exit_code < 0 else f"exit code {exit_code}"


_RUN_VERBS = {
    RunPhase.STARTING: "is starting",
    RunPhase.TRAINING: "is training",
    RunPhase.FINISHED: "has finished",
    RunPhase.STOPPING: "is stopping",
    RunPhase.STOPPED: "has stopped",
    RunPhase.FAILED: "has failed",
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
_REFUSALS = {
    Refusal.NO_CAPACITY: "no capacity",
    Refusal.QUOTA: "over quota",
    Refusal.CREDENTIALS: "credentials do not allow it",
    Refusal.UNKNOWN: "reason unknown",
}
