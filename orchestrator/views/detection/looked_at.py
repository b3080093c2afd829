"""What a run's metrics say where nothing is wrong with them, or where they are too few to tell."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from orchestrator.traces.names import KL_SEQUENCE
from orchestrator.views.words.numbers import short
from policies.detect.divergence import Point
from policies.detect.symptoms import CLIPPED

WORDS = {
    "kl": "KL",
    KL_SEQUENCE: "KL of whole completions",
    "reward": "reward",
    "grad_norm": "gradient norm",
    "entropy": "entropy",
    "completions/mean_length": "completion length",
    CLIPPED: "share of cut completions",
}
# The present is told from seven points, and takes as many of a past to be compared with.
POINTS_LEAST = 14
ENDS_POINTS = 7
KL_NOTHING = 1e-5  # some trainers log 0 where they compute no KL


@dataclass(frozen=True, slots=True)
class Course:
    """One metric over a run: how many finite numbers, and the medians of the first and the last of them.

    `wobble` is the median distance between neighbours, in the metric's unit.
    """

    points: int
    start: float
    end: float
    wobble: float


def courses(points: Sequence[Point]) -> dict[str, Course]:
    """The course of each metric that the detectors look at and the run has logged."""
    found = {}
    for name in WORDS:
        values = [
            value for point in points if (value := point.values.get(name)) is not None and math.isfinite(value)
        ]
        if values:
            wobble = median(abs(b - a) for a, b in pairwise(values)) if len(values) > 1 else 0.0
            start, end = median(values[:ENDS_POINTS]), median(values[-ENDS_POINTS:])
            found[name] = Course(len(values), start, end, wobble)
    return found


def kl_of(seen: Mapping[str, Course]) -> str | None:
    """The metric that is the run's KL, None where it logged none."""
    return next((name for name in ("kl", KL_SEQUENCE) if name in seen), None)


def why_unknown(points: Sequence[Point], seen: Mapping[str, Course]) -> str | None:
    """Why such a run cannot be called healthy, and what would help; None where it can.

    KL and reward are what a divergence shows in first. The other metrics may convict a run, never acquit it.
    """
    kl = kl_of(seen)
    zero = kl is not None and all(abs(point.values.get(kl) or 0.0) <= KL_NOTHING for point in points)
    telling = {"reward"} if zero else {kl, "reward"}
    judged = max((course.points for name, course in seen.items() if name in telling), default=0)
    if judged >= POINTS_LEAST:
        return None
    if judged:
        return (
            f"KL or reward at {judged} {'point' if judged == 1 else 'points'} only, and it takes {POINTS_LEAST}: "
            "look again later, or log more often (logging_steps: 1)"
        )
    missing = "KL is 0 throughout and no reward" if zero else "neither KL nor reward"
    return f"{missing} was logged; TRL logs `kl` where beta is above 0, and `reward` always"


def in_words(seen: Mapping[str, Course]) -> str:
    """One sentence: what was looked at, and how KL and reward went."""
    if not seen:
        return "no metric that a divergence shows in was logged"
    counts: dict[int, list[str]] = {}
    for name, course in seen.items():
        counts.setdefault(course.points, []).append(WORDS[name])
    told = " and ".join(
        f"{count:,} {'point' if count == 1 else 'points'} of {', '.join(names)}"
        for count, names in sorted(counts.items(), reverse=True)
    )
    went = []
    if kl := kl_of(seen):
        went.append(f"{WORDS[kl]} ended at {short(seen[kl].end)}")
    if "reward" in seen:
        went.append(_reward(seen["reward"]))
    return f"looked at {told}" + (f": {', '.join(went)}" if went else "")


def _reward(course: Course) -> str:
    start, end = short(course.start), short(course.end)
    if start == end or abs(course.end - course.start) <= course.wobble:
        return f"reward stayed at about {end}"
    return f"reward {'rose' if course.end > course.start else 'fell'} from {start} to {end}"
