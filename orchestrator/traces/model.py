"""What is read of a file: the traces of its runs, or why there is none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from policies.detect.divergence import Point

EXPECTED = (
    "expected a trainer's log, trainer_state.json, JSON lines, CSV with a header, "
    "a TensorBoard event file or a trackio database"
)
Row = Mapping[str, Any]


class NotATrace(Exception):
    """A file from which no metrics can be read; the message is one line and names it."""


class Unreadable(Exception):
    """What a format's reader finds wrong, in words that follow the file's name."""


@dataclass(frozen=True, slots=True)
class Trace:
    """What a file holds of a run.

    `save_steps` is how often the run saved, None where the file does not say. If `counts_records`, no step was
    logged, and points are numbered by their records. `columns` names each metric by the file's column for it.
    """

    points: tuple[Point, ...]
    save_steps: int | None = None
    counts_records: bool = False
    columns: Mapping[str, str] = field(default_factory=dict)

    def logged(self, name: str) -> bool:
        """Whether the metric was ever logged."""
        return any(name in point.values for point in self.points)


@dataclass(frozen=True, slots=True)
class NamedTrace:
    """A trace and what to call it: the file, with `#` and the run where the file holds several."""

    name: str
    trace: Trace


@dataclass(frozen=True, slots=True)
class Log:
    """A file's rows in its order, under the names that they have there, as a format's reader hands them on."""

    rows: Sequence[Row]
    logging_steps: int | None = None  # how far apart rows without a step are; None: unknown
    save_steps: int | None = None
