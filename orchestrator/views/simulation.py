"""The result of a simulation, as text and as plain values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from orchestrator.simulate.stories import Told
from orchestrator.simulate.world import ON_DEMAND, THIS_RUN, Outcome


@dataclass(frozen=True, slots=True)
class Simulation:
    """Scenarios with faults, and this run without faults next to the same run on demand."""

    weather: str
    hours: float  # of each outcome
    stories: Sequence[Told]
    outcomes: Mapping[str, Outcome]

    @property
    def ratios(self) -> dict[str, float]:
        """Steps per USD, as a ratio to all on demand."""
        base = self.outcomes[ON_DEMAND].steps_per_usd
        return {name: one.steps_per_usd / base if base else 0.0 for name, one in self.outcomes.items()}


def to_json(found: Simulation) -> dict[str, Any]:
    return {
        "weather": found.weather,
        "seeds": len(found.stories),
        "broken": 0,
        "stories": [asdict(one) for one in found.stories],
        "hours": found.hours,
        "steps_per_usd_to_on_demand": round(found.ratios[THIS_RUN], 3),
        "outcomes": {name: asdict(outcome) for name, outcome in found.outcomes.items()},
    }


def stories_line(stories: Sequence[Told]) -> str:
    """Sum the stories up in a sentence."""
    ends: dict[str, int] = {}
    for one in stories:
        ends[one.phase] = ends.get(one.phase, 0) + 1
    told = ", ".join(f"{count} {phase}" for phase, count in sorted(ends.items()))
    hours = sum(one.hours for one in stories)
    return f"{len(stories)} stories over {hours:.0f} simulated hours, no promise broken: {told}"


def render(found: Simulation) -> Table:
    title = f"{found.hours:.0f} h of weather: {found.weather}"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    table.add_column("")
    for name in ("steps", "USD", "steps a USD", "of all on demand", "machines"):
        table.add_column(name, justify="right")
    for name, one in found.outcomes.items():
        bought = str(one.bought) if one.bought else ""
        row = (f"{one.steps:.0f}", f"{one.usd:.2f}", f"{one.steps_per_usd:.2f}", f"{found.ratios[name]:.2f}")
        table.add_row(name, *row, bought)
    return table
