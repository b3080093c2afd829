"""Spot weather: how many machines a zone would give at each moment and for how much, from a seed or from files.

Zones of a named region are pools that a run chooses from. Files that are read:

- JSON with `metadata.gap_seconds` and `data`, one number for each gap, as SkyPilot's traces have it. Where `data`
  has only 0 and 1 it is one machine's, and 1 says that it is taken; else it is the number of available machines.
- CSV of `time,count`: seconds, and how many machines from then on. A first line of names is left out.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

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


# Named climates, from a seed. `scarce` has what public availability traces of four nodes show: no machine for 16
# to 62 % of the time, and 3 to 11 losses a day. `zone-out` has pools to choose from: zones of one region, each
# with its own prices and capacity.

GAPS = DAYS * DAY_GAPS
EAST = "east"
ON_DEMAND_OUTAGE = 0.02  # the share of the time in which a zone has no on-demand machine either


def plentiful(nodes: int) -> Weather:
    """Every machine that is requested, and none is ever lost."""
    return (Zone(ZONES[0], GAP_S, (nodes,)),)


def _calm(random: Random, nodes: int) -> Weather:
    """Enough everywhere; each zone has one short dip in two days."""
    return tuple(
        Zone(name, GAP_S, tuple(nodes * (random.random() > 1 / (2 * DAY_GAPS)) for _ in range(GAPS)))
        for name in ZONES
    )


def _daily(random: Random, nodes: int) -> Weather:
    """Plenty at night, a quarter in office hours, with noise on both."""

    def count(gap: int) -> int:
        hour = gap % DAY_GAPS * GAP_S / 3600
        usual = nodes / 4 if 8 <= hour < 19 else nodes
        return max(0, min(nodes, round(usual + (random.random() < 0.02) * random.uniform(-2, 1))))

    return (Zone(ZONES[0], GAP_S, tuple(count(gap) for gap in range(GAPS))),)


def _storms(random: Random, nodes: int) -> Weather:
    """Enough everywhere, until a storm takes a zone at once, for half an hour to four hours."""

    def counts() -> tuple[int, ...]:
        found: list[int] = []
        while len(found) < GAPS:
            found += [nodes] * max(1, round(random.expovariate(1.5 / DAY_GAPS)))
            found += [0] * random.randint(6, 48)
        return tuple(found[:GAPS])

    return tuple(Zone(name, GAP_S, counts()) for name in ZONES)


def _scarce(random: Random, nodes: int) -> Weather:
    """One zone that has nothing for a sixth to over a half of the time, and takes back what it gave 3 to 11 times
    a day."""
    without, drops = random.uniform(0.2, 0.58), random.uniform(3.5, 10.0)
    cycle = DAY_GAPS / drops  # in gaps: up for a part of it, then away
    found: list[int] = []
    while len(found) < GAPS:
        length = cycle * random.uniform(0.6, 1.4)
        found += [random.randint(1, nodes)] * max(1, round(length * (1 - without)))
        found += [0] * max(1, round(length * without))
    return (Zone(ZONES[0], GAP_S, tuple(found[:GAPS])),)


def _never(random: Random, nodes: int) -> Weather:  # noqa: ARG001  # a climate's signature
    """No spot machine, ever."""
    return (Zone(ZONES[0], GAP_S, (0,)),)


def _zone_out(random: Random, nodes: int) -> Weather:
    """Three zones at much the same price; one after the other loses all that is in it at once, for hours."""
    outs = [with_dips(random, nodes, a_day=2.0, gaps=(12, 72)) for _ in range(3)]
    named = zip("abc", outs, (0.95, 1.0, 1.05), strict=True)
    zones = (pool_of(f"{EAST}-{zone}", counts, price) for zone, counts, price in named)
    return *zones, *on_demand_pools(random, EAST, nodes)


CLIMATES: Mapping[str, Callable[[Random, int], Weather]] = {
    "calm": _calm,
    "daily": _daily,
    "storms": _storms,
    "scarce": _scarce,
    "never": _never,
    "zone-out": _zone_out,
}


def climate(name: str, seed: int, nodes: int) -> Weather:
    """Return the weather of a climate. Raises KeyError for an unknown name.

    Args:
        name: of CLIMATES.
        seed: of the weather alone.
        nodes: how many machines the run can use.
    """
    return CLIMATES[name](Random(f"{name} {seed}"), nodes)


def pool_of(name: str, counts: tuple[int, ...], price: float) -> Zone:
    return Zone(name, GAP_S, counts, (price,), region=EAST, losses_an_hour=0.03)


def on_demand_pools(random: Random, region: str, nodes: int, price: float = 1.0) -> list[Zone]:
    """Return on-demand pools in the first two zones, with enough machines nearly always."""
    found = []
    for zone in "ab":
        dips = with_dips(random, 1, a_day=ON_DEMAND_OUTAGE * DAY_GAPS / 4, gaps=(1, 7))
        # What runs on demand is not taken back: without room there are no more, and no fewer.
        found.append(Zone(f"{region}-{zone}", GAP_S, tuple((nodes + 1) * one for one in dips), (price,), region))
    return [replace(one, market=Market.ON_DEMAND) for one in found]


def with_dips(random: Random, nodes: int, a_day: float, gaps: tuple[int, int]) -> tuple[int, ...]:
    """Return counts: `nodes` machines, interrupted `a_day` times a day by `gaps` gaps without any."""
    found: list[int] = []
    while len(found) < GAPS:
        found += [nodes] * max(1, round(random.expovariate(a_day / DAY_GAPS)))
        found += [0] * random.randint(*gaps)
    return tuple(found[:GAPS])


# Files.

EXPECTED = "expected JSON with metadata.gap_seconds and data, or CSV of time,count"
MINUTE_S = 60.0
MINUTES_MAX = 1_000_000


class NotWeather(Exception):
    """The file cannot be read as spot weather; the message names it, the place and what is expected."""


def read_weather(path: Path, nodes: int) -> Weather:
    """Return the weather in a file. Raises NotWeather.

    Args:
        path: the file.
        nodes: how many machines the run may want at most: what one machine's trace is multiplied by.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise NotWeather(f"{path}: {error}") from None
    if not text.strip():
        raise NotWeather(f"{path}: is empty; {EXPECTED}")
    try:
        if not text.lstrip().startswith("{"):
            return (_from_csv(text),)
        return (_from_gaps(json.loads(text), nodes),)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError, csv.Error) as error:
        raise NotWeather(f"{path}: {type(error).__name__}: {error}; {EXPECTED}") from None


