"""The controller's own eyes on the metrics: the detectors that the trainer runs, over the rows that it has stored.

So a run that diverges is noticed also where its trainer cannot tell, and a controller that comes later knows what
the one before it knew.

A look reads a bounded number of objects. A controller that comes late to a long run catches up over many looks,
and says nothing before it has. What it knew at the end of each object is kept: a trainer that starts again from an
earlier step, and a rollback, take it back to there, and only what follows is read anew.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

import structlog

from checkpoint.records import metrics
from checkpoint.records.metrics import Row, StepTiming, step_times, step_timings
from checkpoint.store import layout
from checkpoint.store.document import Unreadable
from checkpoint.store.run_store import Store
from policies.costs.steps import StepShape, own_shape_of, shape_of
from policies.detect.divergence import Detector, Point, follow
from policies.detect.pitfalls import Pitfall, Pitfalls, find_pitfalls
from policies.model.spec import KlPolicy
from policies.model.timelines import Fork, lineage, on_lineage
from policies.model.vocabulary import PolicyVersion
from policies.tick.snapshot import Trainer, Watched

log = structlog.get_logger()

T = TypeVar("T")

OBJECTS_A_LOOK = 4  # of a hundred rows each, which take 20 ms
RECENT_ROWS = 500  # the newest, from which it is told what a step consists of
TIMED_ROWS = 40  # among the newest, a step with a timing is looked for
KEPT_MAX = 64  # then every second one is let go: the older ones lie further and further apart

Stretches = tuple[PolicyVersion | int, ...]


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of the line up to a row, and where to read on.

    `step` is the last row's that the detector has followed; `noticed_step` the last one's in which pitfalls were
    looked for; both on `timeline`, or on one before it. `chunk` is the number of the next object of `timeline`.
    """

    timeline: int = 0
    chunk: int = 0
    step: int = 0
    noticed_step: int = 0
    detector: Detector = field(default_factory=Detector)
    pitfalls: Pitfalls = field(default_factory=Pitfalls)


