"""What the detectors find in runs whose metrics are in files: as a table for people, and as plain data."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from orchestrator.traces.read import Trace
from orchestrator.views.words import NOT_KNOWN, short
from policies.detect.divergence import NOT_FINITE, Detector, Health, Point, Verdict, follow
from policies.detect.symptoms import CLIPPED, KL, KL_SEQUENCE, SIGNALS

# What a run's metrics say where nothing is wrong with them, or where they are too few to tell.
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


CANNOT_TELL = "cannot tell"
JUDGED = frozenset((KL, KL_SEQUENCE, *NOT_FINITE, *(signal.name for signal in SIGNALS)))
_STEP = re.compile(r"\bstep(?= \d)")


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A file from which no run could be read, and why."""

    file: str
    error: str


@dataclass(frozen=True, slots=True)
class Detection:
    """The verdict at the end of a run.

    `run` names it within its file, "" where that holds one. `target_step` is of the checkpoint that a rollback
    would go to, 0 for the start; None where nothing tripped or the file names no steps. `save_steps`: how often
    the run saved, None where nobody says. `unknown`: why it cannot be called healthy, None where it can or is
    worse.
    """

    file: str
    run: str
    trace: Trace
    verdict: Verdict
    target_step: int | None
    save_steps: int | None
    seen: Mapping[str, Course]
    unknown: str | None

    @property
    def tripped(self) -> bool:
        return self.verdict.health is Health.TRIPPED

    @property
    def kl(self) -> str | None:
        """The metric that is its KL."""
        return kl_of(self.seen)

    @property
    def health(self) -> str:
        """As the detectors call it, or that they cannot tell."""
        return CANNOT_TELL if self.unknown else str(self.verdict.health)

    @property
    def looked_at(self) -> str:
        """One sentence on what was looked at."""
        return in_words(self.seen)

    @property
    def evidence(self) -> list[str]:
        """In words; of a run that ends under watch, that it does."""
        watch = f"on watch at its end, step {self.verdict.step}, since step {self.verdict.onset_step}"
        found = ([watch] if self.verdict.health is Health.WATCH else []) + list(self.verdict.evidence)
        return [_STEP.sub("record", sentence) for sentence in found] if self.trace.counts_records else found

    @property
    def columns_taken(self) -> dict[str, str]:
        """The file's columns by the metric they were taken for, of those that the detector judges."""
        return {name: column for column, name in self.trace.columns.items() if name in JUDGED}

    @property
    def columns_unused(self) -> list[str]:
        """The file's other columns."""
        return [column for column, name in self.trace.columns.items() if name not in JUDGED]


def detect(
    file: str,
    run: str,
    trace: Trace,
    limit: float | None,
    save_steps: int | None,
    task_changes: Collection[int] = (),
) -> Detection:
    """Follow the trace from its first point to its last.

    Args:
        limit: for KL above the run's own start; None for none.
        save_steps: how often the run saved, where the file does not say. Where nobody does, it could go back to
            any step that it logged.
        task_changes: the first steps of harder tasks.
    """
    detector = Detector()
    for point in trace.points:
        detector = follow(detector, point, limit, task_changes)
    verdict, saved = detector.verdict, trace.save_steps or save_steps
    target = None
    if verdict.health is Health.TRIPPED and verdict.onset_step is not None and not trace.counts_records:
        target = _target(trace, verdict.onset_step, saved)
    seen = courses(trace.points)
    unknown = why_unknown(trace.points, seen) if verdict.health is Health.HEALTHY else None
    return Detection(file, run, trace, verdict, target, saved, seen, unknown)


def _target(trace: Trace, onset_step: int, save_steps: int | None) -> int:
    """The newest step below the onset that has a checkpoint, 0 for the start."""
    if save_steps is not None:
        return max(0, onset_step - 1) // save_steps * save_steps
    return max((point.step for point in trace.points if 0 < point.step < onset_step), default=0)


