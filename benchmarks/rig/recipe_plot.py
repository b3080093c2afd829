"""Reward curves side by side: a panel for each recipe, and one in which losses are compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib import rc_context
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

COLOURS = ("#3366cc", "#e07b39", "#2e8b6f")
INK, GRID = "#333a45", "#e3e6ea"

Runs = Sequence[Sequence[float]]  # of each seed, the reward of each batch


def draw(panels: Sequence[Mapping[str, Runs]], path: Path) -> None:
    """Write an SVG. Thin lines are single runs, the thick one their mean."""
    figure = Figure(figsize=(2.4 * len(panels), 2.6), layout="constrained")
    FigureCanvasSVG(figure)
    for index, (axes, lines) in enumerate(zip(figure.subplots(1, len(panels), sharey=True), panels, strict=True)):
        for (name, runs), colour in zip(lines.items(), COLOURS, strict=False):
            for run in runs:
                axes.plot(range(1, len(run) + 1), run, color=colour, alpha=0.35, linewidth=0.7)
            mean = [sum(at) / len(runs) for at in zip(*runs, strict=False)]
            axes.plot(range(1, len(mean) + 1), mean, color=colour, linewidth=1.8, label=name)
        if len(lines) > 1:
            axes.legend(loc="lower right", frameon=False, fontsize=7)
        axes.set_title(next(iter(lines)) if len(lines) == 1 else "three losses", fontsize=9, color=INK)
        axes.set_ylim(0, 1.03)
        axes.grid(color=GRID, linewidth=0.6)
        axes.tick_params(labelsize=7, colors=INK)
        axes.set_xlabel("batch", fontsize=8, color=INK)
        if index == 0:
            axes.set_ylabel("reward, share of the largest", fontsize=8, color=INK)
    with rc_context({"svg.fonttype": "none"}):  # letters, not their outlines: half the size
        figure.savefig(path, metadata={"Date": None})
