"""The controller's own eyes on the metrics: the detectors that the trainer runs, over the rows that it has stored.

So a run that diverges is noticed also where its trainer cannot tell, and a controller that comes later knows what
the one before it knew.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from checkpoint import layout, metrics
from checkpoint.metrics import Row
from checkpoint.store import Store
from policies.abandoned import on_line
from policies.divergence import Detector, Point, follow
from policies.pitfalls import Pitfall, Pitfalls, watch_for
from policies.snapshot import Trainer, Watched
from policies.timelines import Fork


class MetricsWatch:
    """Follows the rows of the present timeline and of what lies before it on its line.

    Args:
        store: the run's.
        limit: `policies.kl.limit`.
        logging_steps: how many steps lie between two rows.
    """

    def __init__(self, store: Store, limit: float | None, logging_steps: int) -> None:
        self._store = store
        self._limit = limit
        self._logging_steps = logging_steps
        self._begin(None)

    def look(self, trainer: Trainer | None, forks: Sequence[Fork]) -> Watched | None:
        """Return the verdict on the newest timeline as of its newest row; None while no trainer has spoken.

        A trainer that was started again writes rows anew, so all are read again then. Raises StoreError, Corrupt.
        """
        if trainer is None:
            return None
        timeline = forks[-1].timeline if forks else 0
        present = (timeline, trainer.node, trainer.attempt)
        rows: list[Row] = []
        if present != self._followed:
            self._begin(present)
            rows, _ = on_line(metrics.read_metrics(self._store), forks)
        elif trainer.timeline == timeline and trainer.step >= self._step + self._logging_steps:
            rows = list(self._rows(timeline, self._noticed_step + 1, trainer.step))
        for row in rows:
            self._follow(row)
        return Watched(timeline, self._detector.verdict, self._notice(rows))

    def _begin(self, present: tuple[int, str, int] | None) -> None:
        self._followed = present
        self._step = 0
        self._noticed_step = 0
        self._detector = Detector()
        self._pitfalls = Pitfalls()

    def _follow(self, row: Row) -> None:
        if row.step > self._step:
            self._step = row.step
            self._detector = follow(self._detector, metrics.point_of(row), self._limit)

    def _notice(self, rows: Sequence[Row]) -> tuple[Pitfall, ...]:
        """Pitfalls in all rows but the newest: to that one an evaluation may still be added."""
        found: list[Pitfall] = []
        for row in rows[:-1]:
            self._noticed_step = row.step
            self._pitfalls, new = watch_for(self._pitfalls, Point(row.step, row.values))
            found += new
        return tuple(found)

    def _rows(self, timeline: int, first: int, last: int) -> Iterator[Row]:
        chunk = layout.METRICS_CHUNK_STEPS
        for number in range(first // chunk, last // chunk + 1):
            rows = metrics.read_chunk(self._store, layout.metrics_chunk(timeline, number * chunk))
            yield from (row for row in rows if row.step >= first)