def to_json(one: Detection | Unreadable) -> dict[str, Any]:
    """As plain data, with the same keys for every run and every file that could not be read."""
    if isinstance(one, Unreadable):
        return dict.fromkeys(KEYS) | {"file": one.file, "error": one.error}
    told = {
        "file": one.file,
        "run": one.run or None,
        "points": len(one.trace.points),
        "unit": "record" if one.trace.counts_records else "step",
        "health": one.health,
        "reason": one.unknown,
        "tripped": one.tripped,
        "trip_step": one.verdict.tripped_step if one.tripped else None,
        "onset_step": one.verdict.onset_step if one.tripped else None,
        "target_step": one.target_step,
        "evidence": one.evidence,
        "columns": one.columns_taken,
        "columns_unused": one.columns_unused,
        "looked_at": {
            name: {"points": course.points, "start": course.start, "end": course.end}
            for name, course in one.seen.items()
        },
    }
    return dict.fromkeys(KEYS) | told


KEYS = (
    *(
        "file",
        "run",
        "points",
        "unit",
        "health",
        "reason",
        "tripped",
        "trip_step",
        "onset_step",
        "target_step",
        "evidence",
    ),
    *("columns", "columns_unused", "looked_at", "error"),
)


# A table with a line a run, the evidence for each verdict, and counts.

HEALTH_STYLES = {
    Health.TRIPPED: "bold red",
    Health.WATCH: "yellow",
    CANNOT_TELL: "yellow",
    Health.HEALTHY: "green",
}
RECORDS = "the log names no steps: trip and onset count its records, and no checkpoint can be named"
ANY_STEP = (
    "target: the last step logged before the onset, where no file says how often its run saved; "
    "with --save-steps N the newest checkpoint from before it"
)


def labels(found: Sequence[Detection]) -> list[str]:
    """A name for each run, short and its own: of paths what differs, and its name in a file of several."""
    paths = [Path(one.file).parts for one in found]
    if len(set(paths)) > 1:
        while len({path[0] for path in paths}) == 1 < min(map(len, paths)):
            paths = [path[1:] for path in paths]
        while len({path[-1] for path in paths}) == 1 < min(map(len, paths)):
            paths = [path[:-1] for path in paths]
    files = [str(Path(*path)) for path in paths]
    return [f"{file}#{one.run}" if one.run else file for file, one in zip(files, found, strict=True)]


def render(found: Sequence[Detection]) -> RenderableType:
    """A line a run, and below the table what speaks for the verdict."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("run", overflow="fold")
    for title in ("points", "KL at end", "health", "trip", "onset", "target"):
        table.add_column(title, no_wrap=True, justify="left" if title == "health" else "right")
    parts: list[RenderableType] = [table]
    for label, one in zip(labels(found), found, strict=True):
        kl = Text("not logged", style="yellow") if one.kl is None else Text(short(one.seen[one.kl].end))
        health = Text(one.health, style=HEALTH_STYLES[one.health])
        onset = one.verdict.onset_step if one.tripped else None
        target = "start" if one.target_step == 0 else one.target_step
        steps = [NOT_KNOWN if step is None else str(step) for step in (one.verdict.tripped_step, onset, target)]
        table.add_row(Text(label), f"{len(one.trace.points):,}", kl, health, *steps)
        parts.append(Text(f"\n{label}"))
        parts += [Padding(Text(f"- {sentence}"), (0, 0, 0, 2), expand=False) for sentence in _told(one)]
    if any(one.target_step and one.save_steps is None for one in found):
        parts.append(Text(f"\n{ANY_STEP}", style="dim"))
    if len(found) > 1:
        counts = Counter(one.health for one in found)
        told = ", ".join(f"{counts[health]} {health}" for health in HEALTH_STYLES if counts[health])
        parts.append(Text(f"\n{len(found)} runs: {told}"))
    return Group(*parts)


def _told(one: Detection) -> list[str]:
    notes = [RECORDS] if one.trace.counts_records else []
    renamed = [f"{name} from {column}" for name, column in one.columns_taken.items() if name != column]
    if renamed:
        notes.append(f"columns taken: {', '.join(renamed)}; {len(one.columns_unused)} others are not judged")
    if one.tripped:
        return [*one.evidence, *notes]
    return [*([one.unknown] if one.unknown else []), *one.evidence, one.looked_at, *notes]