def _from_gaps(document: dict[str, Any], nodes: int) -> Zone:
    gap_s, data = float(document["metadata"]["gap_seconds"]), [int(one) for one in document["data"]]
    if not 0 < gap_s < math.inf or not data or min(data) < 0:
        raise ValueError("gap_seconds above 0 and numbers of 0 or more are needed")
    if max(data) <= 1:
        data = [nodes * (1 - taken) for taken in data]
    return Zone(str(document["metadata"].get("zone", ZONES[0])), gap_s, tuple(data))


def _from_csv(text: str) -> Zone:
    rows = [row for row in csv.reader(text.splitlines()) if row]
    if not _is_number(rows[0][0]):
        rows = rows[1:]
    points = [(float(row[0]), int(float(row[1]))) for row in rows if len(row) > 1]
    if len(points) != len(rows) or not points:
        raise ValueError("each line needs a time and a count")
    times = [time_s for time_s, _ in points]
    if times != sorted(times) or min(count for _, count in points) < 0:
        raise ValueError("times must not go back, and counts not be below 0")
    if (minutes := int((times[-1] - times[0]) / MINUTE_S)) > MINUTES_MAX:
        raise ValueError(f"it lasts {minutes} minutes; are its times in seconds?")
    counts, place = [], 0
    for gap in range(minutes + 1):
        while place + 1 < len(points) and times[place + 1] <= times[0] + gap * MINUTE_S:
            place += 1
        counts.append(points[place][1])
    return Zone(ZONES[0], MINUTE_S, tuple(counts))


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
