"""Detections as a picture: KL, reward and gradient norm, a column a file, and where the run went wrong; as PNG."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from orchestrator.views.detection import Detection
from orchestrator.views.plots import BLUE, GREEN, GRID, INK, ORANGE, PURPLE, RED

PANELS = (("kl", "KL, nats", BLUE), ("reward", "reward", GREEN), ("grad_norm", "gradient norm", PURPLE))
COLUMN_INCHES, WIDTH_INCHES_MAX = 5.6, 120.0
LOGARITHMIC_FROM = 30.0  # times its median that a series' highest value is
DRAWN_MAX = 1e30  # higher is drawn there: beyond, the axes' own arithmetic overflows


def plot_detections(found: Sequence[Detection], path: Path) -> None:
    """Draw them to a PNG at `path`. Raises OSError."""
    width = min(COLUMN_INCHES, WIDTH_INCHES_MAX / len(found))
    figure = Figure(figsize=(width * len(found) + 0.8, 8.6), dpi=110, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    columns = figure.subplots(len(PANELS), len(found), squeeze=False, sharex="col")
    for place, one in enumerate(found):
        for row, (name, unit, colour) in enumerate(PANELS):
            panel: Axes = columns[row][place]
            _series(panel, one, name, colour)
            _marks(panel, one, labelled=row == 0)
            _finish(panel, unit if place == 0 else "")
        columns[0][place].set_title(_title(one), loc="left", fontsize=10, color=INK, parse_math=False)
        columns[-1][place].set_xlabel("step", color=INK, fontsize=9)
    figure.savefig(path, format="png")


def _title(one: Detection) -> str:
    name = one.file if len(one.file) <= 40 else f"…{one.file[-39:]}"
    return f"{name}\n{one.verdict.health}"


def _series(panel: Axes, one: Detection, name: str, colour: str) -> None:
    """The values as a line, and where there was no number a cross at the foot."""
    logged = [(point.step, point.values[name]) for point in one.trace.points if name in point.values]
    drawn = [(step, max(-DRAWN_MAX, min(DRAWN_MAX, value))) for step, value in logged if value is not None]
    if not logged:
        panel.set_yticks([])
        panel.text(0.5, 0.5, "not logged", transform=panel.transAxes, ha="center", color="#9aa2ad", fontsize=12)
        return
    if drawn:
        steps, values = zip(*drawn, strict=True)
        panel.plot(steps, values, color=colour, linewidth=1.1, marker="o" if len(steps) == 1 else None)
        above = sorted(value for value in values if value > 0)
        if above and min(values) >= 0 and above[-1] > LOGARITHMIC_FROM * above[len(above) // 2]:
            panel.set_yscale("log")
    if lost := [step for step, value in logged if value is None]:
        feet = panel.get_xaxis_transform()
        panel.plot(lost, [0.03] * len(lost), "x", color=RED, markersize=5, transform=feet, label="not a number")


def _marks(panel: Axes, one: Detection, *, labelled: bool) -> None:
    """Lines where it began, where it was noticed, and where a rollback would go."""
    onset, trip = one.verdict.onset_step, one.verdict.tripped_step
    for name, at, colour, style in (
        ("onset", onset, ORANGE, "--" if one.tripped else ":"),
        ("trip", trip, RED, "-"),
        ("target", one.target_step, INK, "-."),
    ):
        if at is not None:
            label = f"{name} {at}" if labelled else None
            panel.axvline(at, color=colour, linewidth=1.3, linestyle=style, label=label)


def _finish(panel: Axes, unit: str) -> None:
    panel.spines[["top", "right"]].set_visible(False)
    panel.spines[["left", "bottom"]].set_color("#b5bbc4")
    panel.tick_params(colors=INK, labelsize=8, length=3)
    panel.set_ylabel(unit, color=INK, fontsize=9)
    panel.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))
    panel.grid(color=GRID, linewidth=0.8)
    panel.set_axisbelow(True)
    if panel.get_legend_handles_labels()[0]:
        panel.legend(frameon=True, framealpha=0.8, edgecolor="none", fontsize=8, labelcolor=INK, loc="best")
