"""What a run's faults cost: seconds and tokens. Dollars are in `rentals`.

Pure arithmetic over what was logged. A fault is known from the journal (somebody noticed) or from the rehearsal
(somebody did it); a rehearsed one and its traces in the journal are one fault. Seconds are lost where the time
between two logged steps is longer than it usually is, and are put down to the faults that fell between the two.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from statistics import median
from typing import Protocol, TypeVar

from policies.model import exit_codes
from policies.model.events import (
    Event,
    GatewayRestarted,
    JobExited,
    JobRestarted,
    NodeMoved,
    NodeRequested,
    RunMoved,
    TookOver,
)
from policies.model.phases import LIVE_RUN
from policies.model.state import Rollback
from policies.model.timelines import Fork, lineage, on_lineage
from policies.model.vocabulary import NodePhase, PolicyVersion, Role, RunPhase

History = Iterable[tuple[int, float, Iterable[Event]]]  # (entry number, time_s, events), as `fold.fold` takes it

GATEWAY = "gateway"
DAEMON = "daemon"
TICK_S = 2.0  # an event bears the time at which its tick began: a fault may strike between that and the look
# A trace in the journal this long after a fault is still that fault's; a dead machine is seen sooner.
TRACE_S = 60.0
# No faults: a trainer that was told to stop, a run that diverges, and a run.yaml that no attempt can train.
STOPPED_BY_ITSELF = (exit_codes.FENCED, exit_codes.DIVERGED, exit_codes.BAD_SPEC, exit_codes.NOTHING_LEARNT)


class LoggedRow(Protocol):
    """A row of the log, `checkpoint.records.metrics.Row`. Times are the wall clock at the step's end."""

    @property
    def timeline(self) -> int: ...
    @property
    def step(self) -> int: ...
    @property
    def time_s(self) -> float: ...
    @property
    def reached_s(self) -> float: ...  # when the run first had this step
    @property
    def tokens(self) -> int: ...
    @property
    def tokens_discarded(self) -> int: ...


