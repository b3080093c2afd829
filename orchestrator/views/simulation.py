"""What a simulation found: for people, and as plain values for programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from orchestrator.simulate.contest.contenders import ON_DEMAND
from orchestrator.simulate.contest.oracle import ORACLE
from orchestrator.simulate.contest.outcome import Outcome
from orchestrator.simulate.stories import Told


@dataclass(frozen=True, slots=True)
class Simulation:
    """Stories in a weather, and policies side by side in it."""

    weather: str
    hours: float  # of each policy
    stories: Sequence[Told]
    outcomes: Mapping[str, Outcome]

    @property
    def ratios(self) -> dict[str, float]:
        """Steps a dollar, as a ratio to all on demand."""
        base = self.outcomes[ON_DEMAND].steps_per_usd
        return {name: one.steps_per_usd / base if base else 0.0 for name, one in self.outcomes.items()}


def to_json(found: Simulation) -> dict[str, Any]:
    ratios = found.ratios
    return {
        "weather": found.weather,
        "seeds": len(found.stories),
        "broken": 0,
        "stories": [asdict(one) for one in found.stories],
        "hours": found.hours,
        "goodput_per_dollar": {name: round(ratio, 3) for name, ratio in ratios.items()},
        "oracle_share": round(ratios["ours"] / ratios[ORACLE], 3),
        "policies": {name: asdict(one) for name, one in found.outcomes.items()},
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
    table.add_column("policy")
    for name in ("steps", "USD", "steps a USD", "of all on demand", "machines"):
        table.add_column(name, justify="right")
    for name, one in found.outcomes.items():
        bought = str(one.bought) if one.bought else ""
        row = (f"{one.steps:.0f}", f"{one.usd:.2f}", f"{one.steps_per_usd:.2f}", f"{found.ratios[name]:.2f}")
        table.add_row(name, *row, bought)
    return table
