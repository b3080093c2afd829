"""Named climates: spot markets made up from a seed.

`scarce` has what public availability traces of four nodes show: no machine for 16 to 62 % of the time, and 3 to 11
losses a day. `zone-out` has pools to choose from: zones of one region, each with its own prices and capacity.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from random import Random

from orchestrator.simulate.weather import DAY_GAPS, DAYS, GAP_S, ZONES, Weather, Zone
from policies.model.vocabulary import Market

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
