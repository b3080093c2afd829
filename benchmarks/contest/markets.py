"""More spot markets than `simulate` offers, for comparing fleet policies."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import accumulate
from random import Random

from grpo_orch.orchestrator.simulate.market_trace import (
    CLIMATES,
    EAST,
    GAP_S,
    GAPS,
    SPOT_PRICE_MAX_FACTOR,
    ZONES,
    MarketTrace,
    Zone,
    on_demand_pools,
    plentiful,
    pool_of,
    with_dips,
)

WEST = "west"


def _price_war(random: Random, nodes: int) -> MarketTrace:
    """Enough everywhere, at prices that walk between half the usual and more than a machine on demand costs."""

    def prices() -> tuple[float, ...]:
        def walk(price: float, _: int) -> float:
            return min(SPOT_PRICE_MAX_FACTOR, max(0.5, price * random.choice((0.97, 1 / 0.97))))

        return tuple(accumulate(range(GAPS), walk, initial=1.0))[1:]

    return tuple(Zone(name, GAP_S, (nodes,) * (GAPS), prices()) for name in ZONES[:2])


def _bad_zone(random: Random, nodes: int) -> MarketTrace:
    """Three zones, of which the cheapest takes back what it gave within the hour, most of the time."""
    dips = [with_dips(random, nodes, a_day=0.5, gaps=(1, 3)) for _ in range(3)]
    bad, *good = (pool_of(f"{EAST}-{zone}", counts, 1.0) for zone, counts in zip("abc", dips, strict=True))
    bad = replace(bad, prices=(0.85,), losses_per_h=random.uniform(1.5, 3.0))
    return bad, *good, *on_demand_pools(random, EAST, nodes)


def _cheapest_refuses(random: Random, nodes: int) -> MarketTrace:
    """Three zones; the cheapest refuses nearly all launches, and at times takes back what it gave."""
    dips = [
        with_dips(random, nodes, a_day=2.0, gaps=(6, 36)),
        *(with_dips(random, nodes, 1.0, (1, 12)) for _ in "bc"),
    ]
    shy, *good = (pool_of(f"{EAST}-{zone}", counts, 1.0) for zone, counts in zip("abc", dips, strict=True))
    shy = replace(shy, prices=(0.8,), refuses=random.uniform(0.9, 0.97))
    return shy, *good, *on_demand_pools(random, EAST, nodes)


def _regions(random: Random, nodes: int) -> MarketTrace:
    """Two regions of two zones, two kinds in each, a quota in one; droughts take a region at once, for hours. The
    second kind is slower by a quarter and cheaper by a tenth."""
    found: list[Zone] = []
    for region, price in ((EAST, 1.0), (WEST, 1.1)):
        drought = with_dips(random, 1, a_day=1.0, gaps=(12, 48))
        for zone in "ab":
            own = with_dips(random, nodes, a_day=2.0, gaps=(2, 24))
            counts = tuple(one * there for one, there in zip(own, drought, strict=True))
            here = replace(pool_of(f"{region}-{zone}", counts, price), region=region)
            here = replace(here, losses_per_h=random.uniform(0.02, 0.2), refuses=random.uniform(0.0, 0.3))
            slow = replace(here, machine="H100:1", speed=0.75, prices=(0.9 * price,))
            slow = replace(slow, counts=tuple(min(nodes, 2 * one) for one in _shifted(counts, random)))
            found += [replace(here, quota=max(1, nodes - 1) if region == EAST else None), slow]
        found += on_demand_pools(random, region, nodes, price)
    return tuple(found)


def _shifted(counts: tuple[int, ...], random: Random) -> tuple[int, ...]:
    """The same trace up to an hour later."""
    late = random.randint(1, 12)
    return counts[-late:] + counts[:-late]


MARKETS: Mapping[str, Callable[[Random, int], MarketTrace]] = {
    "unclouded": lambda _, nodes: plentiful(nodes),
    **CLIMATES,
    "price-war": _price_war,
    "bad-zone": _bad_zone,
    "cheapest-refuses": _cheapest_refuses,
    "regions": _regions,
}


def market(name: str, seed: int, nodes: int) -> MarketTrace:
    """Return the trace of a market, as `orchestrator.simulate.market_trace.climate` does for its own."""
    return MARKETS[name](Random(f"{name} {seed}"), nodes)
