"""Detections for people: a table with a line a run, what speaks for each verdict, and how many there were."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from orchestrator.views.detection.verdicts import CANNOT_TELL, Detection
from orchestrator.views.words import NOT_KNOWN, short
from policies.detect.divergence import Health

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
