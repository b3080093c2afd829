"""Draw a run as a PNG: reward with its band and the held-out score, loss, KL with its limit, and step times.

The lines show the current timeline and its ancestors; steps abandoned by rollbacks are grey.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from grpo_orch.checkpoint.records.metrics import REWARD_MAX, REWARD_MIN, MetricsRow, StepTiming, step_timings
from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.orchestrator.views.reader import Reader
from grpo_orch.orchestrator.views.report import HELD_OUT, REWARD, run_faults
from grpo_orch.policies.ledger.accounting import abandoned, fault_costs

BLUE, ORANGE, GREEN, PURPLE, RED = "#3366cc", "#e07b39", "#2e8b6f", "#7a5ba8", "#c0392b"
INK, GRID = "#333a45", "#e3e6ea"
GREY, SHADE = "#a9b0ba", "#eceef1"
GREY_MARGIN = 0.5  # space for grey lines above and below, as a share of the height of the current line
SMOOTHED_OVER = 0.08  # window of the running mean, as a share of the steps

Series = tuple[list[int], list[float]]
Timings = Sequence[tuple[MetricsRow, StepTiming]]


def plot_run(store: Store, path: Path) -> None:
    """Plot the run in `store` to `path`. Raises NotFound when there is no run."""
    reader = Reader(store, whole=True)
    reader.refresh()
    struck = [cost.at_step for cost in fault_costs(reader.rows, run_faults(reader))]
    rollbacks = [rollback for rollback in reader.state.rollbacks if rollback.fork in reader.state.forks]
    starts = [rollback.fork.start_at for rollback in rollbacks]
    spans = abandoned(reader.rows, rollbacks)
    marks = [
        (0 if start is None else start.step, span.last_step) for start, span in zip(starts, spans, strict=True)
    ]
    lost = sorted(reader.abandoned, key=lambda row: (row.timeline, row.step))
    plot(reader.path, reader.kl_limit, path, title=reader.spec.name, faults=struck, lost=lost, rollbacks=marks)


def plot(
    rows: Sequence[MetricsRow],
    kl_limit: float | None,
    path: Path,
    *,
    title: str = "",
    faults: Sequence[int] = (),
    lost: Sequence[MetricsRow] = (),
    rollbacks: Sequence[tuple[int, int]] = (),
) -> None:
    """Draw the rows to a PNG at `path`. A panel without data shows "not logged".

    Args:
        rows: of the current timeline and its ancestors.
        kl_limit: a line at this KL; None: no line.
        path: the PNG.
        title: above the panels.
        faults: their steps.
        lost: rows that rollbacks abandoned, by timeline and step.
        rollbacks: the start step of each, and the last step that it abandoned.
    """
    figure = Figure(figsize=(12, 11), dpi=130, facecolor="white")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(3, 2, hspace=0.42, wspace=0.22, left=0.08, right=0.97, top=0.91, bottom=0.06)
    panels = [figure.add_subplot(grid[0, 0]), figure.add_subplot(grid[0, 1]), figure.add_subplot(grid[1, :])]
    timed = [figure.add_subplot(grid[2, 0]), figure.add_subplot(grid[2, 1])]
    _reward(panels[0], rows)
    _title(panels[1], "Policy loss", "loss")
    _thin_and_thick(panels[1], _series(rows, "loss"), PURPLE, "loss")
    _kl(panels[2], rows, kl_limit)
    for panel, metric in zip(panels, (REWARD, "loss", "kl"), strict=True):
        _abandoned(panel, lost, rollbacks, metric)
    timings = step_timings(sorted(rows, key=lambda row: row.time_s))
    _seconds(timed[0], timings)
    _idle(timed[1], timings)
    for panel in (*panels, *timed):
        _finish(panel, [*rows, *lost], faults)
    figure.align_ylabels([panels[0], panels[2], timed[0]])
    figure.align_ylabels([panels[1], timed[1]])
    figure.text(0.08, 0.96, title, fontsize=17, fontweight="bold", color=INK)
    figure.text(0.97, 0.96, _subtitle(rows, faults, rollbacks), fontsize=11, color="#7a8290", ha="right")
    figure.savefig(path, format="png")


def _reward(panel: Axes, rows: Sequence[MetricsRow]) -> None:
    """Draw the mean reward, the band from the lowest to the highest, and the held-out score."""
    _title(panel, "Reward", "reward")
    banded = [row for row in rows if {REWARD_MIN, REWARD_MAX} <= row.values.keys()]
    if banded:
        (steps, low), (_, high) = _series(banded, REWARD_MIN), _series(banded, REWARD_MAX)
        panel.fill_between(steps, low, high, color=GREEN, alpha=0.18, linewidth=0, label="min to max")
        panel.plot(steps, low, color=GREEN, linewidth=0.8)
        panel.plot(steps, high, color=GREEN, linewidth=0.8)
    _thin_and_thick(panel, _series(rows, REWARD), BLUE, "mean")
    if (held_out := _series(rows, HELD_OUT))[0]:
        panel.plot(*held_out, color=ORANGE, linewidth=2, marker="o", markersize=4.5, label="held out")


def _kl(panel: Axes, rows: Sequence[MetricsRow], limit: float | None) -> None:
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


def _seconds(panel: Axes, timings: Timings) -> None:
    _title(panel, "Seconds of a step", "s")
    _draw_timing(panel, timings, "generate_s", BLUE, "generate")
    _draw_timing(panel, timings, "train_s", GREEN, "train")
    _draw_timing(panel, timings, "sync_s", PURPLE, "sync")


def _idle(panel: Axes, timings: Timings) -> None:
    """Draw the idle seconds of trainer and fleet, and the staleness on a second axis."""
    _title(panel, "Idle seconds of a step, and staleness", "s")
    _draw_timing(panel, timings, "trainer_idle_s", GREEN, "trainer idle")
    _draw_timing(panel, timings, "fleet_idle_s", BLUE, "fleet idle")
    stale = [(row.step, timing.staleness) for row, timing in timings if timing.staleness is not None]
    if not stale:
        return
    steps, values = zip(*stale, strict=True)
    staleness_axis = panel.twinx()
    staleness_axis.spines[["top", "left", "bottom"]].set_visible(False)
    staleness_axis.set_ylabel("staleness, steps", color=INK, fontsize=10)
    staleness_axis.tick_params(colors=INK, labelsize=9, length=3)
    staleness_axis.set_ylim(0, max(*values, 2.0) + 0.5)
    staleness_axis.yaxis.set_major_locator(MaxNLocator(nbins=4, integer=True))
    staleness_axis.plot(steps, values, color=ORANGE, linewidth=1.5, drawstyle="steps-mid")
    panel.plot([], [], color=ORANGE, linewidth=1.5, label="staleness")


def _draw_timing(panel: Axes, timings: Timings, name: str, colour: str, label: str) -> None:
    """Draw one of the timings by step, and its moving mean."""
    if not timings:
        return
    steps, values = [row.step for row, _ in timings], [getattr(timing, name) for _, timing in timings]
    marker = "o" if len(steps) == 1 else None
    panel.plot(steps, values, color=colour, linewidth=0.7, alpha=0.35)
    panel.plot(steps, _smooth(values), color=colour, linewidth=1.8, marker=marker, label=label)


def _abandoned(panel: Axes, lost: Sequence[MetricsRow], rollbacks: Sequence[tuple[int, int]], metric: str) -> None:
    """Draw the abandoned values in grey. They may leave the panel, which is scaled to the current line.

    A line marks the start step of each rollback, and a shade its abandoned steps.
    """
    panel.margins(y=0.12)
    span = panel.get_ylim() if panel.has_data() else None
    grey = list[float]()
    for timeline in dict.fromkeys(row.timeline for row in lost):
        steps, values = _series([row for row in lost if row.timeline == timeline], metric)
        if steps:
            label = None if grey else "abandoned"
            panel.plot(steps, values, color=GREY, linewidth=1.2, zorder=1.5, label=label)
            grey += values
    if span is not None and grey:
        low, high = span
        margin = GREY_MARGIN * (high - low)
        panel.set_ylim(max(min([low, *grey]), low - margin), min(max([high, *grey]), high + margin))
    if not panel.has_data():
        return
    for index, (start_step, last_step) in enumerate(rollbacks):
        panel.axvspan(start_step, last_step, color=SHADE, linewidth=0, zorder=0)
        label = "rollback" if index == 0 else None
        panel.axvline(start_step, color=INK, linewidth=1.2, zorder=1.2, label=label)


def _thin_and_thick(panel: Axes, series: Series, colour: str, label: str) -> None:
    """Draw the values as a thin line and their running mean as a thick one."""
    if not series[0]:
        return
    marker = "o" if len(series[0]) == 1 else None  # a single point makes no line
    panel.plot(*series, color=colour, linewidth=0.9, alpha=0.4, marker=marker, label=label)
    panel.plot(series[0], _smooth(series[1]), color=colour, linewidth=2.2, label="running mean")


def _title(panel: Axes, title: str, unit: str) -> None:
    panel.set_title(title, loc="left", fontsize=12.5, fontweight="bold", color=INK, pad=8)
    panel.set_ylabel(unit, color=INK, fontsize=10)
    panel.set_xlabel("step", color=INK, fontsize=10)


def _finish(panel: Axes, rows: Sequence[MetricsRow], faults: Sequence[int]) -> None:
    """Draw what all panels share: the step axis, a grid, fault marks, and a legend or "not logged"."""
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
    for index, step in enumerate(sorted(set(faults))):
        label = "fault" if index == 0 else None
        panel.axvline(step, color="#8a929e", linewidth=0.8, linestyle=(0, (2, 2)), zorder=1, label=label)
    panel.legend(frameon=True, framealpha=0.8, edgecolor="none", fontsize=9, labelcolor=INK, loc="best")


def _subtitle(rows: Sequence[MetricsRow], faults: Sequence[int], rollbacks: Sequence[object]) -> str:
    if not rows:
        return "nothing logged yet"
    counted = (("fault", len(faults)), ("rollback", len(rollbacks)))
    words = [_counted("step", rows[-1].step), *(_counted(noun, count) for noun, count in counted if count)]
    return ", ".join(words)


def _counted(noun: str, count: int) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _series(rows: Sequence[MetricsRow], metric: str) -> Series:
    logged = [(row.step, row.values[metric]) for row in rows if metric in row.values]
    return [step for step, _ in logged], [value for _, value in logged]


def _smooth(values: Sequence[float]) -> list[float]:
    """Return the running mean; windows are shorter at the ends."""
    reach = max(1, round(len(values) * SMOOTHED_OVER / 2))
    windows = (values[max(0, at - reach) : at + reach + 1] for at in range(len(values)))
    return [sum(window) / len(window) for window in windows]
