"""A simulation as a picture: how many spot machines were to be had, and how many steps a dollar bought."""

from __future__ import annotations

from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from orchestrator.simulate.weather import Weather
from orchestrator.views.plots import BLUE, GREY, INK
from orchestrator.views.simulation import Simulation
from policies.model.vocabulary import Market


def plot(found: Simulation, weather: Weather, path: Path) -> None:
    """Draw to `path`. Raises OSError."""
    figure = Figure(figsize=(9, 6), layout="constrained")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1)
    gap_s = min(zone.gap_s for zone in weather)
    times = [gap * gap_s for gap in range(int(found.hours * 3600 / gap_s))]
    spot = [zone for zone in weather if zone.market is Market.SPOT]
    counts = [sum(zone.count_at(time_s) for zone in spot) for time_s in times]
    above.step([time_s / 3600 for time_s in times], counts, color=BLUE, where="post")
    above.set_title(f"spot machines to be had: {found.weather}", loc="left", color=INK)
    above.set_xlabel("hours")
    above.set_ylim(bottom=0)
    names = list(found.outcomes)
    below.barh(names, [found.ratios[name] for name in names], color=BLUE)
    below.axvline(1.0, color=GREY)
    below.invert_yaxis()
    below.set_title("steps a dollar, as a ratio to all on demand", loc="left", color=INK)
    figure.savefig(path, dpi=120)