RowT = TypeVar("RowT", bound=LoggedRow)


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that went wrong. `target` is a slot, `rollouts`, `trainer`, GATEWAY or DAEMON."""

    name: str
    target: str
    struck_s: float
    seen_s: float  # its last trace in the journal; equal to `struck_s` where there is none
    at_step: int | None = None  # None: the last step that had been logged then


@dataclass(frozen=True, slots=True)
class FaultCost:
    """What one fault cost. `survived` once a step was logged after it, or the run has finished."""

    name: str
    at_step: int
    seconds_lost: float
    tokens_regenerated: int
    survived: bool


def surviving_rows(rows: Iterable[RowT], when: Callable[[RowT], float] = lambda row: row.time_s) -> list[RowT]:
    """Return the rows in the order of time, without those that a restarted trainer has yet to make again.

    A trainer that went back to step 10 replaces the rows of 11, 12, ... one by one; a row whose predecessor is
    younger than itself belongs to the life that was lost.
    """
    kept: list[RowT] = []
    newest: dict[int, float] = {}
    for row in sorted(rows, key=lambda r: (r.timeline, r.step)):
        if when(row) >= newest.get(row.timeline, when(row)):
            newest[row.timeline] = when(row)
            kept.append(row)
    return sorted(kept, key=when)


def journalled_faults(history: History) -> list[Fault]:
    """Return what the journal calls a fault, while the run was on: a machine that vanished or was given up, work
    that ended with an error, a gateway that came back, a controller that replaced another."""
    ledger = _Ledger()
    for _, time_s, events in history:
        for event in events:
            ledger.enter(event, time_s)
    return ledger.found


@dataclass(slots=True)
class _Ledger:
    """What has to be remembered between two events to know a fault from the run's ordinary life."""

    found: list[Fault] = field(default_factory=list)
    slots: dict[str, str] = field(default_factory=dict)
    phases: dict[str, NodePhase] = field(default_factory=dict)
    counted: set[str] = field(default_factory=set)  # nodes on their way out, or whose end is in `found` already
    run: RunPhase = RunPhase.STARTING
    controllers: int = 0
    gateways: int = 0

    def enter(self, event: Event, time_s: float) -> None:
        match event:
            case RunMoved():
                self.run = event.phase
                if event.phase is RunPhase.STARTING:
                    self.gateways = 0  # a resumed run starts a gateway of its own
            case NodeRequested():
                self.slots[event.node] = event.slot
            case NodeMoved():
                self._moved(event, time_s)
            case JobExited() if event.exit_code in STOPPED_BY_ITSELF:
                self.gateways = 0  # which ends with the trainer's work, and starts with the next
            case JobExited() if event.exit_code != 0:
                self.counted.add(event.node)
                self._add(
                    f"{event.node} exited with {event.exit_code}", self.slots[event.node], time_s, event.step
                )
            case JobRestarted():
                self.counted.discard(event.node)
            case GatewayRestarted():
                self.gateways += 1
                if self.gateways > 1:
                    self._add("gateway restarted", GATEWAY, time_s)
            case TookOver():
                self.controllers += 1
                if self.controllers > 1:
                    self._add("controller replaced", DAEMON, time_s)
            case _:
                pass  # every other event is the run going on

    def _moved(self, event: NodeMoved, time_s: float) -> None:
        before, self.phases[event.node] = self.phases.get(event.node), event.phase
        if event.node in self.counted:
            return
        if event.phase is NodePhase.GONE:
            self._add(f"{event.node} lost", self.slots[event.node], time_s)
        elif event.phase is NodePhase.TERMINATING:
            self.counted.add(event.node)
            if before is NodePhase.SERVING:
                self._add(f"{event.node} given up", self.slots[event.node], time_s)

    def _add(self, name: str, target: str, time_s: float, at_step: int | None = None) -> None:
        if self.run in LIVE_RUN:
            self.found.append(Fault(name, target, time_s, time_s, at_step))


def merge_faults(rehearsed: Iterable[Fault], journalled: Iterable[Fault]) -> list[Fault]:
    """Return every fault once, in order: what the journal says is a trace of an earlier fault that explains it.

    A fault explains one trace of each thing it hits within TRACE_S; the trainer's machine takes the gateway along.
    """
    known = [(fault, set[str]()) for fault in rehearsed]
    recent = list(
        range(len(known))
    )  # of `known`, what may explain a trace: those left out are too old for later ones
    for trace in sorted(journalled, key=lambda fault: fault.struck_s):
        recent = [place for place in recent if trace.struck_s <= known[place][0].struck_s + TRACE_S]
        near = [
            place
            for place, (fault, explained) in ((place, known[place]) for place in recent)
            if fault.struck_s - TICK_S <= trace.struck_s
            and trace.target not in explained
            and _hits(fault.target, trace.target)
        ]
        if near:
            place = max(near, key=lambda place: known[place][0].struck_s)
            fault, explained = known[place]
            explained.add(trace.target)
            known[place] = (replace(fault, seen_s=max(fault.seen_s, trace.seen_s)), explained)
        else:
            recent.append(len(known))
            known.append((trace, {trace.target}))
    return sorted((fault for fault, _ in known), key=lambda fault: fault.struck_s)


def _hits(target: str, slot: str) -> bool:
    if slot == GATEWAY:
        return target == GATEWAY or target.startswith(Role.TRAINER)
    return slot == target or slot.startswith(f"{target.removesuffix('s')}-") or target.startswith(f"{slot}-i")


