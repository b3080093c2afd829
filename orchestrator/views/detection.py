"""What the detector makes of runs whose metrics are in files: a table, sentences, and JSON for programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from orchestrator.views.numbers import NOT_KNOWN
from orchestrator.views.traces import Trace
from policies.detect.divergence import Detector, Health, Verdict, follow

HEALTH_STYLES = {Health.HEALTHY: "green", Health.WATCH: "yellow", Health.TRIPPED: "bold red"}


@dataclass(frozen=True, slots=True)
class Detection:
    """The verdict at the end of a file. `target_step`: the checkpoint that a rollback would go to, 0 for the
    start; None where nothing tripped."""

    file: str
    trace: Trace
    verdict: Verdict
    target_step: int | None

    @property
    def tripped(self) -> bool:
        return self.verdict.health is Health.TRIPPED

    @property
    def evidence(self) -> list[str]:
        """In words; of a run that ends under watch, that it does."""
        watch = f"on watch at its end, step {self.verdict.step}, since step {self.verdict.onset_step}"
        return ([watch] if self.verdict.health is Health.WATCH else []) + list(self.verdict.evidence)


def detect(file: str, trace: Trace, limit: float | None, save_steps: int | None) -> Detection:
    """Follow the trace from its first point to its last.

    Args:
        limit: for KL above the run's own start; None for none.
        save_steps: how often the run saved, where the file does not say. Where nobody does, it could go back to
            any step that it logged.
    """
    detector = Detector()
    for point in trace.points:
        detector = follow(detector, point, limit)
    verdict = detector.verdict
    target = None
    if verdict.health is Health.TRIPPED and verdict.onset_step is not None:
        target = _target(trace, verdict.onset_step, trace.save_steps or save_steps)
    return Detection(file, trace, verdict, target)


def _target(trace: Trace, onset_step: int, save_steps: int | None) -> int:
    """The newest step below the onset that has a checkpoint, 0 for the start."""
    if save_steps is not None:
        return max(0, onset_step - 1) // save_steps * save_steps
    return max((point.step for point in trace.points if 0 < point.step < onset_step), default=0)


def to_json(one: Detection) -> dict[str, Any]:
    """The detection as plain data."""
    return {
        "file": one.file,
        "points": len(one.trace.points),
        "tripped": one.tripped,
        "trip_step": one.verdict.tripped_step if one.tripped else None,
        "onset_step": one.verdict.onset_step if one.tripped else None,
        "target_step": one.target_step,
        "evidence": one.evidence,
    }


def render(found: Sequence[Detection]) -> RenderableType:
    """A line a file, and below the table what speaks for the verdict."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("file", overflow="fold")
    for title in ("points", "KL", "health", "trip", "onset", "target"):
        table.add_column(title, no_wrap=True, justify="left" if title in ("KL", "health") else "right")
    parts: list[RenderableType] = [table]
    for one in found:
        plain = to_json(one)
        steps = [str(plain[key]) if plain[key] is not None else NOT_KNOWN for key in STEP_KEYS]
        kl = "logged" if one.trace.logged("kl") else Text("not logged", style="yellow")
        health = Text(one.verdict.health, style=HEALTH_STYLES[one.verdict.health])
        table.add_row(Text(one.file), str(plain["points"]), kl, health, *steps)
        if one.evidence:
            parts.append(Text(f"\n{one.file}"))
            parts += [Padding(Text(f"- {sentence}"), (0, 0, 0, 2), expand=False) for sentence in one.evidence]
    return Group(*parts)


STEP_KEYS = ("trip_step", "onset_step", "target_step")
