"""Rows become points, one a step, and are told apart where they are of several runs.

A file may name its runs. Where it does not, a metric whose steps fall back speaks of a restart. One that falls to
the first step that was logged, or below, began anew: another run. One that falls short of it went on from a
checkpoint: the same run, and the steps that it logs again replace all from there on, as a rollback's do. A start
that died within its first logged steps is no run of its own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from orchestrator.traces import values as of
from orchestrator.traces.model import Log, Row
from orchestrator.traces.names import TIMELINE, TRAINING
from policies.detect.divergence import Point

STEPS_OF_A_RUN = 3  # logged: with fewer it is a start that failed

Named = list[tuple[str, tuple[Point, ...]]]


@dataclass(slots=True)
class _Run:
    steps: dict[int, of.Values] = field(default_factory=dict)
    first: int | None = None  # step that was logged
    last: dict[str, int] = field(default_factory=dict)  # step of each metric
    timeline: int = 0

    def again(self, step: int, names: Iterable[str]) -> bool:
        """Whether one of the metrics falls back to a step that has it, or to before all of them."""
        back = [name for name in names if self.last.get(name, step) > step]
        return any(name in self.steps.get(step, {}) for name in back) or bool(back and self.anew(step))

    def anew(self, step: int) -> bool:
        return self.first is not None and step <= self.first

    def forget(self, step: int) -> None:
        """What was logged from the step on."""
        self.steps = {at: kept for at, kept in self.steps.items() if at < step}
        self.last = {name: min(last, step - 1) for name, last in self.last.items()}

    def add(self, step: int, values: of.Values) -> None:
        self.steps.setdefault(step, {}).update(values)
        trained = TRAINING & values.keys()
        if trained and self.first is None:
            self.first = step
        self.last.update(dict.fromkeys(trained, step))

    @property
    def points(self) -> tuple[Point, ...]:
        return tuple(Point(step, self.steps[step]) for step in sorted(self.steps))


def counts_records(log: Log) -> bool:
    """Return whether no step is known, so that points are numbered by their records."""
    if log.logging_steps is not None:
        return False
    return all(of.step(row) is None for row in log.rows if of.metrics(row) is not None)


def runs(log: Log) -> Named:
    """The log's runs that have a metric of training, by name: "" for the only one, else the file's name or a
    number from 1."""
    by_name: dict[str, list[Row]] = defaultdict(list)
    for row in log.rows:
        by_name[of.run(row)].append(row)
    found: Named = []
    for name, rows in by_name.items():
        several = [run.points for run in _runs(rows, log.logging_steps or 1) if run.first is not None]
        for at, points in enumerate(several, start=1):
            number = str(at) if len(several) > 1 else ""
            found.append(("#".join(filter(None, (name, number))), points))
    return found if len(found) > 1 else [("", points) for _, points in found]


def _runs(rows: Iterable[Row], logging_steps: int) -> list[_Run]:
    """Rows of one step share its point, and where no row has a step they are counted. Evaluation without a step
    belongs to the row before it."""
    found = [(row, values) for row in rows if (values := of.metrics(row)) is not None]
    counted = all(of.step(row) is None for row, _ in found)
    several = [_Run()]
    at = 0
    for row, values in found:
        run, step, timeline = several[-1], of.step(row), row.get(TIMELINE)
        if counted and TRAINING & values.keys():
            at += logging_steps
        elif step is not None:
            at = step
        if isinstance(timeline, int):
            if timeline > run.timeline:
                run.timeline = timeline
                run.forget(at)
        elif run.again(at, TRAINING & values.keys()):
            if run.anew(at) and len(run.steps) >= STEPS_OF_A_RUN:
                several.append(run := _Run())
            else:
                run.forget(at)
        run.add(at, values)
    return several
