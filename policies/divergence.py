"""Whether a run diverges, told from what its trainer logs: healthy, to be watched, or tripped, and since when.

Pure and incremental: the trainer follows each point as it is logged, the controller follows the stored rows, and
both come to the same verdict.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum


class Health(StrEnum):
    """How a run is."""

    HEALTHY = "healthy"
    WATCH = "watch"  # something is off; the checkpoints from before it are kept
    TRIPPED = "tripped"  # it diverges; stays


@dataclass(frozen=True, slots=True)
class Point:
    """What was logged at one step, by TRL's names. None: it was logged and was no finite number."""

    step: int
    values: Mapping[str, float | None]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is known after a point.

    `onset_step` is the first step that the excursion under way may have touched: a checkpoint of an earlier step is
    untouched. None while healthy. `evidence` is a sentence a signal, the strongest first.
    """

    health: Health = Health.HEALTHY
    step: int = 0
    onset_step: int | None = None
    tripped_step: int | None = None
    evidence: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Detector:
    """What must be remembered between two points. JSON types only."""

    verdict: Verdict = Verdict()
    points: int = 0


def follow(detector: Detector, point: Point, limit: float | None = None) -> Detector:  # noqa: ARG001  # in the making
    """Return the detector after one more logged point.

    Args:
        limit: `policies.kl.limit`, KL above the run's own start; None where the user gave none.
    """
    if point.step <= detector.verdict.step:
        return detector
    return replace(detector, verdict=replace(detector.verdict, step=point.step), points=detector.points + 1)
