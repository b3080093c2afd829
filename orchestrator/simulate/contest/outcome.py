"""What a fleet policy made of some hours."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Outcome:
    """Steps that were not lost, dollars, and how many machines were bought."""

    steps: float
    usd: float
    bought: int = 0

    @property
    def steps_per_usd(self) -> float:
        return self.steps / self.usd if self.usd else 0.0
