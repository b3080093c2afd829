"""Named climates: spot weather from a seed, made up.

`scarce` has what public availability traces of four nodes show: 16 to 62 % of the time not one is up, and 3 to 11
drops a day. The last six have pools to choose from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import accumulate
from random import Random

from orchestrator.simulate.pooled import bad_zone, cheapest_refuses, regions, zone_out
from orchestrator.simulate.weather import DAY_GAPS, DAYS, DEAREST, GAP_S, ZONES, Weather, Zone


def _calm(random: Random, nodes: int) -> Weather:
    """Enough everywhere; each zone has one short dip in two days."""
    return tuple(
        Zone(name, GAP_S, tuple(nodes * (random.random() > 1 / (2 * DAY_GAPS)) for _ in range(DAYS * DAY_GAPS)))
        for name in ZONES
    )


def _daily(random: Random, nodes: int) -> Weather:
    """Plenty at night, a quarter in office hours, with noise on both."""

    def count(gap: int) -> int:
        hour = gap % DAY_GAPS * GAP_S / 3600
        usual = nodes / 4 if 8 <= hour < 19 else nodes
        return max(0, min(nodes, round(usual + (random.random() < 0.02) * random.uniform(-2, 1))))

    return (Zone(ZONES[0], GAP_S, tuple(count(gap) for gap in range(DAYS * DAY_GAPS))),)


def _storms(random: Random, nodes: int) -> Weather:
    """Enough everywhere, until a storm takes a zone at once, for half an hour to four hours."""

    def counts() -> tuple[int, ...]:
        found: list[int] = []
        while len(found) < DAYS * DAY_GAPS:
            found += [nodes] * max(1, round(random.expovariate(1.5 / DAY_GAPS)))
            found += [0] * random.randint(6, 48)
        return tuple(found[: DAYS * DAY_GAPS])

    return tuple(Zone(name, GAP_S, counts()) for name in ZONES)


def _scarce(random: Random, nodes: int) -> Weather:
    """One zone that has nothing for a sixth to over a half of the time, and takes back what it gave 3 to 11 times
    a day."""
    without, drops = random.uniform(0.2, 0.58), random.uniform(3.5, 10.0)
    cycle = DAY_GAPS / drops  # in gaps: up for a part of it, then away
    found: list[int] = []
    while len(found) < DAYS * DAY_GAPS:
        length = cycle * random.uniform(0.6, 1.4)
        found += [random.randint(1, nodes)] * max(1, round(length * (1 - without)))
        found += [0] * max(1, round(length * without))
    return (Zone(ZONES[0], GAP_S, tuple(found[: DAYS * DAY_GAPS])),)


def _price_war(random: Random, nodes: int) -> Weather:
    """Enough everywhere, at prices that walk between half the usual and more than a machine on demand costs."""

    def prices() -> tuple[float, ...]:
        def walk(price: float, _: int) -> float:
            return min(DEAREST, max(0.5, price * random.choice((0.97, 1 / 0.97))))

        return tuple(accumulate(range(DAYS * DAY_GAPS), walk, initial=1.0))[1:]

    return tuple(Zone(name, GAP_S, (nodes,) * (DAYS * DAY_GAPS), prices()) for name in ZONES[:2])


def _never(random: Random, nodes: int) -> Weather:  # noqa: ARG001  # a climate's signature
    """No spot machine, ever."""
    return (Zone(ZONES[0], GAP_S, (0,)),)


def _unclouded(random: Random, nodes: int) -> Weather:  # noqa: ARG001  # a climate's signature
    """Every spot machine that is asked for, and none is ever taken."""
    return (Zone(ZONES[0], GAP_S, (nodes,)),)


CLIMATES: Mapping[str, Callable[[Random, int], Weather]] = {
    "unclouded": _unclouded,
    "calm": _calm,
    "daily": _daily,
    "storms": _storms,
    "scarce": _scarce,
    "price-war": _price_war,
    "never": _never,
    "bad-zone": bad_zone,
    "cheapest-refuses": cheapest_refuses,
    "zone-out": zone_out,
    "regions": regions,
}


def climate(name: str, seed: int, nodes: int) -> Weather:
    """Return the weather of a climate in a world of that seed. Raises KeyError for a climate that is not there.

    Args:
        name: of CLIMATES.
        seed: of the weather alone.
        nodes: how many machines a run may want at most.
    """
    return CLIMATES[name](Random(f"{name} {seed}"), nodes)
