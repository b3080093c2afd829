"""Spot weather: how many machines a zone would give at each moment, and for how much; zones of a named region are
pools that a run chooses from. `climates` makes it from a seed, `traces` reads it from files.
"""

from __future__ import annotations

from dataclasses import dataclass

from policies.model.pools import Pool
from policies.model.vocabulary import Market

GAP_S = 300.0
DAY_GAPS = int(86400 / GAP_S)
DAYS = 7  # then the weather repeats itself
ZONES = ("zone-a", "zone-b", "zone-c")
DEAREST = 4.0  # a spot price, as a multiple of its usual one: above what machines on demand cost


@dataclass(frozen=True, slots=True)
class Zone:
    """One zone: `counts[k]` machines may be held from `k * gap_s` on, each for `prices[k]` times the usual price;
    without `prices` for the usual one. Begins again at its end. In a region it is a pool of a kind and market."""

    name: str
    gap_s: float
    counts: tuple[int, ...]
    prices: tuple[float, ...] = ()
    region: str = ""  # empty: there is nothing to choose, and the cloud takes the cheapest zone that has a machine
    machine: str = "H200:1"
    market: Market = Market.SPOT
    refuses: float = 0.0  # the share of launches that it refuses though it has a machine
    losses_an_hour: float = 0.0  # of each machine, beside those that `counts` takes back
    quota: int | None = None  # machines of the kind and market in the region
    speed: float = 1.0  # of a machine

    @property
    def pool(self) -> Pool | None:
        """What production calls it; None where there is nothing to choose."""
        if not self.region:
            return None
        return Pool("sim", self.region, self.name, self.machine.partition(":")[0], self.machine, self.market)

    @property
    def key(self) -> str:
        """No two zones of a weather share it."""
        return f"{self.name} {self.machine} {self.market}"

    def count_at(self, time_s: float) -> int:
        return self.counts[int(time_s / self.gap_s) % len(self.counts)]

    def price_at(self, time_s: float) -> float:
        return self.prices[int(time_s / self.gap_s) % len(self.prices)] if self.prices else 1.0


Weather = tuple[Zone, ...]