class MetricsWatch:
    """Follows the rows of the present timeline and of what lies before it on its line.

    Args:
        store: the run's.
        kl: `policies.kl`.
        logging_steps: how many steps lie between two rows.
        unreadable: takes note of rows that cannot be read; they are left out.
    """

    def __init__(
        self, store: Store, kl: KlPolicy, logging_steps: int, unreadable: Unreadable | None = None
    ) -> None:
        self._store = store
        self._kl = kl
        self._logging_steps = logging_steps
        self._unreadable = unreadable or Unreadable()
        self._line: Stretches = (0,)  # oldest first
        self._kept: list[Known] = []
        self._known = Known()
        self._found: list[Pitfall] = []  # not told yet
        self._recent = deque[Row](maxlen=RECENT_ROWS)  # as they were read, those of steps made again twice
        self._shape: StepShape | None = None  # of them
        self._own_step: StepShape | None = None  # of those that were made without nodes
        self._shape_is_old = False
        self._attempt: tuple[str, int] | None = None  # of the trainer that was last seen to train
        self._stored_step = 0  # its newest stored checkpoint then

    def look(self, trainer: Trainer | None, forks: Sequence[Fork]) -> Watched | None:
        """Return the verdict on the newest timeline as of its newest row; None while no trainer has spoken, and
        while earlier rows are still to be read. Raises StoreError; the next look then reads on where this one did.

        Only rows of steps that the trainer has reached count: later ones are of an earlier attempt, and are
        replaced as it makes those steps again. Where another attempt began unseen, it went on from a checkpoint no
        older than the newest one that the attempt before it is known to have stored.
        """
        if trainer is None:
            return None
        timeline = forks[-1].timeline if forks else 0
        self._line = tuple(reversed(lineage(forks, timeline)))
        self._take_back(lambda at: on_lineage(at, self._line))
        # Until it trains it does not say where it goes on from.
        reach = trainer.step if trainer.timeline == timeline and trainer.max_steps > 0 else None
        if reach is not None:
            last_step = reach if self._goes_on(trainer) else min(reach, self._stored_step)
            self._take_back(lambda at: at.timeline != timeline or at.step <= last_step)
            self._attempt, self._stored_step = (trainer.node, trainer.attempt), trainer.stored_step or 0
        if not self._read_on(reach):
            return None
        found, self._found = tuple(self._found), []
        return Watched(timeline, self._known.detector.verdict, found)

    def newest_row(self) -> Row | None:
        """The last row that was read; None before there is one."""
        return self._recent[-1] if self._recent else None

    def newest_timing(self) -> StepTiming | None:
        """The timing of the newest step that was read and has one; None before there is one."""
        timings = step_timings(list(self._recent)[-TIMED_ROWS:])
        return timings[-1][1] if timings else None

    def step_shape(self) -> StepShape | None:
        """What the newest steps with nodes that were read consist of; None before there are enough."""
        self._measure()
        return self._shape

    def own_step(self) -> StepShape | None:
        """The same of steps whose completions the trainer made itself, as if by one node."""
        self._measure()
        return self._own_step

    def _measure(self) -> None:
        if self._shape_is_old:
            self._shape_is_old = False  # also where it fails: the next rows are another try
            steps = step_times(self._recent)
            self._shape, self._own_step = shape_of(steps), own_shape_of(steps)

    def _goes_on(self, trainer: Trainer) -> bool:
        return self._attempt in (None, (trainer.node, trainer.attempt))

    def _take_back(self, holds: Callable[[PolicyVersion], bool]) -> None:
        """Forget what was learnt from rows for which `holds` is false."""
        if holds(self._at(self._known)):
            return
        while self._kept and not holds(self._at(self._kept[-1])):
            self._kept.pop()
        self._known = self._kept[-1] if self._kept else Known(timeline=_number(self._line[0]))

    @staticmethod
    def _at(known: Known) -> PolicyVersion:
        return PolicyVersion(known.timeline, known.step)

    def _read_on(self, reach: int | None) -> bool:
        """Read the next objects, up to step `reach` of the present timeline. Returns whether these were all."""
        left = OBJECTS_A_LOOK
        for stretch in self._line:
            number = _number(stretch)
            if number < self._known.timeline:
                continue
            present = isinstance(stretch, int)
            last_step = reach if isinstance(stretch, int) else stretch.step
            if number > self._known.timeline:
                self._known = replace(self._known, timeline=number, chunk=_chunk_of(self._known.step + 1))
            if last_step is None or (present and last_step < self._known.step + self._logging_steps):
                return True
            numbers = self._numbers(number, last_step)
            for chunk in numbers[:left]:
                self._follow(self._rows(number, chunk), last_step, closed=not present or chunk != numbers[-1])
                if chunk != numbers[-1]:
                    self._keep(chunk + 1)
            left -= len(numbers)
            if left < 0:
                return False
        return True

    def _numbers(self, timeline: int, last_step: int) -> list[int]:
        """The objects of a timeline that are there, from the next one to that of `last_step`, in order."""
        first, last = self._known.chunk, _chunk_of(last_step)
        if first == last:
            return [first]
        there = {entry.key for entry in self._store.entries(layout.metrics(timeline))}
        named = (layout.metrics_chunk_of(key) for key in there)
        return sorted(number for number in named if number is not None and first <= number <= last)

    def _rows(self, timeline: int, chunk: int) -> list[Row]:
        key = layout.metrics_chunk(timeline, chunk * layout.METRICS_CHUNK_STEPS)
        return metrics.in_order(metrics.read_chunk(self._store, key, self._unreadable))

    def _follow(self, rows: Iterable[Row], last_step: int, *, closed: bool) -> None:
        """Follow the rows of an object. Unless it is `closed`, its newest row may still get an evaluation."""
        known, rows = self._known, [row for row in rows if row.step <= last_step]
        detector, pitfalls, noticed_step = known.detector, known.pitfalls, known.noticed_step
        for row in rows:
            if row.step > known.step:
                self._recent.append(row)
                self._shape_is_old = True
                detector = self._guarded(
                    row,
                    "divergence detector",
                    partial(follow, detector, metrics.point_of(row), self._kl.limit, self._kl.task_changes),
                    detector,
                )
        for row in rows if closed else rows[:-1]:
            if row.step > noticed_step:
                noticed_step = row.step
                # With what `point_of` leaves out: evaluations and our own numbers are what pitfalls are seen in.
                found = partial(find_pitfalls, pitfalls, Point(row.step, row.values))
                nothing: tuple[Pitfalls, tuple[Pitfall, ...]] = (pitfalls, ())
                pitfalls, new = self._guarded(row, "pitfalls", found, nothing)
                self._found += new
        step = max([known.step, *(row.step for row in rows)])
        self._known = replace(known, step=step, noticed_step=noticed_step, detector=detector, pitfalls=pitfalls)

    def _guarded(self, row: Row, what: str, evaluate: Callable[[], T], otherwise: T) -> T:
        """Evaluate a row; if that fails, report it once and continue as if the row had not been logged."""
        try:
            return evaluate()
        except Exception as error:  # an error in watching must not end what is watched
            log.exception("watch_failed", what=what, step=row.step)
            self._unreadable.note_failure(what, row.step, error)
            return otherwise

    def _keep(self, chunk: int) -> None:
        """Go on with another object, and remember what is known before it."""
        self._known = replace(self._known, chunk=chunk)
        self._kept.append(self._known)
        if len(self._kept) > KEPT_MAX:
            del self._kept[1::2]


def _number(stretch: PolicyVersion | int) -> int:
    return stretch if isinstance(stretch, int) else stretch.timeline


def _chunk_of(step: int) -> int:
    return step // layout.METRICS_CHUNK_STEPS
