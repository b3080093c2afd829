"""Compute the seconds and tokens that a run's faults cost. Dollars are in `rentals`.

Pure arithmetic over logged data. Faults come from the journal and from rehearsals; a rehearsed fault and its
traces in the journal count as one fault. Seconds are lost if the time between two logged steps is longer than
usual, and are charged to the faults between these steps.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from statistics import median
from typing import Protocol, TypeVar

from grpo_orch.policies.model import exit_codes
from grpo_orch.policies.model.events import (
    ControllerTookOver,
    Event,
    GatewayRestarted,
    JobExited,
    JobRestarted,
    NodeMoved,
    NodeRequested,
    RunMoved,
)
from grpo_orch.policies.model.phases import LIVE_RUN
from grpo_orch.policies.model.state import Rollback
from grpo_orch.policies.model.timelines import Fork, lineage, on_lineage
from grpo_orch.policies.model.vocabulary import NodePhase, PolicyVersion, Role, RunPhase

History = Iterable[tuple[int, float, Iterable[Event]]]  # (entry number, time_s, events), as `fold.fold` takes it

GATEWAY = "gateway"
DAEMON = "daemon"
TICK_S = 2.0  # an event has the start time of its tick; a fault may happen later in that tick
# Maximum seconds between a fault and its traces in the journal; a dead machine is detected sooner.
TRACE_S = 60.0
# Exits that are not faults: a fenced trainer, a divergence, an unusable run.yaml, no rewards.
DELIBERATE_EXITS = (exit_codes.FENCED, exit_codes.DIVERGED, exit_codes.BAD_SPEC, exit_codes.NOTHING_LEARNT)


class LoggedRow(Protocol):
    """A logged row, `checkpoint.records.metrics.MetricsRow`. Times are wall clock at the end of the step."""

    @property
    def timeline(self) -> int: ...
    @property
    def step(self) -> int: ...
    @property
    def time_s(self) -> float: ...
    @property
    def reached_s(self) -> float: ...  # when the run first completed this step
    @property
    def tokens(self) -> int: ...
    @property
    def tokens_discarded(self) -> int: ...


RowT = TypeVar("RowT", bound=LoggedRow)


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault. `target` is a slot, `rollouts`, `trainer`, GATEWAY or DAEMON."""

    name: str
    target: str
    struck_s: float
    seen_s: float  # its last trace in the journal; equal to `struck_s` without a trace
    at_step: int | None = None  # None: the last step logged before it


@dataclass(frozen=True, slots=True)
class FaultCost:
    """The cost of a fault. It is `survived` once a later step is logged, or the run has finished."""

    name: str
    at_step: int
    seconds_lost: float
    tokens_regenerated: int
    survived: bool


def surviving_rows(rows: Iterable[RowT], when: Callable[[RowT], float] = lambda row: row.time_s) -> list[RowT]:
    """Return the rows in the order of time, without those that a restarted trainer will repeat.

    A trainer restarted at step 10 replaces the rows of 11, 12, ... one after the other. A row that is older than
    its predecessor was logged before the restart.
    """
    kept: list[RowT] = []
    newest: dict[int, float] = {}
    for row in sorted(rows, key=lambda r: (r.timeline, r.step)):
        if when(row) >= newest.get(row.timeline, when(row)):
            newest[row.timeline] = when(row)
            kept.append(row)
    return sorted(kept, key=when)


def journalled_faults(history: History) -> list[Fault]:
    """Return the faults in the journal while the run was live.

    These are lost or replaced machines, jobs that failed, and restarts of the gateway or the controller.
    """
    ledger = _Ledger()
    for _, time_s, events in history:
        for event in events:
            ledger.enter(event, time_s)
    return ledger.found


@dataclass(slots=True)
class _Ledger:
    """The state between two journal events that is needed to recognize faults."""

    found: list[Fault] = field(default_factory=list)
    slots: dict[str, str] = field(default_factory=dict)
    phases: dict[str, NodePhase] = field(default_factory=dict)
    counted: set[str] = field(default_factory=set)  # nodes that are terminating, or whose fault is in `found`
    run: RunPhase = RunPhase.STARTING
    controllers: int = 0
    gateways: int = 0

    def enter(self, event: Event, time_s: float) -> None:
        match event:
            case RunMoved():
                self.run = event.phase
                if event.phase is RunPhase.STARTING:
                    self.gateways = 0  # a resumed run starts a new gateway
            case NodeRequested():
                self.slots[event.node] = event.slot
            case NodeMoved():
                self._moved(event, time_s)
            case JobExited() if event.exit_code in DELIBERATE_EXITS:
                self.gateways = 0  # the gateway stops and starts with the trainer's job
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
            case ControllerTookOver():
                self.controllers += 1
                if self.controllers > 1:
                    self._add("controller replaced", DAEMON, time_s)
            case _:
                pass  # other events are not faults

    def _moved(self, event: NodeMoved, time_s: float) -> None:
        before, self.phases[event.node] = self.phases.get(event.node), event.phase
        if event.node in self.counted:
            return
        if event.phase is NodePhase.GONE:
            self._add(f"{event.node} lost", self.slots[event.node], time_s)
        elif event.phase is NodePhase.TERMINATING:
            self.counted.add(event.node)
            if before is NodePhase.SERVING and not event.is_released:
                self._add(f"{event.node} terminated", self.slots[event.node], time_s)

    def _add(self, name: str, target: str, time_s: float, at_step: int | None = None) -> None:
        if self.run in LIVE_RUN:
            self.found.append(Fault(name, target, time_s, time_s, at_step))


