"""Pictures as PNG: a run's curves, and detections. matplotlib takes half a second to import.

A run's lines are those of its present timeline. What rollbacks abandoned is drawn in grey, below them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Literal

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

from checkpoint.records.metrics import REWARD_MAX, REWARD_MIN, Row
from checkpoint.store.run_store import Store
from orchestrator.traces.names import KL_SEQUENCE
from orchestrator.views.detection import CANNOT_TELL, Detection, labels
from orchestrator.views.reader import Reader
from orchestrator.views.report import HELD_OUT, REWARD, run_faults
from orchestrator.views.words import short
from policies.detect.divergence import Health
from policies.ledger.abandoned import abandoned
from policies.ledger.accounting import fault_costs

BLUE, ORANGE, GREEN, PURPLE, RED = "#3366cc", "#e07b39", "#2e8b6f", "#7a5ba8", "#c0392b"
INK, GRID = "#333a45", "#e3e6ea"
GREY, SHADE = "#a9b0ba", "#eceef1"
ROOM_FOR_GREY = 0.5  # of the present line's own height, above and below it
SMOOTHED_OVER = 0.08  # of the steps: the thick line is a running mean over so many of the thin one's

Series = tuple[list[int], list[float]]


@dataclass(frozen=True, slots=True)
class FaultMark:
    """A thin vertical line at a step, for something that went wrong there."""

    step: int
    name: str


@dataclass(frozen=True, slots=True)
class RollbackMark:
    """A line at the step that a rollback went back to, and a shade from there to the last that it abandoned."""

    start_step: int
    last_step: int


@dataclass(frozen=True, slots=True)
class AbandonedRows:
    """What rollbacks abandoned: the rows, in order, and where."""

    rows: Sequence[Row] = ()
    marks: Sequence[RollbackMark] = ()


def plot_run(store: Store, path: Path) -> None:
    """Plot the run in `store` to `path`. Raises NotFound when there is no run."""
    reader = Reader(store)
    reader.refresh()
    faults = run_faults(store, reader.history())
    marks = [FaultMark(cost.at_step, cost.name) for cost in fault_costs(reader.rows, faults)]
    rollbacks = [one for one in reader.state.rollbacks if one.fork in reader.state.forks]
    starts = [0 if one.fork.start_at is None else one.fork.start_at.step for one in rollbacks]
    spans = abandoned(reader.rows, rollbacks)
    lost = AbandonedRows(
        sorted(reader.abandoned, key=lambda row: (row.timeline, row.step)),
        [RollbackMark(start, one.last_step) for start, one in zip(starts, spans, strict=True)],
    )
    plot(reader.path, reader.kl_limit, path, title=reader.spec.name, faults=marks, lost=lost)


def plot(
    rows: Sequence[Row],
    kl_limit: float | None,
    path: Path,
    *,
    title: str = "",
    faults: Sequence[FaultMark] = (),
    lost: AbandonedRows = AbandonedRows(),
) -> None:
    """Draw the rows to a PNG at `path`. A panel whose metric was never logged says so."""
    figure = Figure(figsize=(12, 11), dpi=130, facecolor="white")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(3, 2, hspace=0.42, wspace=0.22, left=0.08, right=0.97, top=0.915, bottom=0.06)
    panels = [figure.add_subplot(grid[0, 0]), figure.add_subplot(grid[0, 1])]
    panels += [figure.add_subplot(grid[1, 0]), figure.add_subplot(grid[1, 1]), figure.add_subplot(grid[2, :])]
    _reward(panels[0], rows)
    _train_and_held_out(panels[1], rows)
    _loss(panels[2], rows)
    _band(panels[3], rows)
    _kl(panels[4], rows, kl_limit)
    for panel, metric in zip(panels, (REWARD, REWARD, "loss", REWARD, "kl"), strict=True):
        _abandoned(panel, lost, metric)
        _finish(panel, [*rows, *lost.rows], faults)
    figure.align_ylabels([panels[0], panels[2], panels[4]])
    figure.align_ylabels([panels[1], panels[3]])
    figure.text(0.08, 0.962, title, fontsize=17, fontweight="bold", color=INK)
    figure.text(0.97, 0.962, _subtitle(rows, faults, lost.marks), fontsize=11, color="#7a8290", ha="right")
    figure.savefig(path, format="png")


def _reward(panel: Axes, rows: Sequence[Row]) -> None:
    _title(panel, "Mean reward", "reward")
    _thin_and_thick(panel, _series(rows, REWARD), BLUE, "reward")


def _train_and_held_out(panel: Axes, rows: Sequence[Row]) -> None:
    _title(panel, "Train and held-out score", "score")
    train, held_out = _series(rows, REWARD), _series(rows, HELD_OUT)
    alone = "o" if len(train[0]) == 1 else None
    if train[0]:
        panel.plot(train[0], _smooth(train[1]), color=BLUE, linewidth=2, marker=alone, label="train")
    if held_out[0]:
        panel.plot(*held_out, color=ORANGE, linewidth=2, marker="o", markersize=4.5, label="held out")
    elif train[0]:
        panel.plot([], [], color=ORANGE, linewidth=2, label="held out: not logged")


def _loss(panel: Axes, rows: Sequence[Row]) -> None:
    _title(panel, "Policy loss", "loss")
    _thin_and_thick(panel, _series(rows, "loss"), PURPLE, "loss")


def _band(panel: Axes, rows: Sequence[Row]) -> None:
    _title(panel, "Reward band", "reward")
    whole = [row for row in rows if {REWARD, REWARD_MIN, REWARD_MAX} <= row.values.keys()]
    if not whole:
        return
    steps, low = _series(whole, REWARD_MIN)
    high, middle = _series(whole, REWARD_MAX)[1], _series(whole, REWARD)[1]
    panel.fill_between(steps, low, high, color=GREEN, alpha=0.18, linewidth=0, label="min to max")
    panel.plot(steps, low, color=GREEN, linewidth=0.8, alpha=0.6)
    panel.plot(steps, high, color=GREEN, linewidth=0.8, alpha=0.6)
    panel.plot(steps, middle, color=GREEN, linewidth=2, marker="o" if len(steps) == 1 else None, label="mean")


def _kl(panel: Axes, rows: Sequence[Row], limit: float | None) -> None:
    _title(panel, "KL to the reference", "KL, nats")
    series = _series(rows, "kl")
    if not series[0]:
        return
    _thin_and_thick(panel, series, BLUE, "KL")
    if limit is not None:
        panel.axhline(limit, color=RED, linewidth=1.5, linestyle="--", label=f"limit {limit:.3g}")
        above = [(step, value) for step, value in zip(*series, strict=True) if value > limit]
        if above:
            steps, values = zip(*above, strict=True)
            panel.scatter(steps, values, color=RED, s=16, zorder=4, label="above the limit")


def _abandoned(panel: Axes, lost: AbandonedRows, metric: str) -> None:
    """The abandoned values in grey, which may run out of the panel: the scale is that of the present line."""
    panel.margins(y=0.12)
    span = panel.get_ylim() if panel.has_data() else None
    grey = list[float]()
    for timeline in dict.fromkeys(row.timeline for row in lost.rows):
        steps, values = _series([row for row in lost.rows if row.timeline == timeline], metric)
        if steps:
            label = None if grey else "abandoned"
            panel.plot(steps, values, color=GREY, linewidth=1.2, zorder=1.5, label=label)
            grey += values
    if span is not None and grey:
        low, high = span
        room = ROOM_FOR_GREY * (high - low)
        panel.set_ylim(max(min([low, *grey]), low - room), min(max([high, *grey]), high + room))
    if not panel.has_data():
        return
    for place, mark in enumerate(lost.marks):
        panel.axvspan(mark.start_step, mark.last_step, color=SHADE, linewidth=0, zorder=0)
        label = "rollback" if place == 0 else None
        panel.axvline(mark.start_step, color=INK, linewidth=1.2, zorder=1.2, label=label)


def _thin_and_thick(panel: Axes, series: Series, colour: str, label: str) -> None:
    """Every value as a thin line, their running mean as a thick one."""
    if not series[0]:
        return
    alone = "o" if len(series[0]) == 1 else None  # one point makes no line
    panel.plot(*series, color=colour, linewidth=0.9, alpha=0.4, marker=alone, label=label)
    panel.plot(series[0], _smooth(series[1]), color=colour, linewidth=2.2, label="running mean")


def _title(panel: Axes, title: str, unit: str) -> None:
    panel.set_title(title, loc="left", fontsize=12.5, fontweight="bold", color=INK, pad=8)
    panel.set_ylabel(unit, color=INK, fontsize=10)
    panel.set_xlabel("step", color=INK, fontsize=10)


def _finish(panel: Axes, rows: Sequence[Row], faults: Sequence[FaultMark]) -> None:
    """What all panels share: the same steps, a quiet grid, fault marks, a legend or the lack of data."""
    panel.spines[["top", "right"]].set_visible(False)
    panel.spines[["left", "bottom"]].set_color("#b5bbc4")
    panel.tick_params(colors=INK, labelsize=9, length=3)
    if not panel.has_data():
        panel.set(xticks=[], yticks=[])
        panel.text(0.5, 0.5, "not logged", transform=panel.transAxes, ha="center", color="#9aa2ad", fontsize=13)
        return
    panel.grid(color=GRID, linewidth=0.8)
    panel.set_axisbelow(True)
    panel.xaxis.set_major_locator(MaxNLocator(nbins=10, steps=[1, 2, 5, 10], integer=True))
    panel.yaxis.set_major_locator(MaxNLocator(nbins=6))
    first, last = min(row.step for row in rows), max(row.step for row in rows)
    panel.set_xlim(first - 0.5, max(last, first + 1) + 0.5)
    for place, step in enumerate(sorted({mark.step for mark in faults})):
        label = "fault" if place == 0 else None
        panel.axvline(step, color="#8a929e", linewidth=0.8, linestyle=(0, (2, 2)), zorder=1, label=label)
    panel.legend(frameon=True, framealpha=0.8, edgecolor="none", fontsize=9, labelcolor=INK, loc="best")


def _subtitle(rows: Sequence[Row], faults: Sequence[FaultMark], rollbacks: Sequence[RollbackMark]) -> str:
    if not rows:
        return "nothing logged yet"
    counted = (("fault", len(faults)), ("rollback", len(rollbacks)))
    words = [_counted("step", rows[-1].step), *(_counted(what, count) for what, count in counted if count)]
    return ", ".join(words)


def _counted(what: str, count: int) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _series(rows: Sequence[Row], metric: str) -> Series:
    logged = [(row.step, row.values[metric]) for row in rows if metric in row.values]
    return [step for step, _ in logged], [value for _, value in logged]


def _smooth(values: Sequence[float]) -> list[float]:
    """The mean of each value and its neighbours, fewer of them at the ends."""
    reach = max(1, round(len(values) * SMOOTHED_OVER / 2))
    windows = (values[max(0, at - reach) : at + reach + 1] for at in range(len(values)))
    return [sum(window) / len(window) for window in windows]


# Detections, a row a run: KL, reward and gradient norm, and where the run went wrong.

PANELS = (("kl", "KL, nats", BLUE), ("reward", "reward", GREEN), ("grad_norm", "gradient norm", PURPLE))
COLOURS = {Health.TRIPPED: RED, Health.WATCH: ORANGE, CANNOT_TELL: ORANGE, Health.HEALTHY: GREEN}
MARKS: tuple[tuple[str, str, Literal["--", "-", "-."]], ...] = (
    ("onset: it may have begun", ORANGE, "--"),
    ("trip: it was noticed", RED, "-"),
    ("target: to go back to", INK, "-."),
)
PALE = "#9aa2ad"
ROWS_MAX = 40  # more make a picture that nobody can open; the worst are drawn
WIDTH_INCHES, ROW_INCHES, HEAD_INCHES, FOOT_INCHES = 13.0, 2.1, 0.7, 0.45
NAME_LETTERS = 80
LOGARITHMIC_FROM = 30.0  # times the lowest of its runs' medians that a metric's highest value is
DECADES_MAX = 6  # of a logarithmic axis: a KL begins at 0
DRAWN_MAX = 1e30  # higher is drawn there: beyond, the axes' own arithmetic overflows


@dataclass(frozen=True, slots=True)
class Scale:
    """The axis that a metric has in all rows, in the metric's unit: linear, each row with its own limits, or with
    `limits` for all rows, logarithmic, from -`linear_to` to `linear_to` linear where that is above 0."""

    limits: tuple[float, float] | None = None
    linear_to: float = 0.0


def plot_detections(found: Sequence[Detection], path: Path) -> None:
    """Draw them to a PNG at `path`, at most ROWS_MAX. Raises OSError."""
    shown = _worst(list(zip(labels(found), found, strict=True)))
    size = (WIDTH_INCHES, HEAD_INCHES + ROW_INCHES * len(shown) + FOOT_INCHES)
    figure = Figure(figsize=size, dpi=110, facecolor="white")
    FigureCanvasAgg(figure)
    # Margins by hand: matplotlib's automatic layout draws 40 rows many times over, for minutes.
    height = size[1]
    rows = figure.subplots(
        len(shown),
        len(PANELS),
        squeeze=False,
        sharex="row",
        gridspec_kw={
            **{"left": 0.06, "right": 0.99, "wspace": 0.2, "hspace": 0.5},
            **{"top": 1 - HEAD_INCHES / height, "bottom": FOOT_INCHES / height},
        },
    )
    for panels, (name, unit, colour) in zip(rows.T, PANELS, strict=True):
        scale = _scale([one for _, one in shown], name)
        for panel, (_, one) in zip(panels, shown, strict=True):
            if _line_of(panel, one, name, colour):
                _scaled(panel, scale)
                _marks(panel, one)
            _finish_row(panel, "KL of completions, nats" if _metric(one, name) == KL_SEQUENCE else unit)
    for row, (label, one) in zip(rows, shown, strict=True):
        row[0].set_title(_elided(label), loc="left", fontsize=10, fontweight="bold", color=INK, parse_math=False)
        row[-1].set_title(_outcome(one), loc="right", fontsize=10, color=COLOURS[one.health])
    for panel in rows[-1]:
        panel.set_xlabel("step", color=INK, fontsize=9)
    _legend(figure, [one for _, one in shown])
    figure.savefig(path, format="png")


def _worst(named: list[tuple[str, Detection]]) -> list[tuple[str, Detection]]:
    """Those to draw, in the order given."""
    order = list(COLOURS)
    worst = sorted(range(len(named)), key=lambda place: order.index(named[place][1].health))[:ROWS_MAX]
    return [named[place] for place in sorted(worst)]


def _elided(label: str) -> str:
    """A name that can be drawn, a long one without its middle: its ends tell runs apart."""
    half = NAME_LETTERS // 2
    label = label.encode(errors="replace").decode()  # a file's name may be no text in UTF-8
    return label if len(label) <= NAME_LETTERS else f"{label[: half - 1]}…{label[-half:]}"


def _outcome(one: Detection) -> str:
    onset = one.verdict.onset_step
    if one.tripped:
        target = one.target_step or "the start"
        return f"tripped at step {one.verdict.tripped_step}, onset {onset}, target {target}"
    return f"{one.health} since step {onset}" if one.verdict.health is Health.WATCH else one.health


def _metric(one: Detection, name: str) -> str:
    """What a panel shows: for KL what the run has of it."""
    return one.kl or name if name == "kl" else name


def _drawn(one: Detection, name: str) -> list[tuple[int, float]]:
    """Steps and finite values."""
    logged = ((point.step, point.values.get(_metric(one, name))) for point in one.trace.points)
    return [
        (step, max(-DRAWN_MAX, min(DRAWN_MAX, value)))
        for step, value in logged
        if value is not None and math.isfinite(value)
    ]


def _lost(one: Detection, name: str) -> list[int]:
    """The steps at which it was logged and no finite number."""
    logged = ((point.step, point.values.get(_metric(one, name), 0.0)) for point in one.trace.points)
    return [step for step, value in logged if value is None or not math.isfinite(value)]


def _scale(found: Sequence[Detection], name: str) -> Scale:
    """Logarithmic where a run comes to many times what it was in its first half; never for a reward, which has no
    zero to be counted from. Estimates of a KL may be negative: linear about 0 then."""
    series = [[value for _, value in _drawn(one, name)] for one in found]
    usual = [(run, median(map(abs, run[: len(run) // 2 + 1]))) for run in series if run]
    if name == "reward" or not any(0 < LOGARITHMIC_FROM * middle < max(map(abs, run)) for run, middle in usual):
        return Scale()
    low, high = min(min(run) for run, _ in usual), max(max(run) for run, _ in usual)
    if low < 0:
        linear_to = min((middle for _, middle in usual if middle > 0), default=1.0)
        return Scale((2 * low, 2 * max(high, linear_to)), linear_to)
    above = min(value for run, _ in usual for value in run if value > 0)
    return Scale((max(above, high / 10**DECADES_MAX) / 2, 2 * high))


def _line_of(panel: Axes, one: Detection, name: str, colour: str) -> bool:
    """The values as a line, and where there was no number a cross at the foot. Whether there was any."""
    drawn = _drawn(one, name)
    lost = _lost(one, name)
    if not drawn and not lost:
        panel.set_yticks([])
        panel.text(0.5, 0.5, "not logged", transform=panel.transAxes, ha="center", va="center", color=PALE)
        return False
    if drawn:
        steps, values = zip(*drawn, strict=True)
        panel.plot(steps, values, color=colour, linewidth=1.1, marker="o" if len(steps) == 1 else None)
    if lost:
        feet = panel.get_xaxis_transform()
        panel.plot(lost, [0.04] * len(lost), "x", color=RED, markersize=4, transform=feet)
    return True


def _scaled(panel: Axes, scale: Scale) -> None:
    if scale.limits is not None:
        if scale.linear_to:
            panel.set_yscale("symlog", linthresh=scale.linear_to)
        else:
            panel.set_yscale("log", nonpositive="mask")
        panel.set_ylim(scale.limits)
        panel.yaxis.set_minor_formatter(NullFormatter())
    panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))


def _marks(panel: Axes, one: Detection) -> None:
    """Lines where it began, was noticed, and would go back to; a shade while it went unnoticed."""
    onset, trip = one.verdict.onset_step, one.verdict.tripped_step
    if onset is not None:
        panel.axvspan(
            onset, one.verdict.step if trip is None else trip, color=RED, alpha=0.07, linewidth=0, zorder=0
        )
    for at, (_, colour, style) in zip((onset, trip, one.target_step), MARKS, strict=True):
        if at is not None:
            panel.axvline(at, color=colour, linewidth=1.2, linestyle=style)


def _finish_row(panel: Axes, unit: str) -> None:
    panel.spines[["top", "right"]].set_visible(False)
    panel.spines[["left", "bottom"]].set_color("#b5bbc4")
    panel.tick_params(colors=INK, labelsize=8, length=3)
    panel.set_ylabel(unit, color=INK, fontsize=9)
    panel.xaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 5, 10], integer=True))
    panel.grid(color=GRID, linewidth=0.8)
    panel.set_axisbelow(True)


def _legend(figure: Figure, found: Sequence[Detection]) -> None:
    """What the marks mean that are in the picture, once and beside the panels."""
    onset, trip = any(one.verdict.onset_step is not None for one in found), any(one.tripped for one in found)
    lines = [
        Line2D([], [], color=colour, linestyle=style, linewidth=1.2, label=words)
        for (words, colour, style), drawn in zip(MARKS, (onset, trip, trip), strict=True)
        if drawn
    ]
    if any(_lost(one, name) for one in found for name, _, _ in PANELS):
        lines.append(Line2D([], [], color=RED, marker="x", markersize=4, linestyle="none", label="not a number"))
    if lines:
        figure.legend(handles=lines, loc="upper left", ncols=4, frameon=False, fontsize=9, labelcolor=INK)
