"""Detections as a picture, a row a run: KL, reward and gradient norm, and where the run went wrong; as PNG."""

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

from orchestrator.traces.names import KL_SEQUENCE
from orchestrator.views.detection import CANNOT_TELL, Detection, labels
from orchestrator.views.plots import BLUE, GREEN, GRID, INK, ORANGE, PURPLE, RED
from orchestrator.views.words import short
from policies.detect.divergence import Health

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
            if _series(panel, one, name, colour):
                _scaled(panel, scale)
                _marks(panel, one)
            _finish(panel, "KL of completions, nats" if _metric(one, name) == KL_SEQUENCE else unit)
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


def _series(panel: Axes, one: Detection, name: str, colour: str) -> bool:
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


def _finish(panel: Axes, unit: str) -> None:
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