def fault_costs(rows: Sequence[LoggedRow], faults: Sequence[Fault], *, finished: bool = False) -> list[FaultCost]:
    """Return what each fault cost, in their order.

    A gap between two logged steps costs what it is longer than the median gap in which nothing happened. It is
    shared evenly by the faults that had struck by its end and were not yet seen before its start, and so are the
    tokens thrown away in the step that ended it. Steps count from when the run first had them: what making one
    again cost is in the gap after the last step before it.
    """
    path = surviving_rows(rows, lambda row: row.reached_s)
    gaps = list(pairwise(path))
    inside = _inside(path, faults)
    spans = [end.reached_s - start.reached_s for start, end in gaps]
    usual_s = median([span for span, hit in zip(spans, inside, strict=True) if not hit] or spans or [0.0])
    seconds, tokens = [0.0] * len(faults), [0] * len(faults)
    steps_at = _steps_at(path, faults)
    for (_, end), span, hit in zip(gaps, spans, inside, strict=True):
        for place, n in enumerate(hit):
            seconds[n] += (span - usual_s) / len(hit)
            # Whole tokens: the first of the faults take what does not divide.
            tokens[n] += end.tokens_discarded // len(hit) + (place < end.tokens_discarded % len(hit))
    return [
        FaultCost(
            name=fault.name,
            at_step=step_at if fault.at_step is None else fault.at_step,
            seconds_lost=max(0.0, lost),  # a window that was shorter than usual lost nothing
            tokens_regenerated=again,
            survived=finished or (bool(path) and path[-1].reached_s > fault.struck_s),
        )
        for fault, lost, again, step_at in zip(faults, seconds, tokens, steps_at, strict=True)
    ]


def _inside(path: Sequence[LoggedRow], faults: Sequence[Fault]) -> list[list[int]]:
    """Of each gap between two rows: the faults that had struck by its end and were not yet seen before its start.

    Looked up by time: a long run has ten thousand rows and, with a thousand machines, as many faults.
    """
    times_s = [row.reached_s for row in path]
    found: list[list[int]] = [[] for _ in times_s[1:]]
    for n, fault in enumerate(faults):
        first = max(0, bisect_left(times_s, fault.struck_s) - 1)
        last = min(len(found), bisect_left(times_s, fault.seen_s))
        for place in range(first, last):
            found[place].append(n)
    return found


def _steps_at(path: Sequence[LoggedRow], faults: Sequence[Fault]) -> list[int]:
    """The highest step that had been logged when each struck."""
    times_s = [row.reached_s for row in path]
    highest = [0, *accumulate((row.step for row in path), max)]
    return [highest[bisect_right(times_s, fault.struck_s)] for fault in faults]


# What of a run's log belongs to its present timeline, and what rollbacks threw away.


@dataclass(frozen=True, slots=True)
class Abandoned:
    """What a rollback threw away: the line that it left, from after its start to `last_step`."""

    last_step: int
    steps: int
    tokens: int


def split_by_line(rows: Iterable[RowT], forks: Sequence[Fork]) -> tuple[list[RowT], list[RowT]]:
    """Return the rows that the run's present timeline consists of, and those that rollbacks abandoned.

    `forks` are all that are in the store, in order; the order of the rows stays.
    """
    stretches = lineage(forks, forks[-1].timeline if forks else 0)
    line: list[RowT] = []
    abandoned: list[RowT] = []
    for row in rows:
        (line if on_lineage(PolicyVersion(row.timeline, row.step), stretches) else abandoned).append(row)
    return line, abandoned


def abandoned(rows: Sequence[LoggedRow], rollbacks: Sequence[Rollback]) -> list[Abandoned]:
    """Return what each rollback threw away, in their order. A step that two of them left counts once, with the
    first."""
    found = []
    for place, rollback in enumerate(rollbacks):
        line, _ = split_by_line(rows, [one.fork for one in rollbacks[:place]])
        start = rollback.fork.start_at
        start_step = 0 if start is None else start.step
        left = [one for one in line if one.step > start_step]
        # The old trainer may have gone on a little before it ended.
        last_step = max([rollback.from_step, *(one.step for one in left)])
        found.append(Abandoned(last_step, max(0, last_step - start_step), sum(one.tokens for one in left)))
    return found
