"""`grpo-orch detect`: run the divergence detectors over the metrics of any GRPO run.

First the verdict on a run, then its table and JSON, then the command.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from grpo_orch.orchestrator.cli.options import AsJson, Output, Stop, console, errors, print_json, print_line
from grpo_orch.orchestrator.traces.formats import NotATrace
from grpo_orch.orchestrator.traces.read import Trace, read_traces
from grpo_orch.orchestrator.views.formatting import UNKNOWN_TEXT, plain_table, short
from grpo_orch.policies.detect.divergence import NOT_FINITE, Detector, Health, Point, Verdict, follow
from grpo_orch.policies.detect.symptoms import CLIPPED, KL, KL_SEQUENCE, SIGNALS
from grpo_orch.policies.model import exit_codes

# Metrics that the detectors read, and their names in sentences.
WORDS = {
    "kl": "KL",
    KL_SEQUENCE: "KL of whole completions",
    "reward": "reward",
    "grad_norm": "gradient norm",
    "entropy": "entropy",
    "completions/mean_length": "completion length",
    CLIPPED: "share of cut completions",
}
# The detectors compare a present of seven points with a past of at least seven.
POINTS_MIN = 14
ENDS_POINTS = 7
KL_ZERO = 1e-5  # some trainers log 0 when they compute no KL


@dataclass(frozen=True, slots=True)
class Curve:
    """One metric over a run: the count of finite numbers, and the medians of the first and last ones.

    `wobble` is the median distance between neighbours, in the metric's unit.
    """

    points: int
    start: float
    end: float
    wobble: float


def curves(points: Sequence[Point]) -> dict[str, Curve]:
    """Return the course of each logged metric that the detectors read."""
    found = {}
    for name in WORDS:
        values = [
            value for point in points if (value := point.values.get(name)) is not None and math.isfinite(value)
        ]
        if values:
            wobble = median(abs(b - a) for a, b in pairwise(values)) if len(values) > 1 else 0.0
            start, end = median(values[:ENDS_POINTS]), median(values[-ENDS_POINTS:])
            found[name] = Curve(len(values), start, end, wobble)
    return found


def kl_of(seen: Mapping[str, Curve]) -> str | None:
    """Return the metric that is the run's KL, None if none was logged."""
    return next((name for name in ("kl", KL_SEQUENCE) if name in seen), None)


def why_unknown(points: Sequence[Point], seen: Mapping[str, Curve]) -> str | None:
    """Explain why the run cannot be called healthy, and what would help; None if it can.

    A divergence shows first in KL and reward. Without these, other metrics can prove a divergence but not health.
    """
    kl = kl_of(seen)
    is_zero = kl is not None and all(abs(point.values.get(kl) or 0.0) <= KL_ZERO for point in points)
    decisive = {"reward"} if is_zero else {kl, "reward"}
    count = max((course.points for name, course in seen.items() if name in decisive), default=0)
    if count >= POINTS_MIN:
        return None
    if count:
        return (
            f"only {count} {'point' if count == 1 else 'points'} of KL or reward, {POINTS_MIN} are needed: "
            "try again later, or log more often (logging_steps: 1)"
        )
    missing = "KL is always 0 and no reward" if is_zero else "neither KL nor reward"
    return f"{missing} was logged; TRL logs `kl` if beta is above 0, and always logs `reward`"


def summary(seen: Mapping[str, Curve]) -> str:
    """Return one sentence: which metrics were checked, and how KL and reward changed."""
    if not seen:
        return "no metric that shows a divergence was logged"
    counts: dict[int, list[str]] = {}
    for name, course in seen.items():
        counts.setdefault(course.points, []).append(WORDS[name])
    checked = " and ".join(
        f"{count:,} {'point' if count == 1 else 'points'} of {', '.join(names)}"
        for count, names in sorted(counts.items(), reverse=True)
    )
    changes = []
    if kl := kl_of(seen):
        changes.append(f"{WORDS[kl]} ended at {short(seen[kl].end)}")
    if "reward" in seen:
        changes.append(_reward_words(seen["reward"]))
    return f"checked {checked}" + (f": {', '.join(changes)}" if changes else "")


def _reward_words(course: Curve) -> str:
    start, end = short(course.start), short(course.end)
    if start == end or abs(course.end - course.start) <= course.wobble:
        return f"reward stayed at about {end}"
    return f"reward {'rose' if course.end > course.start else 'fell'} from {start} to {end}"


UNKNOWN = "unknown"
JUDGED = frozenset((KL, KL_SEQUENCE, *NOT_FINITE, *(signal.name for signal in SIGNALS)))
_STEP = re.compile(r"\bstep(?= \d)")