def merge_faults(rehearsed: Iterable[Fault], journalled: Iterable[Fault]) -> list[Fault]:
    """Return each fault once, in order. A journalled fault that an earlier one explains is a trace of that one.

    A fault explains a single trace of each target it hits, within TRACE_S. A loss of the trainer's machine also
    hits the gateway.
    """
    known = [(fault, set[str]()) for fault in rehearsed]
    recent = list(range(len(known)))  # indices of faults that are recent enough to explain a trace
    for trace in sorted(journalled, key=lambda fault: fault.struck_s):
        recent = [index for index in recent if trace.struck_s <= known[index][0].struck_s + TRACE_S]
        causes = [
            index
            for index, (fault, explained) in ((index, known[index]) for index in recent)
            if fault.struck_s - TICK_S <= trace.struck_s
            and trace.target not in explained
            and _hits(fault.target, trace.target)
        ]
        if causes:
            index = max(causes, key=lambda index: known[index][0].struck_s)
            fault, explained = known[index]
            explained.add(trace.target)
            known[index] = (replace(fault, seen_s=max(fault.seen_s, trace.seen_s)), explained)
        else:
            recent.append(len(known))
            known.append((trace, {trace.target}))
    return sorted((fault for fault, _ in known), key=lambda fault: fault.struck_s)


def _hits(target: str, slot: str) -> bool:
    if slot == GATEWAY:
        return target == GATEWAY or target.startswith(Role.TRAINER)
    return slot == target or slot.startswith(f"{target.removesuffix('s')}-") or target.startswith(f"{slot}-i")


def fault_costs(rows: Sequence[LoggedRow], faults: Sequence[Fault], *, finished: bool = False) -> list[FaultCost]:
    """Return the cost of each fault, in their order.

    The gap between two logged steps costs its excess over the median gap without faults. The cost is shared evenly
    by the faults that happened before its end and were last seen after its start, as are the tokens discarded in
    the step that ended it. A step counts when the run first completed it, so the time to repeat steps is in the
    gap after the last step before them.
    """
    path = surviving_rows(rows, lambda row: row.reached_s)
    gaps = list(pairwise(path))
    inside = _faults_in_gaps(path, faults)
    spans = [end.reached_s - start.reached_s for start, end in gaps]
    usual_s = median([span for span, hit in zip(spans, inside, strict=True) if not hit] or spans or [0.0])
    seconds, tokens = [0.0] * len(faults), [0] * len(faults)
    steps_at = _steps_at(path, faults)
    for (_, end), span, hit in zip(gaps, spans, inside, strict=True):
        for rank, n in enumerate(hit):
            seconds[n] += (span - usual_s) / len(hit)
            # Whole tokens: the first faults take the remainder.
            tokens[n] += end.tokens_discarded // len(hit) + (rank < end.tokens_discarded % len(hit))
    return [
        FaultCost(
            name=fault.name,
            at_step=step_at if fault.at_step is None else fault.at_step,
            seconds_lost=max(0.0, lost),  # a gap that was shorter than usual lost nothing
            tokens_regenerated=regenerated,
            survived=finished or (bool(path) and path[-1].reached_s > fault.struck_s),
        )
        for fault, lost, regenerated, step_at in zip(faults, seconds, tokens, steps_at, strict=True)
    ]


def _faults_in_gaps(path: Sequence[LoggedRow], faults: Sequence[Fault]) -> list[list[int]]:
    """Return, for each gap between rows, the faults that happened before its end and were seen after its start.

    Uses bisection, because a long run has ten thousand rows and may have as many faults.
    """
    times_s = [row.reached_s for row in path]
    found: list[list[int]] = [[] for _ in times_s[1:]]
    for n, fault in enumerate(faults):
        first = max(0, bisect_left(times_s, fault.struck_s) - 1)
        last = min(len(found), bisect_left(times_s, fault.seen_s))
        for gap in range(first, last):
            found[gap].append(n)
    return found


def _steps_at(path: Sequence[LoggedRow], faults: Sequence[Fault]) -> list[int]:
    """Return the highest step that was logged before each fault."""
    times_s = [row.reached_s for row in path]
    highest = [0, *accumulate((row.step for row in path), max)]
    return [highest[bisect_right(times_s, fault.struck_s)] for fault in faults]


# The rows of the current timeline and its ancestors, and those that rollbacks abandoned.


@dataclass(frozen=True, slots=True)
class Abandoned:
    """The steps that a rollback abandoned, from after its start to `last_step`."""

    last_step: int
    steps: int
    tokens: int


def split_by_line(rows: Iterable[RowT], forks: Sequence[Fork]) -> tuple[list[RowT], list[RowT]]:
    """Return the rows of the current timeline and its ancestors, and those that rollbacks abandoned.

    `forks` are all forks in the store, in order. The order of the rows is kept.
    """
    stretches = lineage(forks, forks[-1].timeline if forks else 0)
    line: list[RowT] = []
    abandoned: list[RowT] = []
    for row in rows:
        (line if on_lineage(PolicyVersion(row.timeline, row.step), stretches) else abandoned).append(row)
    return line, abandoned


def abandoned(rows: Sequence[LoggedRow], rollbacks: Sequence[Rollback]) -> list[Abandoned]:
    """Return what each rollback abandoned, in their order. A step counts only for the first that abandoned it."""
    found = []
    for index, rollback in enumerate(rollbacks):
        line, _ = split_by_line(rows, [earlier.fork for earlier in rollbacks[:index]])
        start = rollback.fork.start_at
        start_step = 0 if start is None else start.step
        lost = [row for row in line if row.step > start_step]
        # The old trainer may have made more steps before it stopped.
        last_step = max([rollback.from_step, *(row.step for row in lost)])
        found.append(Abandoned(last_step, max(0, last_step - start_step), sum(row.tokens for row in lost)))
    return found
