"""Format numbers, times, texts, rollbacks and retention for people, the same way in every view."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from shlex import quote

from rich.cells import cell_len, chop_cells, set_cell_size
from rich.table import Table
from rich.text import Text

from grpo_orch.checkpoint.stream.catalog import Checkpoint
from grpo_orch.orchestrator.config.rules import LOGGING_STEPS
from grpo_orch.policies.control.rollback import TARGET_HINT
from grpo_orch.policies.detect.divergence import Verdict
from grpo_orch.policies.ledger.retention import (
    RetentionRules,
    StoredCheckpoint,
    keep_before,
    keep_since,
    rules_keeping,
)
from grpo_orch.policies.model.loss import TRL_DEFAULTS
from grpo_orch.policies.model.spec import RunSpec
from grpo_orch.policies.model.state import Rollback
from grpo_orch.policies.model.timelines import Fork, Skipped, lineage, on_lineage
from grpo_orch.policies.model.vocabulary import PolicyVersion, RollbackStage, RunPhase
from grpo_orch.policies.tick.snapshot import Trainer

UNKNOWN_TEXT = "–"
_BARS = "▁▂▃▄▅▆▇█"
_LAST_S = 253_402_300_799.0  # the last second of the year 9999; the estimated end of a stalled run is infinite


def format_time(time_s: float, form: str, *, local: bool = True) -> str:
    """Format a time with strftime, clamped to the years 1970 to 9999."""
    within_s = max(0.0, min(time_s, _LAST_S))
    return time.strftime(form, time.localtime(within_s) if local else time.gmtime(within_s))


def clock(time_s: float) -> str:
    """Return the local time of day, `14:03:59`."""
    return format_time(time_s, "%H:%M:%S")


def duration(seconds: float) -> str:
    """Format seconds as `8 s`, `3:07 min`, `2:03 h` or `4.0 d`."""
    seconds = max(0.0, min(seconds, _LAST_S))
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02d} min"
    if whole < 48 * 3600:
        return f"{whole // 3600}:{whole % 3600 // 60:02d} h"
    return f"{seconds / 86400:.1f} d"


def seconds_words(value: float) -> str:
    """Format seconds as `0.4 s`, `13 s` or `2:03 min`: two significant figures below ten seconds."""
    return duration(value) if value >= 60 else f"{value:.0f} s" if value >= 10 else f"{value:.2g} s"


def overlap_words(step_s: float, sequential_s: float, overlapped_s: float, max_staleness: int) -> str:
    """Describe the gain of overlapping generation with training, or at a staleness of 0 the possible gain.

    Args:
        step_s: the actual seconds of a step.
        sequential_s: generation plus training.
        overlapped_s: the longer of the two.
        max_staleness: `rollout.max_staleness`.
    """
    now = seconds_words(step_s)
    if max_staleness:
        other = seconds_words(max(step_s, sequential_s))
        return f"with rollout.max_staleness: {max_staleness} a step takes {now} instead of about {other}"
    other = seconds_words(min(step_s, overlapped_s))
    return f"with rollout.max_staleness: 1 a step would take about {other} instead of {now}"


def short(value: float | None) -> str:
    """Format three significant figures, `1,240` and `0.00003`; a dash for None."""
    if value is None:
        return UNKNOWN_TEXT
    size = abs(value)
    if size >= 1e9 or 0 < size < 1e-7:
        return f"{value:.3g}"
    if size >= 999.5:
        return f"{value:,.0f}"
    if 0 < size < 1e-4:
        return f"{value:.{2 - math.floor(math.log10(size))}f}".rstrip("0")
    return f"{value:.3g}"


def usd(value: float) -> str:
    """Format dollars with two decimals, below ten cents with four."""
    return f"${value:,.2f}" if value >= 0.1 or value == 0 else f"${value:.4f}"


def data_size(size_bytes: int) -> str:
    """Format bytes as `512 B` or `14.2 GiB`."""
    value, units = float(size_bytes), ["KiB", "MiB", "GiB", "TiB"]
    if value < 1024:
        return f"{size_bytes} B"
    while value >= 1024 and units:
        value, unit = value / 1024, units.pop(0)
    return f"{value:.1f} {unit}"


def sparkline(values: Sequence[float], width: int) -> str:
    """Draw the values in at most `width` characters, each for the mean of its neighbours."""
    if not values:
        return ""
    size = max(1.0, len(values) / width)
    count = min(width, len(values))
    bounds = [round(index * size) for index in range(count)] + [len(values)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(bounds)]
    low, high = min(means), max(means)
    if high == low:
        return _BARS[3] * count
    return "".join(_BARS[round((mean - low) / (high - low) * (len(_BARS) - 1))] for mean in means)


# Untrusted text, escaped so that it can neither move nor hide its surroundings. A model's completions may contain
# control characters, marks that change text direction, and any amount of text.

SHOWN_MAX = 4000  # characters of one value; callers cut longer values themselves and show that they did

# Control characters except tab and line feed, direction marks and overrides, invisible characters and separators,
# surrogates (not encodable), and tags (never drawn).
INVISIBLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\U000e0000-\U000e007f]"
)


def escape_invisible(text: str, most: int = SHOWN_MAX) -> str:
    """Write each invisible character as `‹U+202E›`, and cut the text after `most` characters."""
    cut = text if len(text) <= most else f"{text[:most]} … and {len(text) - most:,} more characters"
    return INVISIBLE.sub(lambda found: f"‹U+{ord(found[0]):04X}›", cut)


# The stage of a rollback, and its changes.


@dataclass(frozen=True, slots=True)
class Change:
    """The value of a `grpo` key before and after; `before` is None for a TRL default that is not known here."""

    before: float | None
    after: float


def start_words(start: str | None) -> str:
    """Name the checkpoint that a timeline starts from."""
    return "the run's start" if start is None else f"checkpoint {start}"


def stage_words(rollback: Rollback) -> str:
    """Describe the stage of a rollback."""
    if rollback.passed:
        return "has passed its probation"
    match rollback.stage:
        case RollbackStage.BEGUN:
            return "is decided but not yet in the store"
        case RollbackStage.FORKED:
            return "is waiting for the old trainer to stop"
        case RollbackStage.FENCED:
            return "is waiting for its trainer"
        case RollbackStage.RESUMED:
            return "is training and waiting for the fleet"
        case RollbackStage.PROBATION:
            return f"is on probation until step {rollback.probation_until_step}"


def discarded_words(steps: int, tokens: int, windows: int, window_tokens: int) -> str:
    """Return `6 steps and 3,060 tokens discarded`, and how much of it was never trained on."""
    lost = f"{steps} steps and {tokens + window_tokens:,} tokens discarded"
    if not windows:
        return lost
    many = "1 window" if windows == 1 else f"{windows} windows"
    return f"{lost}, {window_tokens:,} of the tokens in {many} that no logged step used"


def changes_of(fork: Fork, before: Fork | None, grpo: Mapping[str, object]) -> dict[str, Change]:
    """Return what this fork changed in `grpo`. Its own `changes` include those of earlier forks."""
    known = {**TRL_DEFAULTS, **{key: value for key, value in grpo.items() if isinstance(value, int | float)}}
    known.update({} if before is None else before.changes)
    return {key: Change(known.get(key), value) for key, value in fork.changes.items() if known.get(key) != value}


def change_words(changes: Mapping[str, Change]) -> str:
    """Return `beta 0.02 → 0.04, learning_rate 1e-06 → 5e-07`."""
    return ", ".join(
        f"{key} {change.after:g}" if change.before is None else f"{key} {change.before:g} → {change.after:g}"
        for key, change in changes.items()
    )


def effect_words(effects: Mapping[str, str]) -> str:
    """Return `learning_rate: updates of half the size; beta: ...`, with keys of the same effect together."""
    by_text: dict[str, list[str]] = {}
    for key, text in effects.items():
        by_text.setdefault(text, []).append(key)
    return "; ".join(f"{', '.join(keys)}: {text}" for text, keys in by_text.items())


def skipped_of(fork: Fork, before: Fork | None) -> tuple[Skipped, ...]:
    """Return the steps whose prompts this fork skips and the fork before it did not."""
    known = () if before is None else before.skipped
    return tuple(span for span in fork.skipped if span not in known)


def skipped_words(skipped: Iterable[Skipped]) -> str:
    """Return `other prompts instead of those of steps 41 to 57 of timeline 0`."""
    spans = [f"steps {span.first_step} to {span.last_step} of timeline {span.timeline}" for span in skipped]
    return f"other prompts instead of those of {', '.join(spans)}" if spans else ""


# How to continue a run that ended before its last step.


def continue_command(phase: RunPhase, reason: str, store: str) -> str:
    """Return the command that continues the run; empty where there is none."""
    match phase:
        case RunPhase.FAILED:
            new = "a changed run.yaml needs a new run, with another `storage:`"
            return f"fix the cause ({new}), then continue with: grpo-orch resume {quote(store)}"
        case RunPhase.PAUSED if "`budget.usd" in reason:
            return f"continue with: grpo-orch resume --budget-usd NUMBER {quote(store)}"
        case RunPhase.PAUSED if TARGET_HINT in reason:
            return f"see: grpo-orch checkpoints ls {quote(store)}"
        case RunPhase.PAUSED:
            return f"continue with: grpo-orch rollback {quote(store)}"
        case RunPhase.GAVE_UP:
            return f"continue with: grpo-orch rollback --set KEY=NUMBER {quote(store)}"
        case _:
            return ""


# Which retention rules keep each checkpoint.


def keep_reasons(
    listed: Sequence[Checkpoint], spec: RunSpec, forks: Sequence[Fork], heartbeat: Trainer | None
) -> dict[PolicyVersion, tuple[str, ...]]:
    """Return the retention rules that keep each checkpoint, as of the newest checkpoint of the present line.

    A checkpoint that no rule keeps is deleted after the next save. `heartbeat` is the trainer's last; its guard's
    verdict decides how far back some checkpoints are kept.
    """
    timeline = max((fork.timeline for fork in forks), default=0)
    stretches = lineage(forks, timeline)
    on_line = (checkpoint.at.step for checkpoint in listed if on_lineage(checkpoint.at, stretches))
    newest_step = max(on_line, default=0)
    verdict = heartbeat.verdict if heartbeat is not None and heartbeat.timeline == timeline else None
    logging_steps = int(spec.grpo.get("logging_steps", LOGGING_STEPS))
    rules = RetentionRules(
        spec.checkpoints.keep_last,
        spec.checkpoints.keep_every_steps,
        keep_before(newest_step, verdict or Verdict(), logging_steps),
        keep_since(newest_step, logging_steps),
    )
    stored = [StoredCheckpoint(checkpoint.at, checkpoint.pinned) for checkpoint in listed]
    return rules_keeping(stored, forks, rules)


# Lines of a terminal. Widths are in cells, not characters. Lines are cut between words, so that numbers and names
# stay whole.

LABEL = 11  # cells of the label before a line of facts, including the blank after it
MORE = " …"
_JOINT = " · "


def plain(words: str) -> str:
    """Return the text on one line, without characters that move the cursor."""
    return " ".join(escape_invisible(words).split())


def fit(words: str, width: int) -> str:
    """Return the words that fit on one line, with an ellipsis where some do not."""
    return (wrap(words, width, 1) or [""])[0]


def wrap(words: str, width: int, most: int) -> list[str]:
    """Wrap to at most `most` lines of `width` cells; the last ends with an ellipsis if words are missing.

    A word that is wider than a line is broken.
    """
    if width <= 0 or most <= 0:
        return []
    lines, line = list[str](), ""
    for word in plain(words).split():
        joined = f"{line} {word}" if line else word
        if cell_len(joined) <= width:
            line = joined
            continue
        if line:
            lines.append(line)
        *whole, line = chop_cells(word, width) or [word]  # none of a word without width
        lines += whole
        if len(lines) > most:
            break
    if line:
        lines.append(line)
    if len(lines) <= most:
        return lines
    return [*lines[: most - 1], _ellipsis(lines[most - 1], width)]


def _ellipsis(line: str, width: int) -> str:
    while cell_len(line) + len(MORE) > width:
        head, _, _ = line.rpartition(" ")
        if not head:
            return set_cell_size(line, max(0, width - 1)).rstrip() + "…"
        line = head
    return line + MORE


def in_lines(parts: list[str], width: int, most: int) -> list[str]:
    """Join the parts into at most `most` lines, without breaking a part; parts that do not fit are left out."""
    lines = list[str]()
    for part in parts:
        if lines and cell_len(lines[-1] + _JOINT + part) <= width:
            lines[-1] += _JOINT + part
        elif len(lines) < most:
            lines.append(fit(part, width))
        else:
            break
    return lines


def joined(parts: list[str], width: int) -> str:
    """Join the parts on one line."""
    return (in_lines(parts, width, 1) or [""])[0]


def plain_table(*titles: str) -> Table:
    """Return a table without a frame."""
    return Table(*titles, box=None, pad_edge=False, header_style="dim")


def labelled_grid() -> Table:
    """Return a grid of labels and facts."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    return table


def align_left(words: str, width: int) -> str:
    """Pad with blanks on the right. Wider text is returned as it is."""
    return words + " " * (width - cell_len(words))


def align_right(words: str, width: int) -> str:
    """Pad with blanks on the left. Wider text is returned as it is."""
    return " " * (width - cell_len(words)) + words


def labelled(label: str, words: str, width: int, most: int = 1, style: str = "") -> list[Text]:
    """Return a fact on at most `most` lines, with its label before the first."""
    found = wrap(words, width - LABEL, most)
    return [
        Text(f"{align_left('' if index else label, LABEL)}{line}", style, no_wrap=True)
        for index, line in enumerate(found)
    ]


def cut(line: Text, width: int) -> Text:
    """Truncate a line that is not prose at the edge of the screen."""
    if line.cell_len > width:
        line.truncate(max(0, width))
    return line