@dataclass(frozen=True, slots=True)
class Detection:
    """The verdict at the end of a run.

    `target_step` is the step of the checkpoint that a rollback would return to, 0 for the start; None if nothing
    tripped or the file has no steps. `save_steps` is None if unknown. `unknown` explains why the run cannot be
    called healthy; None if it can, or if it is worse.
    """

    file: str
    trace: Trace
    verdict: Verdict
    target_step: int | None
    save_steps: int | None
    seen: Mapping[str, Curve]
    unknown: str | None

    @property
    def name(self) -> str:
        """The file's name and, if it holds several runs, the run's."""
        return f"{self.file}#{self.trace.run}" if self.trace.run else self.file

    @property
    def tripped(self) -> bool:
        return self.verdict.health is Health.TRIPPED

    @property
    def kl(self) -> str | None:
        """The name of the KL metric."""
        return kl_of(self.seen)

    @property
    def health(self) -> str:
        """The detectors' verdict, or UNKNOWN."""
        return UNKNOWN if self.unknown else str(self.verdict.health)

    @property
    def evidence(self) -> list[str]:
        """The evidence in sentences. A run that ends in state WATCH has an extra first one."""
        watch = f"possible divergence at its end, step {self.verdict.step}, since step {self.verdict.onset_step}"
        found = ([watch] if self.verdict.health is Health.WATCH else []) + list(self.verdict.evidence)
        return [_STEP.sub("record", sentence) for sentence in found] if self.trace.counts_records else found

    @property
    def columns_taken(self) -> dict[str, str]:
        """The file's columns that the detectors read, by metric."""
        return {name: column for column, name in self.trace.columns.items() if name in JUDGED}

    @property
    def columns_unused(self) -> list[str]:
        """The file's other columns."""
        return [column for column, name in self.trace.columns.items() if name not in JUDGED]


def judge(
    file: str,
    trace: Trace,
    limit: float | None,
    save_steps: int | None,
    task_changes: Collection[int] = (),
) -> Detection:
    """Follow the trace from its first point to its last.

    Args:
        limit: maximum KL above its initial value; None for no limit.
        save_steps: steps between checkpoints, for files that do not record it. If unknown, any logged step is
            assumed to have a checkpoint.
        task_changes: the first steps of harder tasks.
    """
    detector = Detector()
    for point in trace.points:
        detector = follow(detector, point, limit, task_changes)
    verdict, saved = detector.verdict, trace.save_steps or save_steps
    target = None
    if verdict.health is Health.TRIPPED and verdict.onset_step is not None and not trace.counts_records:
        target = _target(trace, verdict.onset_step, saved)
    seen = curves(trace.points)
    unknown = why_unknown(trace.points, seen) if verdict.health is Health.HEALTHY else None
    return Detection(file, trace, verdict, target, saved, seen, unknown)


def _target(trace: Trace, onset_step: int, save_steps: int | None) -> int:
    """Return the newest step below the onset that has a checkpoint, 0 for the start."""
    if save_steps is not None:
        return max(0, onset_step - 1) // save_steps * save_steps
    return max((point.step for point in trace.points if 0 < point.step < onset_step), default=0)


def to_json(result: Detection) -> dict[str, Any]:
    """Return the result as JSON data, with the same keys for every run and every unreadable file."""
    values = {
        "file": result.file,
        "run": result.trace.run or None,
        "points": len(result.trace.points),
        "unit": "record" if result.trace.counts_records else "step",
        "health": result.health,
        "reason": result.unknown,
        "tripped": result.tripped,
        "trip_step": result.verdict.tripped_step if result.tripped else None,
        "onset_step": result.verdict.onset_step if result.tripped else None,
        "target_step": result.target_step,
        "evidence": result.evidence,
        "columns": result.columns_taken,
        "columns_unused": result.columns_unused,
        "looked_at": {
            name: {"points": course.points, "start": course.start, "end": course.end}
            for name, course in result.seen.items()
        },
    }
    return dict.fromkeys(KEYS) | values


KEYS = (
    *("file", "run", "points", "unit", "health", "reason", "tripped", "trip_step", "onset_step", "target_step"),
    *("evidence", "columns", "columns_unused", "looked_at", "error"),
)


# A table with one line per run, the evidence for each verdict, and counts.

HEALTH_STYLES = {
    Health.TRIPPED: "bold red",
    Health.WATCH: "yellow",
    UNKNOWN: "yellow",
    Health.HEALTHY: "green",
}
RECORDS = "the log has no steps: trip and onset are record numbers, and no checkpoint can be named"
ANY_STEP = (
    "target: the last step logged before the onset, if the file does not record how often its run saved; "
    "with --save-steps N, the newest checkpoint before the onset"
)


