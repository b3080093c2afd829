"""How numbers, times, texts, rollbacks and retention are written for people, the same in every view."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from shlex import quote
from typing import assert_never

from rich.cells import cell_len, chop_cells, set_cell_size
from rich.text import Text

from checkpoint.stream.catalog import Checkpoint
from orchestrator.config.rules import LOGGING_STEPS
from policies.control.rollback.begin import NAME_A_TARGET
from policies.detect.divergence import Verdict
from policies.ledger.retention import RetentionRules, StoredCheckpoint, keep_before, keep_since, rules_keeping
from policies.model.loss import TRL_DEFAULTS
from policies.model.spec import RunSpec
from policies.model.state import Rollback
from policies.model.timelines import Fork, Skipped, lineage, on_lineage
from policies.model.vocabulary import PolicyVersion, RollbackStage, RunPhase
from policies.tick.snapshot import Trainer

NOT_KNOWN = "–"
_BARS = "▁▂▃▄▅▆▇█"
_LAST_S = 253_402_300_799.0  # the last second of the year 9999: a run that gets on by nothing ends at no time


def written(time_s: float, form: str, *, local: bool = True) -> str:
    """A time in a form of strftime's; one outside the years that calendars have is their first or last moment."""
    within_s = max(0.0, min(time_s, _LAST_S))
    return time.strftime(form, time.localtime(within_s) if local else time.gmtime(within_s))


def clock(time_s: float) -> str:
    """Local time of day, `14:03:59`."""
    return written(time_s, "%H:%M:%S")


def moment(time_s: float) -> str:
    """A day and a time that all read alike, `2026-11-30 18:00 UTC`."""
    return written(time_s, "%Y-%m-%d %H:%M UTC", local=False)


def duration(seconds: float) -> str:
    """`8 s`, `3:07 min`, `2:03 h`, `4.0 d`: two figures that matter, and the unit."""
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
    """`0.4 s`, `13 s`, `2:03 min`: two figures below ten seconds."""
    return duration(value) if value >= 60 else f"{value:.0f} s" if value >= 10 else f"{value:.2g} s"


def overlap_words(step_s: float, in_turns_s: float, overlapped_s: float, max_staleness: int) -> str:
    """Return in a sentence what generation ahead of training gains, or would gain at a staleness of 0.

    Args:
        step_s: a step as it is.
        in_turns_s: generation, then training.
        overlapped_s: the longer of both.
        max_staleness: `rollout.max_staleness`.
    """
    now = seconds_words(step_s)
    if max_staleness:
        other = seconds_words(max(step_s, in_turns_s))
        return f"with rollout.max_staleness: {max_staleness} a step takes {now} instead of about {other}"
    other = seconds_words(min(step_s, overlapped_s))
    return f"with rollout.max_staleness: 1 a step would take about {other} instead of {now}"


def short(value: float | None) -> str:
    """Three significant figures as people write them, `1,240` and `0.00003`; a dash for what is not known."""
    if value is None:
        return NOT_KNOWN
    size = abs(value)
    if size >= 1e9 or 0 < size < 1e-7:
        return f"{value:.3g}"
    if size >= 999.5:
        return f"{value:,.0f}"
    if 0 < size < 1e-4:
        return f"{value:.{2 - math.floor(math.log10(size))}f}".rstrip("0")
    return f"{value:.3g}"


def usd(value: float) -> str:
    """Cents where they matter, four decimals below ten cents."""
    return f"${value:,.2f}" if value >= 0.1 or value == 0 else f"${value:.4f}"


def data_size(size_bytes: int) -> str:
    """`512 B`, `14.2 GiB`."""
    value, units = float(size_bytes), ["KiB", "MiB", "GiB", "TiB"]
    if value < 1024:
        return f"{size_bytes} B"
    while value >= 1024 and units:
        value, unit = value / 1024, units.pop(0)
    return f"{value:.1f} {unit}"


