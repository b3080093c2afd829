"""In which pool a machine is bought.

A machine costs price x (1 + losses an hour x hours to serve) / success: each loss wastes another start, and a
launch that does not come costs its time. Both rates are told from what the run has seen there, older things
counting for less, on top of a prior that is worth a few observations, so that a pool which was never tried is
neither shunned nor preferred. A pool that refused or took a machine rests, twice as long with each in a row.

A zone that goes at once takes all that is in it. So a zone is taken for up to CROWDED dearer than it is when the
fleet is in it already.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from policies.model.pools import Pool, PoolOffer, PoolRecord
from policies.model.state import Node
from policies.model.vocabulary import Market

# Before anything was seen. Public traces of four spot nodes have 3 to 11 losses a day: .03 to .11 a node-hour.
LOSSES_AN_HOUR = {Market.SPOT: 0.07, Market.ON_DEMAND: 0.001}
SUCCESS = {Market.SPOT: 0.7, Market.ON_DEMAND: 0.95}
PRIOR_NODE_HOURS = 10.0  # as many hours of its own weigh as much as the prior
PRIOR_LAUNCHES = 2.0
CROWDED = 0.25
REST_FIRST_S = 60.0
REST_MAX_S = 3600.0


@dataclass(frozen=True, slots=True)
class HalfLives:
    """Hours after which what was seen counts half."""

    losses_h: float
    launches_h: float


@dataclass(frozen=True, slots=True)
class PoolWeather:
    """What is expected of a pool, and how many launches that is told from."""

    losses_an_hour: float
    success: float
    launches: int = 0
    came: int = 0


@dataclass(frozen=True, slots=True)
class Choice:
    """The pool to buy in, and why."""

    offer: PoolOffer
    weather: PoolWeather
    rests_s: float = 0.0  # it would still rest for so long, as all others do

    @property
    def words(self) -> str:
        """`in aws/r/z g6.xlarge L4:1 spot at 0.71 USD/h: 0.02 losses an hour, 3 of 4 launches came`."""
        one = self.weather
        tried = f"{one.came} of {one.launches} launches came" if one.launches else "never tried"
        rests = f", though it rests for {self.rests_s:.0f} s, as all do" if self.rests_s else ""
        price = f" at {self.offer.usd_per_h:.2f} USD/h" if self.offer.usd_per_h else ""
        return f"in {self.offer.pool}{price}: {one.losses_an_hour:.2f} losses an hour, {tried}{rests}"


class Crowd:
    """Where the nodes of one role are: what a further one is placed by, kept up as they are asked for.

    Args:
        nodes: that are there or asked for.
        now_s: seconds since the epoch.
    """

    def __init__(self, nodes: Iterable[Node] = (), now_s: float = 0.0) -> None:
        self.count = 0
        self.hours = defaultdict[Pool, float](float)  # that the machines in a pool have been there
        self._places = Counter[str]()
        for node in nodes:
            self.add(node.pool, max(0.0, now_s - node.came_at_s) / 3600 if node.came_at_s else 0.0)

    def add(self, pool: Pool | None, hours: float = 0.0) -> None:
        """Count a node more, which may be nowhere yet."""
        self.count += 1
        if pool is not None:
            self.hours[pool] += hours
            self._places[pool.place] += 1

    def share(self, pool: Pool) -> float:
        """Of all nodes, those in the pool's zone."""
        return self._places[pool.place] / max(1, self.count)

    @property
    def regions(self) -> set[tuple[str, str]]:
        """Cloud and region of each that is somewhere."""
        return {(pool.cloud, pool.region) for pool in self.hours}


def weather_of(
    pool: Pool, record: PoolRecord | None, there_h: float, now_s: float, half: HalfLives
) -> PoolWeather:
    """Return what is expected of a pool. `there_h`: hours of the machines that are in it now, all together."""
    losses = LOSSES_AN_HOUR[pool.market] * PRIOR_NODE_HOURS
    hours = PRIOR_NODE_HOURS + there_h
    arrived, asked = SUCCESS[pool.market] * PRIOR_LAUNCHES, PRIOR_LAUNCHES
    for stay in record.stays if record else ():
        counts = weight(now_s - stay.until_s, half.losses_h)
        losses, hours = losses + counts * stay.taken, hours + counts * stay.hours
    for launch in record.launches if record else ():
        counts = weight(now_s - launch.at_s, half.launches_h)
        arrived, asked = arrived + counts * launch.came, asked + counts
    launches = record.launches if record else ()
    return PoolWeather(losses / hours, arrived / asked, len(launches), sum(one.came for one in launches))


def rest_s(record: PoolRecord | None, now_s: float) -> float:
    """Return for how many seconds more a pool rests; 0: it does not."""
    if record is None:
        return 0.0
    refused = _rest_after(record.refused_in_a_row) - (now_s - record.refused_at_s)
    taken = _rest_after(record.taken_in_a_row) - (now_s - record.taken_at_s)
    return max(0.0, refused if record.refused_in_a_row else 0.0, taken if record.taken_in_a_row else 0.0)


def rest_in_s(pool: Pool, records: Mapping[str, PoolRecord], now_s: float) -> float:
    """As `rest_s`; a pool rests as well while its region's quota is used up."""
    return max(rest_s(records.get(str(one)), now_s) for one in (pool, pool.anywhere))


def cost(offer: PoolOffer, weather: PoolWeather, hours_to_serve: float) -> float:
    """Return USD a node-hour of work, by the formula above."""
    return offer.usd_per_h * (1 + weather.losses_an_hour * hours_to_serve) / weather.success


def choose(
    offers: Sequence[PoolOffer],
    records: Mapping[str, PoolRecord],
    crowd: Crowd,
    now_s: float,
    half: HalfLives,
    hours_to_serve: float,
    crowded: float = CROWDED,
) -> Choice | None:
    """Return where a machine is bought; None without offers.

    Where all rest, it is the one whose rest ends first.

    Args:
        offers: of one role and one market.
        records: by the pool's text.
        crowd: the nodes of the role.
        now_s: seconds since the epoch.
        half: half-lives of what was seen.
        hours_to_serve: from a request until the machine works.
        crowded: how much dearer another zone may be when all nodes are in one.
    """

    def judged(offer: PoolOffer) -> tuple[float, int, float, str, Choice]:
        record = records.get(str(offer.pool))
        weather = weather_of(offer.pool, record, crowd.hours.get(offer.pool, 0.0), now_s, half)
        usd = cost(offer, weather, hours_to_serve) * (1 + crowded * crowd.share(offer.pool))
        rests = rest_in_s(offer.pool, records, now_s)
        return rests, offer.rank, usd, str(offer.pool), Choice(offer, weather, rests)

    return min(map(judged, offers), key=lambda one: one[:4])[-1] if offers else None


def weight(age_s: float, half_life_h: float) -> float:
    """Return how much counts what was seen so long ago, next to what is seen now."""
    return float(0.5 ** (max(0.0, age_s) / 3600 / half_life_h))


def _rest_after(count: int) -> float:
    return float(min(REST_MAX_S, REST_FIRST_S * 2 ** min(count - 1, 10))) if count else 0.0