def render(found: Sequence[Detection]) -> RenderableType:
    """Draw a table with one line per run, and below it the evidence for each verdict."""
    table = plain_table()
    table.add_column("run", overflow="fold")
    for title in ("points", "KL at end", "health", "trip", "onset", "target"):
        table.add_column(title, no_wrap=True, justify="left" if title == "health" else "right")
    parts: list[RenderableType] = [table]
    for detection in found:
        kl = Text("not logged", style="yellow")
        if detection.kl is not None:
            kl = Text(short(detection.seen[detection.kl].end))
        health = Text(detection.health, style=HEALTH_STYLES[detection.health])
        onset = detection.verdict.onset_step if detection.tripped else None
        target = "start" if detection.target_step == 0 else detection.target_step
        steps = (detection.verdict.tripped_step, onset, target)
        cells = [UNKNOWN_TEXT if step is None else str(step) for step in steps]
        table.add_row(Text(detection.name), f"{len(detection.trace.points):,}", kl, health, *cells)
        parts.append(Text(f"\n{detection.name}"))
        parts += [Padding(Text(f"- {sentence}"), (0, 0, 0, 2), expand=False) for sentence in _sentences(detection)]
    if any(detection.target_step and detection.save_steps is None for detection in found):
        parts.append(Text(f"\n{ANY_STEP}", style="dim"))
    if len(found) > 1:
        by_health = Counter(detection.health for detection in found)
        counts = ", ".join(f"{by_health[health]} {health}" for health in HEALTH_STYLES if by_health[health])
        parts.append(Text(f"\n{len(found)} runs: {counts}"))
    return Group(*parts)


def _sentences(detection: Detection) -> list[str]:
    notes = [RECORDS] if detection.trace.counts_records else []
    renamed = [f"{name} from {column}" for name, column in detection.columns_taken.items() if name != column]
    if renamed:
        notes.append(f"columns used: {', '.join(renamed)}; {len(detection.columns_unused)} others are not used")
    if detection.tripped:
        return [*detection.evidence, *notes]
    unknown = [detection.unknown] if detection.unknown else []
    return [*unknown, *detection.evidence, summary(detection.seen), *notes]


# The command.

REASON_CHARACTERS = 200


def detect(
    files: Annotated[
        list[Path],
        typer.Argument(
            help="A trainer's log, trainer_state.json, JSON lines, CSV or TensorBoard event file, "
            "optionally gzipped; a run's folder; or - for standard input."
        ),
    ],
    limit: Annotated[
        float | None,
        typer.Option("--limit", metavar="KL", help="Also trip when KL rises this far above its initial value."),
    ] = None,
    save_steps: Annotated[
        int | None,
        typer.Option(
            "--save-steps", metavar="N", help="Steps between checkpoints, if the file does not record it."
        ),
    ] = None,
    task_change: Annotated[
        list[int] | None,
        typer.Option("--task-change", metavar="STEP", help="First step of harder tasks. May be repeated."),
    ] = None,
    output: AsJson = Output.TEXT,
) -> None:
    """Find out from a run's metrics whether and where it diverged, and which checkpoint is still healthy.

    Exit code: 3 if a run tripped; else 2 if a file could not be read or the command is wrong; else 0. For each
    file that cannot be read, print one line on stderr and continue with the others.
    """
    if limit is not None and not (limit > 0 and math.isfinite(limit)):
        raise Stop(f"--limit {limit:g}: expected a number above 0")
    if save_steps is not None and save_steps < 1:
        raise Stop(f"--save-steps {save_steps}: expected a whole number above 0")
    results = [result for file in files for result in _detect_in(file, limit, save_steps, task_change or ())]
    detections = [result for result in results if isinstance(result, Detection)]
    if output is Output.JSON:
        print_json([to_json(result) if isinstance(result, Detection) else result for result in results])
    elif detections:
        console.print(render(detections))
    if any(detection.tripped for detection in detections):
        raise typer.Exit(exit_codes.TRIPPED)
    if len(detections) < len(results):
        raise typer.Exit(exit_codes.USAGE)


def _detect_in(
    file: Path, limit: float | None, save_steps: int | None, task_changes: Collection[int]
) -> list[Detection | dict[str, Any]]:
    """Return a result for every run in the file. For an unreadable one print a line, and return its JSON data."""
    try:
        traces = read_traces(file)
        return [judge(str(file), trace, limit, save_steps, task_changes) for trace in traces]
    except NotATrace as error:
        reason = str(error)
    except Exception as error:  # noqa: BLE001  # the remaining files must still be read
        reason = f"cannot be read: {type(error).__name__}: {' '.join(str(error).split())[:REASON_CHARACTERS]}"
    print_line(f"{file}: {reason}", errors)
    return [dict.fromkeys(KEYS) | {"file": str(file), "error": reason}]
