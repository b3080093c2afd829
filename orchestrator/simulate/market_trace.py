"""Market traces: number and price of the machines in each zone over time, from a seed or from files.

Zones of a named region are pools that a run chooses from. A file is JSON with `metadata.gap_seconds` and `data`,
one number per gap, as in SkyPilot's traces. If `data` has only 0 and 1, it is the trace of one machine, and 1
means preempted; else it is the number of available machines.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from grpo_orch.policies.model.pools import Pool
from grpo_orch.policies.model.vocabulary import Market

GAP_S = 300.0
DAY_GAPS = int(86400 / GAP_S)
DAYS = 7  # then the trace repeats
ZONES = ("zone-a", "zone-b", "zone-c")
SPOT_PRICE_MAX_FACTOR = 4.0  # highest spot price as a multiple of the usual one; above the on-demand price


@dataclass(frozen=True, slots=True)
class Zone:
    """One zone, with `counts[k]` machines from `k * gap_s` on, at `prices[k]` times the usual price.

    Without `prices` the usual price applies. The trace repeats at its end. In a region the zone is a pool of one
    machine type and market.
    """

    name: str
    gap_s: float
    counts: tuple[int, ...]
    prices: tuple[float, ...] = ()
    region: str = ""  # empty: not a pool; the cloud selects the cheapest zone with a machine
    machine: str = "H200:1"
    market: Market = Market.SPOT
    refuses: float = 0.0  # share of launches refused despite capacity
    losses_per_h: float = 0.0  # per machine, in addition to decreases of `counts`
    quota: int | None = None  # machines of the type and market in the region
    speed: float = 1.0  # of a machine

    @property
    def pool(self) -> Pool | None:
        """The zone's pool; None outside a region."""
        if not self.region:
            return None
        return Pool("sim", self.region, self.name, self.machine.partition(":")[0], self.machine, self.market)

    @property
    def key(self) -> str:
        """Unique within a trace."""
        return f"{self.name} {self.machine} {self.market}"

    def count_at(self, time_s: float) -> int:
        return self.counts[int(time_s / self.gap_s) % len(self.counts)]

    def price_at(self, time_s: float) -> float:
        return self.prices[int(time_s / self.gap_s) % len(self.prices)] if self.prices else 1.0


MarketTrace = tuple[Zone, ...]


# Named climates, from a seed. `scarce` matches public availability traces of four nodes: no machine for 16 to 62 %
# of the time, and 3 to 11 losses a day. `zone-out` has pools: zones of one region with their own prices and
# capacity.

GAPS = DAYS * DAY_GAPS
EAST = "east"
ON_DEMAND_OUTAGE = 0.02  # share of the time without on-demand machines in a zone


def plentiful(nodes: int) -> MarketTrace:
    """Return a trace that grants every request and never preempts."""
    return (Zone(ZONES[0], GAP_S, (nodes,)),)


def _calm(random: Random, nodes: int) -> MarketTrace:
    """Enough machines everywhere; each zone has one short dip in two days."""
    return tuple(
        Zone(name, GAP_S, tuple(nodes * (random.random() > 1 / (2 * DAY_GAPS)) for _ in range(GAPS)))
        for name in ZONES
    )


def _daily(random: Random, nodes: int) -> MarketTrace:
    """All machines at night, a quarter in office hours, with noise."""

    def count(gap: int) -> int:
        hour = gap % DAY_GAPS * GAP_S / 3600
        usual = nodes / 4 if 8 <= hour < 19 else nodes
        return max(0, min(nodes, round(usual + (random.random() < 0.02) * random.uniform(-2, 1))))

    return (Zone(ZONES[0], GAP_S, tuple(count(gap) for gap in range(GAPS))),)


def _storms(random: Random, nodes: int) -> MarketTrace:
    """Enough machines everywhere, but outages of whole zones for half an hour to four hours."""

    def counts() -> tuple[int, ...]:
        values: list[int] = []
        while len(values) < GAPS:
            values += [nodes] * max(1, round(random.expovariate(1.5 / DAY_GAPS)))
            values += [0] * random.randint(6, 48)
        return tuple(values[:GAPS])

    return tuple(Zone(name, GAP_S, counts()) for name in ZONES)


