"""Run the trainer's divergence detectors on the stored metrics.

So the controller detects a divergence that the trainer cannot report, and a new controller knows what the previous
one knew.

A look reads a bounded number of objects; a controller that starts late in a long run needs several looks to catch
up, and reports nothing until then. After a restart from an earlier step, or a rollback, the watch reads all rows
again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import structlog

from grpo_orch.checkpoint.records import metrics
from grpo_orch.checkpoint.records.metrics import MetricsRow, StepTiming, step_times, step_timings
from grpo_orch.checkpoint.store import layout
from grpo_orch.checkpoint.store.document import UnreadableDocuments
from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.policies.costs.steps import StepShape, shape_of
from grpo_orch.policies.detect.divergence import Detector, Point, follow
from grpo_orch.policies.detect.pitfalls import Pitfall, Pitfalls, find_pitfalls
from grpo_orch.policies.model.spec import KlPolicy
from grpo_orch.policies.model.timelines import Fork, lineage, on_lineage
from grpo_orch.policies.model.vocabulary import PolicyVersion
from grpo_orch.policies.tick.snapshot import ControllerVerdict, Trainer

log = structlog.get_logger()

T = TypeVar("T")

OBJECTS_PER_READ = 4  # a hundred rows each, which take 20 ms
RECENT_ROWS = 500  # the newest rows, for the measured shape of a step
TIMED_ROWS = 40  # the newest rows, searched for a timed step

Line = tuple[PolicyVersion | int, ...]


@dataclass(slots=True)
class WatchState:
    """The detectors' state after a row, and the position to continue from.

    `step` is the last row that the detector has processed, `noticed_step` the last one checked for pitfalls; both
    on `timeline` or one before it. `chunk` is the number of the next object of `timeline`.
    """

    timeline: int = 0
    chunk: int = 0
    step: int = 0
    noticed_step: int = 0
    detector: Detector = field(default_factory=Detector)
    pitfalls: Pitfalls = field(default_factory=Pitfalls)


class MetricsWatch:
    """Processes the rows of the current timeline and its ancestors.

    Args:
        store: the run's store.
        kl: `policies.kl`.
        logging_steps: steps between two rows.
        unreadable: records rows that cannot be read; they are skipped.
    """

    def __init__(
        self, store: Store, kl: KlPolicy, logging_steps: int, unreadable: UnreadableDocuments | None = None
    ) -> None:
        self._store = store
        self._kl = kl
        self._logging_steps = logging_steps
        self._unreadable = unreadable or UnreadableDocuments()
        self._line: Line = (0,)  # oldest first
        self._state = WatchState()
        self._pitfalls: list[Pitfall] = []  # not returned yet
        self._recent = deque[MetricsRow](maxlen=RECENT_ROWS)  # as read; rows of repeated steps occur twice
        self._step_shape: StepShape | None = None
        self._is_shape_outdated = False
        self._attempt: tuple[str, int] | None = None  # of the last trainer that was seen training
        self._stored_step = 0  # its newest stored checkpoint at that time

    def observe(self, trainer: Trainer | None, forks: Sequence[Fork]) -> ControllerVerdict | None:
        """Return the verdict at the newest row of the newest timeline.

        Returns None before the first heartbeat, and while earlier rows remain to be read. Raises StoreError; the
        next look continues at the same position.

        Rows beyond the trainer's step are ignored: they are of an earlier attempt and are overwritten when the
        steps are repeated. An attempt whose start was not observed began at a checkpoint no older than the newest
        one that the previous attempt is known to have stored.
        """
        if trainer is None:
            return None
        timeline = forks[-1].timeline if forks else 0
        self._line = tuple(reversed(lineage(forks, timeline)))
        if not on_lineage(PolicyVersion(self._state.timeline, self._state.step), self._line):
            self._start_over()
        # Before it trains, the trainer does not report its start step.
        reached = trainer.step if trainer.timeline == timeline and trainer.max_steps > 0 else None
        if reached is not None:
            is_same_attempt = self._attempt in (None, (trainer.node, trainer.attempt))
            last_step = reached if is_same_attempt else min(reached, self._stored_step)
            if self._state.timeline == timeline and self._state.step > last_step:
                self._start_over()
            self._attempt, self._stored_step = (trainer.node, trainer.attempt), trainer.stored_step or 0
        if not self._read_on(reached):
            return None
        pitfalls, self._pitfalls = tuple(self._pitfalls), []
        return ControllerVerdict(timeline, self._state.detector.verdict, pitfalls)

    def newest_row(self) -> MetricsRow | None:
        """Return the last row that was read, or None."""
        return self._recent[-1] if self._recent else None

    def newest_timing(self) -> StepTiming | None:
        """Return the timing of the newest timed step that was read, or None."""
        timings = step_timings(list(self._recent)[-TIMED_ROWS:])
        return timings[-1][1] if timings else None

    def step_shape(self) -> StepShape | None:
        """Return the measured shape of recent steps; None before there are enough."""
        if self._is_shape_outdated:
            self._is_shape_outdated = False  # even on failure: the next rows are another try
            self._step_shape = shape_of(step_times(self._recent))
        return self._step_shape

    def _start_over(self) -> None:
        self._state = WatchState(timeline=_timeline_of(self._line[0]))

    def _read_on(self, reached: int | None) -> bool:
        """Read the next objects, up to step `reached` of the current timeline. Returns whether all are read."""
        remaining = OBJECTS_PER_READ
        for part in self._line:
            timeline = _timeline_of(part)
            if timeline < self._state.timeline:
                continue
            is_current = isinstance(part, int)
            last_step = reached if isinstance(part, int) else part.step
            if timeline > self._state.timeline:
                self._state.timeline, self._state.chunk = timeline, _chunk_of(self._state.step + 1)
            if last_step is None or (is_current and last_step < self._state.step + self._logging_steps):
                return True
            chunks = self._chunks(timeline, last_step)
            for chunk in chunks[:remaining]:
                is_closed = not is_current or chunk != chunks[-1]
                self._process(self._rows(timeline, chunk), last_step, is_closed=is_closed)
                if chunk != chunks[-1]:
                    self._state.chunk = chunk + 1
            remaining -= len(chunks)
            if remaining < 0:
                return False
        return True

    def _chunks(self, timeline: int, last_step: int) -> list[int]:
        """Return the numbers of a timeline's stored objects, from the next one to that of `last_step`."""
        first, last = self._state.chunk, _chunk_of(last_step)
        if first == last:
            return [first]
        keys = {entry.key for entry in self._store.entries(layout.metrics(timeline))}
        numbers = (layout.metrics_chunk_of(key) for key in keys)
        return sorted(number for number in numbers if number is not None and first <= number <= last)

    def _rows(self, timeline: int, chunk: int) -> list[MetricsRow]:
        key = layout.metrics_chunk(timeline, chunk * layout.METRICS_CHUNK_STEPS)
        return metrics.in_order(metrics.read_chunk(self._store, key, self._unreadable))

    def _process(self, rows: Iterable[MetricsRow], last_step: int, *, is_closed: bool) -> None:
        """Process the rows of an object. Unless it is closed, its newest row may still get an evaluation."""
        state, rows = self._state, [row for row in rows if row.step <= last_step]
        for row in rows:
            if row.step > state.step:
                self._recent.append(row)
                self._is_shape_outdated = True
                point, kl = metrics.point_of(row), self._kl
                advance = partial(follow, state.detector, point, kl.limit, kl.task_changes)
                state.detector = self._guarded(row, "divergence detector", advance, state.detector)
        for row in rows if is_closed else rows[:-1]:
            if row.step > state.noticed_step:
                state.noticed_step = row.step
                # `point_of` drops evaluations and the run's own metrics, which pitfalls need.
                find = partial(find_pitfalls, state.pitfalls, Point(row.step, row.values))
                unchanged: tuple[Pitfalls, tuple[Pitfall, ...]] = (state.pitfalls, ())
                state.pitfalls, new = self._guarded(row, "pitfalls", find, unchanged)
                self._pitfalls += new
        state.step = max([state.step, *(row.step for row in rows)])

    def _guarded(self, row: MetricsRow, check: str, evaluate: Callable[[], T], default: T) -> T:
        """Evaluate a row; if that fails, report it once and continue as if the row had not been logged."""
        try:
            return evaluate()
        except Exception as error:  # an error in watching must not stop the run
            log.exception("watch_failed", check=check, step=row.step)
            self._unreadable.note_failure(check, row.step, error)
            return default


def _timeline_of(part: PolicyVersion | int) -> int:
    return part if isinstance(part, int) else part.timeline


def _chunk_of(step: int) -> int:
    return step // layout.METRICS_CHUNK_STEPS