def sparkline(values: Sequence[float], width: int) -> str:
    """At most `width` characters from the lowest to the highest value; neighbours share one by their mean."""
    if not values:
        return ""
    size = max(1.0, len(values) / width)
    count = min(width, len(values))
    bounds = [round(place * size) for place in range(count)] + [len(values)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(bounds)]
    low, high = min(means), max(means)
    if high == low:
        return _BARS[3] * count
    return "".join(_BARS[round((mean - low) / (high - low) * (len(_BARS) - 1))] for mean in means)


# Texts that others wrote, made fit to be shown: they can neither move nor hide what stands next to them. A
# model's completions may hold anything: control characters, marks that turn or hide text, and far too much of it.

SHOWN_MAX = 4000  # characters of one value; whoever shows longer ones cuts them for itself, and says so

# Controls but for tab and line feed, marks and overrides of direction, invisible characters and separators,
# surrogates, which no encoding has, and tags, which nothing draws.
_UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\U000e0000-\U000e007f]"
)


def shown(text: str, most: int = SHOWN_MAX) -> str:
    """The text with each character that is not seen written as `‹U+202E›`, and cut after `most` characters."""
    cut = text if len(text) <= most else f"{text[:most]} … and {len(text) - most:,} characters more"
    return _UNSEEN.sub(lambda found: f"‹U+{ord(found[0]):04X}›", cut)


# A run's timelines: how far a rollback is, and what it changed.


@dataclass(frozen=True, slots=True)
class Change:
    """A key of `grpo`: its value before, None where that is a default of TRL's not known here, and after."""

    before: float | None
    after: float


def start_words(start: str | None) -> str:
    """What a timeline goes on from."""
    return "the run's start" if start is None else f"checkpoint {start}"


def stage_words(rollback: Rollback) -> str:
    """What a rollback waits for, or that it has passed."""
    if rollback.passed:
        return "has passed its probation"
    match rollback.stage:
        case RollbackStage.BEGUN:
            return "is decided, and not yet in the store"
        case RollbackStage.FORKED:
            return "waits for the old trainer to end"
        case RollbackStage.FENCED:
            return "waits for its trainer"
        case RollbackStage.RESUMED:
            return "is trained, and waits for the fleet"
        case RollbackStage.PROBATION:
            return f"is on probation until step {rollback.probation_until_step}"
        case _:
            assert_never(rollback.stage)


def thrown_away_words(steps: int, tokens: int, windows: int, window_tokens: int) -> str:
    """`6 steps and 3,060 tokens thrown away`, and how much of it no logged step was trained on."""
    lost = f"{steps} steps and {tokens + window_tokens:,} tokens thrown away"
    if not windows:
        return lost
    many = "1 window" if windows == 1 else f"{windows} windows"
    return f"{lost}, {window_tokens:,} of them in {many} that no logged step was trained on"


def changes_of(fork: Fork, before: Fork | None, grpo: Mapping[str, object]) -> dict[str, Change]:
    """What this fork changed in `grpo`; its own `changes` hold those of its predecessors, too."""
    known = {**TRL_DEFAULTS, **{key: value for key, value in grpo.items() if isinstance(value, int | float)}}
    known.update({} if before is None else before.changes)
    return {key: Change(known.get(key), value) for key, value in fork.changes.items() if known.get(key) != value}


def change_words(changes: Mapping[str, Change]) -> str:
    """`beta 0.02 → 0.04, learning_rate 1e-06 → 5e-07`"""
    return ", ".join(
        f"{key} {one.after:g}" if one.before is None else f"{key} {one.before:g} → {one.after:g}"
        for key, one in changes.items()
    )


def effect_words(effects: Mapping[str, str]) -> str:
    """`learning_rate: updates of half the size; beta: ...`; keys with the same effect are told together."""
    by_text: dict[str, list[str]] = {}
    for key, text in effects.items():
        by_text.setdefault(text, []).append(key)
    return "; ".join(f"{', '.join(keys)}: {text}" for text, keys in by_text.items())


def skipped_of(fork: Fork, before: Fork | None) -> tuple[Skipped, ...]:
    """The steps whose prompts this fork leaves out, and the one before it did not."""
    known = () if before is None else before.skipped
    return tuple(one for one in fork.skipped if one not in known)


