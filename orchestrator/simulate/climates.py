"""Named climates: spot weather from a seed, made up.

`scarce` has what public availability traces of four nodes show: 16 to 62 % of the time not one is up, and 3 to 11
drops a day. The last four have pools to choose from: zones of one region or of two, each with prices, capacity,
refusals and losses of its own. What befalls a region befalls all its zones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import accumulate
from random import Random

from orchestrator.simulate.weather import DAY_GAPS, DAYS, DEAREST, GAP_S, ZONES, Weather, Zone
from policies.model.vocabulary import Market

GAPS = DAYS * DAY_GAPS
EAST, WEST = "east", "west"
ON_DEMAND_LEAST = 0.02  # the share of the time in which a zone has no machine on demand either


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


def _price_war(random: Random, nodes: int) -> Weather:
    """Enough everywhere, at prices that walk between half the usual and more than a machine on demand costs."""

    def prices() -> tuple[float, ...]:
        def walk(price: float, _: int) -> float:
            return min(DEAREST, max(0.5, price * random.choice((0.97, 1 / 0.97))))

        return tuple(accumulate(range(GAPS), walk, initial=1.0))[1:]

    return tuple(Zone(name, GAP_S, (nodes,) * (GAPS), prices()) for name in ZONES[:2])


def _never(random: Random, nodes: int) -> Weather:  # noqa: ARG001  # a climate's signature
    """No spot machine, ever."""
    return (Zone(ZONES[0], GAP_S, (0,)),)


def _unclouded(random: Random, nodes: int) -> Weather:  # noqa: ARG001  # a climate's signature
    """Every spot machine that is asked for, and none is ever taken."""
    return (Zone(ZONES[0], GAP_S, (nodes,)),)


def _bad_zone(random: Random, nodes: int) -> Weather:
    """Three zones, of which the cheapest takes back what it gave within the hour, most of the time."""
    dips = [_dips(random, nodes, a_day=0.5, gaps=(1, 3)) for _ in range(3)]
    bad, *good = (_zone(f"{EAST}-{zone}", counts, 1.0) for zone, counts in zip("abc", dips, strict=True))
    bad = replace(bad, prices=(0.85,), losses_an_hour=random.uniform(1.5, 3.0))
    return bad, *good, *_on_demand(random, EAST, nodes)


def _cheapest_refuses(random: Random, nodes: int) -> Weather:
    """Three zones; the cheapest refuses nearly all launches, and at times takes back what it gave."""
    dips = [_dips(random, nodes, a_day=2.0, gaps=(6, 36)), *(_dips(random, nodes, 1.0, (1, 12)) for _ in "bc")]
    shy, *good = (_zone(f"{EAST}-{zone}", counts, 1.0) for zone, counts in zip("abc", dips, strict=True))
    shy = replace(shy, prices=(0.8,), refuses=random.uniform(0.9, 0.97))
    return shy, *good, *_on_demand(random, EAST, nodes)


def _zone_out(random: Random, nodes: int) -> Weather:
    """Three zones at much the same price; one after the other loses all that is in it at once, for hours."""
    outs = [_dips(random, nodes, a_day=2.0, gaps=(12, 72)) for _ in range(3)]
    named = zip("abc", outs, (0.95, 1.0, 1.05), strict=True)
    zones = (_zone(f"{EAST}-{zone}", counts, price) for zone, counts, price in named)
    return *zones, *_on_demand(random, EAST, nodes)


def _regions(random: Random, nodes: int) -> Weather:
    """Two regions of two zones, two kinds in each, a quota in one; droughts take a region at once, for hours. The
    second kind is slower by a quarter and cheaper by a tenth."""
    found: list[Zone] = []
    for region, price in ((EAST, 1.0), (WEST, 1.1)):
        drought = _dips(random, 1, a_day=1.0, gaps=(12, 48))
        for zone in "ab":
            own = _dips(random, nodes, a_day=2.0, gaps=(2, 24))
            counts = tuple(one * there for one, there in zip(own, drought, strict=True))
            here = replace(_zone(f"{region}-{zone}", counts, price), region=region)
            here = replace(here, losses_an_hour=random.uniform(0.02, 0.2), refuses=random.uniform(0.0, 0.3))
            slow = replace(here, machine="H100:1", speed=0.75, prices=(0.9 * price,))
            slow = replace(slow, counts=tuple(min(nodes, 2 * one) for one in _shifted(counts, random)))
            found += [replace(here, quota=max(1, nodes - 1) if region == EAST else None), slow]
        found += _on_demand(random, region, nodes, price)
    return tuple(found)


def _zone(name: str, counts: tuple[int, ...], price: float) -> Zone:
    return Zone(name, GAP_S, counts, (price,), region=EAST, losses_an_hour=0.03)


def _on_demand(random: Random, region: str, nodes: int, price: float = 1.0) -> list[Zone]:
    """Machines on demand in the first two zones: enough for all, nearly always."""
    found = []
    for zone in "ab":
        dips = _dips(random, 1, a_day=ON_DEMAND_LEAST * DAY_GAPS / 4, gaps=(1, 7))
        # What runs on demand is not taken back: without room there are no more, and no fewer.
        found.append(Zone(f"{region}-{zone}", GAP_S, tuple((nodes + 1) * one for one in dips), (price,), region))
    return [replace(one, market=Market.ON_DEMAND) for one in found]


def _dips(random: Random, nodes: int, a_day: float, gaps: tuple[int, int]) -> tuple[int, ...]:
    """`nodes` machines, and none for some gaps, so often a day."""
    found: list[int] = []
    while len(found) < GAPS:
        found += [nodes] * max(1, round(random.expovariate(a_day / DAY_GAPS)))
        found += [0] * random.randint(*gaps)
    return tuple(found[:GAPS])


def _shifted(counts: tuple[int, ...], random: Random) -> tuple[int, ...]:
    """The same weather up to an hour later."""
    late = random.randint(1, 12)
    return counts[-late:] + counts[:-late]


CLIMATES: Mapping[str, Callable[[Random, int], Weather]] = {
    "unclouded": _unclouded,
    "calm": _calm,
    "daily": _daily,
    "storms": _storms,
    "scarce": _scarce,
    "price-war": _price_war,
    "never": _never,
    "bad-zone": _bad_zone,
    "cheapest-refuses": _cheapest_refuses,
    "zone-out": _zone_out,
    "regions": _regions,
}


def climate(name: str, seed: int, nodes: int) -> Weather:
    """Return the weather of a climate in a world of that seed. Raises KeyError for a climate that is not there.

    Args:
        name: of CLIMATES.
        seed: of the weather alone.
        nodes: how many machines a run may want at most.
    """
    return CLIMATES[name](Random(f"{name} {seed}"), nodes)