def _scarce(random: Random, nodes: int) -> MarketTrace:
    """One zone, empty for a sixth to over a half of the time, with 3 to 11 preemptions of all machines a day."""
    empty_share, drops = random.uniform(0.2, 0.58), random.uniform(3.5, 10.0)
    cycle = DAY_GAPS / drops  # gaps from one drop to the next
    counts: list[int] = []
    while len(counts) < GAPS:
        length = cycle * random.uniform(0.6, 1.4)
        counts += [random.randint(1, nodes)] * max(1, round(length * (1 - empty_share)))
        counts += [0] * max(1, round(length * empty_share))
    return (Zone(ZONES[0], GAP_S, tuple(counts[:GAPS])),)


def _never(random: Random, nodes: int) -> MarketTrace:  # noqa: ARG001  # a climate's signature
    """No spot machines."""
    return (Zone(ZONES[0], GAP_S, (0,)),)


def _zone_out(random: Random, nodes: int) -> MarketTrace:
    """Three zones at similar prices; each has outages of all its machines, for hours."""
    traces = [with_dips(random, nodes, a_day=2.0, gaps=(12, 72)) for _ in range(3)]
    pools = zip("abc", traces, (0.95, 1.0, 1.05), strict=True)
    zones = (pool_of(f"{EAST}-{zone}", counts, price) for zone, counts, price in pools)
    return *zones, *on_demand_pools(random, EAST, nodes)


CLIMATES: Mapping[str, Callable[[Random, int], MarketTrace]] = {
    "calm": _calm,
    "daily": _daily,
    "storms": _storms,
    "scarce": _scarce,
    "never": _never,
    "zone-out": _zone_out,
}


def climate(name: str, seed: int, nodes: int) -> MarketTrace:
    """Return the trace of a climate. Raises KeyError for an unknown name.

    Args:
        name: a key of CLIMATES.
        seed: of the trace only.
        nodes: number of machines that the run can use.
    """
    return CLIMATES[name](Random(f"{name} {seed}"), nodes)


def pool_of(name: str, counts: tuple[int, ...], price: float) -> Zone:
    return Zone(name, GAP_S, counts, (price,), region=EAST, losses_per_h=0.03)


def on_demand_pools(random: Random, region: str, nodes: int, price: float = 1.0) -> list[Zone]:
    """Return on-demand pools in the first two zones, with enough machines nearly always."""
    pools = []
    for zone in "ab":
        dips = with_dips(random, 1, a_day=ON_DEMAND_OUTAGE * DAY_GAPS / 4, gaps=(1, 7))
        # On-demand machines are never preempted: an outage only stops new launches.
        counts = tuple((nodes + 1) * count for count in dips)
        pools.append(Zone(f"{region}-{zone}", GAP_S, counts, (price,), region, market=Market.ON_DEMAND))
    return pools


def with_dips(random: Random, nodes: int, a_day: float, gaps: tuple[int, int]) -> tuple[int, ...]:
    """Return counts of `nodes` machines, with `a_day` outages a day that last `gaps` (min, max) gaps."""
    counts: list[int] = []
    while len(counts) < GAPS:
        counts += [nodes] * max(1, round(random.expovariate(a_day / DAY_GAPS)))
        counts += [0] * random.randint(*gaps)
    return tuple(counts[:GAPS])


# Files.

EXPECTED = "expected JSON with metadata.gap_seconds and data"


class InvalidTrace(Exception):
    """The file is not a valid market trace; the message has its path, the problem and the expected form."""


def read_trace(path: Path, nodes: int) -> MarketTrace:
    """Return the market trace in a file. Raises InvalidTrace.

    Args:
        path: the file.
        nodes: maximum number of the run's machines; a single machine's trace is multiplied by it.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidTrace(f"{path}: {error}") from None
    try:
        return (_from_gaps(json.loads(text), nodes),)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise InvalidTrace(f"{path}: {type(error).__name__}: {error}; {EXPECTED}") from None


def _from_gaps(document: dict[str, Any], nodes: int) -> Zone:
    gap_s, data = float(document["metadata"]["gap_seconds"]), [int(value) for value in document["data"]]
    if not 0 < gap_s < math.inf or not data or min(data) < 0:
        raise ValueError("gap_seconds must be above 0, and data must not be empty or negative")
    if max(data) <= 1:
        data = [nodes * (1 - is_preempted) for is_preempted in data]
    return Zone(str(document["metadata"].get("zone", ZONES[0])), gap_s, tuple(data))