def skipped_words(skipped: Iterable[Skipped]) -> str:
    """`other prompts for those of steps 41 to 57 of timeline 0`"""
    told = [f"steps {one.first_step} to {one.last_step} of timeline {one.timeline}" for one in skipped]
    return f"other prompts for those of {', '.join(told)}" if told else ""


# How a run continues that has ended before its last step.


def going_on(phase: RunPhase, reason: str, store: str) -> str:
    """What its user can do; empty where there is nothing to go on with."""
    match phase:
        case RunPhase.FAILED:
            return f"once the cause is repaired, continue with: grpo-orch resume {quote(store)}"
        case RunPhase.PAUSED if "`budget.usd" in reason:
            return f"go on with: grpo-orch resume --budget-usd NUMBER {quote(store)}"
        case RunPhase.PAUSED if NAME_A_TARGET in reason:
            return f"see: grpo-orch checkpoints ls {quote(store)}"
        case RunPhase.PAUSED:
            return f"go on with: grpo-orch rollback {quote(store)}"
        case RunPhase.GAVE_UP:
            return f"go on by hand, with something changed: grpo-orch rollback {quote(store)}"
        case _:
            return ""


# Why each checkpoint of a run stays.


def kept_as(
    listed: Sequence[Checkpoint], spec: RunSpec, forks: Sequence[Fork], beat: Trainer | None
) -> dict[PolicyVersion, tuple[str, ...]]:
    """Return the rules of retention that keep each checkpoint, as of the newest one of the present line; none: it
    goes with the next. `beat` is the trainer's last: what its guard says decides how far back some are kept."""
    timeline = max((fork.timeline for fork in forks), default=0)
    stretches = lineage(forks, timeline)
    newest_step = max((one.at.step for one in listed if on_lineage(one.at, stretches)), default=0)
    verdict = beat.verdict if beat is not None and beat.timeline == timeline else None
    logging_steps = int(spec.grpo.get("logging_steps", LOGGING_STEPS))
    rules = RetentionRules(
        spec.checkpoints.keep_last,
        spec.checkpoints.keep_every_steps,
        keep_before(newest_step, verdict or Verdict(), logging_steps),
        keep_since(newest_step, logging_steps),
    )
    return rules_keeping([StoredCheckpoint(one.at, one.pinned) for one in listed], forks, rules)


# Lines of a terminal: words made to fit so many cells, which is not so many characters. They are cut between
# words, so that no number and no name loses a part of itself.

LABEL = 11  # cells of the word before a line of facts, the blank after it included
MORE = " …"
_JOINT = " · "


def plain(words: str) -> str:
    """On one line, and nothing in it that moves the cursor."""
    return " ".join(shown(words).split())


def fit(words: str, width: int) -> str:
    """As many words as there is room for, and an ellipsis where that is not all."""
    return (wrap(words, width, 1) or [""])[0]


def wrap(words: str, width: int, most: int) -> list[str]:
    """At most so many lines of at most `width` cells; the last one tells by an ellipsis that there was more.

    A word that is wider than a line is broken, and nothing of it is left out where there are lines enough.
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
        *whole, line = chop_cells(word, width)
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
    """The parts in at most so many lines, each part whole, as many from the first on as there is room for."""
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
    """The same on one line."""
    return (in_lines(parts, width, 1) or [""])[0]


def left(words: str, width: int) -> str:
    """Filled with blanks; what is wider is as wide as it is."""
    return words + " " * (width - cell_len(words))


def right(words: str, width: int) -> str:
    return " " * (width - cell_len(words)) + words


def labelled(label: str, words: str, width: int, most: int = 1, style: str = "") -> list[Text]:
    """A fact on at most so many lines, its label before the first."""
    found = wrap(words, width - LABEL, most)
    return [
        Text(f"{left('' if place else label, LABEL)}{line}", style, no_wrap=True)
        for place, line in enumerate(found)
    ]


def cut(line: Text, width: int) -> Text:
    """A line that is no prose, within the screen's edge whatever it holds."""
    if line.cell_len > width:
        line.truncate(max(0, width))
    return line
