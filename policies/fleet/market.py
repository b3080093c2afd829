"""Describe the market: which machines can be bought now, where, at what price, and when to request the next one.

The first of the four fleet steps (`offers`, `plan`, `reconcile`, `report`). Back-offs, circuit breakers, quotas,
regions and prices are decided only here. An `Offer` is one printable line. `Offers.terms` chooses the pool for one
machine and is called again for each machine of a tick, because a fleet is spread over zones.

The effective price is price x (1 + losses an hour x hours to serve) / success: each loss wastes another start, and
a failed launch costs its time. Both rates are estimated from what the run has seen in the pool; older observations
count less. A prior worth a few observations keeps untried pools from being avoided or preferred. A pool that
refused or preempted a machine rests, twice as long with each in a row.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from typing import Any

from grpo_orch.policies.costs import disks
from grpo_orch.policies.fleet.budget import Spending, stop_usd
from grpo_orch.policies.model.breaker import REFUSALS, WORKS_S, MachineKind, back_off_s, probe_wait_s
from grpo_orch.policies.model.events import BuyingResumed, BuyingStopped
from grpo_orch.policies.model.phases import FILLING_NODE
from grpo_orch.policies.model.pools import Pool, PoolOffer, PoolRecord
from grpo_orch.policies.model.spec import RunSpec
from grpo_orch.policies.model.state import Node, RunState
from grpo_orch.policies.model.vocabulary import Market, NodePhase, Refusal, Role, RunPhase, kind_of
from grpo_orch.policies.tick.snapshot import Snapshot

# Priors. Public traces of four spot nodes have 3 to 11 losses a day: .03 to .11 a node-hour.
LOSSES_PER_H = {Market.SPOT: 0.07, Market.ON_DEMAND: 0.001}
SUCCESS = {Market.SPOT: 0.7, Market.ON_DEMAND: 0.95}
PRIOR_NODE_HOURS = 10.0  # the prior weighs as much as this many observed hours
PRIOR_LAUNCHES = 2.0
# Older observations count less: losses follow the time of day, and capacity changes within hours.
LOSS_HALF_LIFE_H = 24.0
LAUNCH_HALF_LIFE_H = 3.0
ZONE_PREMIUM = 0.25  # a zone outage takes all its nodes: with all in one zone, another may cost this much more
REST_FIRST_S = 60.0
REST_MAX_S = 3600.0
PRICE_IGNORED_MAX_H = 24.0  # for how long a pool's price is ignored after refusals
POOLS_UNKNOWN = "requests wait for the cloud's list of offers"
_KINDS = {kind_of(role, market): (role, market) for role in Role for market in Market}


# Which market run.yaml names.


def market_of(role: Role, spec: RunSpec) -> Market:
    """Return the role's market: spot for rollout nodes, on demand for the trainer, unless `use_spot` is set."""
    resources = spec.trainer.resources if role is Role.TRAINER else spec.rollout.resources
    spot = bool(resources.get("use_spot", role is Role.ROLLOUT))
    return Market.SPOT if spot else Market.ON_DEMAND


def may_fall_back(spec: RunSpec) -> bool:
    """Whether on-demand nodes may replace unavailable spot: only if run.yaml does not set `use_spot` for them."""
    resources = spec.rollout.resources
    entries: list[dict[str, Any]] = [*resources.get("any_of", ()), *resources.get("ordered", ())]
    return not any("use_spot" in entry for entry in (resources, *entries))


# Where a machine is bought.


@dataclass(frozen=True, slots=True)
class PoolRates:
    """Expected rates of a pool, and the launches from which they are estimated."""

    losses_per_h: float
    success: float
    launches: int = 0
    succeeded: int = 0


@dataclass(frozen=True, slots=True)
class Choice:
    """The pool to buy in, and why."""

    offer: PoolOffer
    rates: PoolRates
    rest_left_s: float = 0.0  # remaining rest; above 0 only if every pool rests

    @property
    def sentence(self) -> str:
        """`in aws/r/z g6.xlarge L4:1 spot at 0.71 USD/h: 0.02 losses an hour, 3 of 4 launches succeeded`."""
        rates = self.rates
        tried = f"{rates.succeeded} of {rates.launches} launches succeeded" if rates.launches else "never tried"
        price = f" at {self.offer.usd_per_h:.2f} USD/h" if self.offer.usd_per_h else ""
        found = f"in {self.offer.pool}{price}: {rates.losses_per_h:.2f} losses an hour, {tried}"
        if not self.rest_left_s:
            return found
        return f"{found}, chosen although it rests for {self.rest_left_s:.0f} s, because all pools do"


class Placement:
    """The pools of one role's nodes, used to place further nodes; updated as nodes are requested."""

    def __init__(self, nodes: Iterable[Node] = (), now_s: float = 0.0) -> None:
        self.count = 0
        self.hours = defaultdict[Pool, float](float)  # machine-hours in each pool so far
        self._zone_counts = Counter[str]()
        for node in nodes:
            self.add(node.pool, max(0.0, now_s - node.arrived_at_s) / 3600 if node.arrived_at_s else 0.0)

    def add(self, pool: Pool | None, hours: float = 0.0) -> None:
        """Count one more node. `pool`: None if unknown."""
        self.count += 1
        if pool is not None:
            self.hours[pool] += hours
            self._zone_counts[pool.zone_path] += 1

    def share(self, pool: Pool) -> float:
        """The share of all nodes that is in the pool's zone."""
        return self._zone_counts[pool.zone_path] / max(1, self.count)

    @property
    def regions(self) -> set[tuple[str, str]]:
        return {(pool.cloud, pool.region) for pool in self.hours}


def rates_of(pool: Pool, record: PoolRecord | None, present_h: float, now_s: float) -> PoolRates:
    """Return the expected rates of a pool. `present_h`: total hours of the machines that are in it now."""
    record = record or PoolRecord(pool)
    losses, hours = LOSSES_PER_H[pool.market] * PRIOR_NODE_HOURS, PRIOR_NODE_HOURS + present_h
    arrived, requested = SUCCESS[pool.market] * PRIOR_LAUNCHES, PRIOR_LAUNCHES
    for stay in record.stays:
        weight = _weight(now_s - stay.until_s, LOSS_HALF_LIFE_H)
        losses, hours = losses + weight * stay.preempted, hours + weight * stay.hours
    for launch in record.launches:
        weight = _weight(now_s - launch.at_s, LAUNCH_HALF_LIFE_H)
        arrived, requested = arrived + weight * launch.succeeded, requested + weight
    succeeded = sum(launch.succeeded for launch in record.launches)
    return PoolRates(losses / hours, arrived / requested, len(record.launches), succeeded)


def _weight(age_s: float, half_life_h: float) -> float:
    """Return the weight of an observation of that age; a new one has 1."""
    return float(0.5 ** (max(0.0, age_s) / 3600 / half_life_h))


def rest_s(record: PoolRecord | None, now_s: float) -> float:
    """Return the seconds that a pool still rests; 0: it does not."""
    if record is None:
        return 0.0
    failures = (record.refused_in_a_row, record.refused_at_s), (record.preempted_in_a_row, record.preempted_at_s)
    rests = [
        min(REST_MAX_S, REST_FIRST_S * 2.0 ** min(count - 1, 10)) - (now_s - at_s)
        for count, at_s in failures
        if count
    ]
    return max([0.0, *rests])


def rest_in_s(pool: Pool, records: Mapping[str, PoolRecord], now_s: float) -> float:
    """As `rest_s`; a pool also rests while its region's quota is exhausted."""
    return max(rest_s(records.get(str(place)), now_s) for place in (pool, pool.in_region))


def choose(
    offers: Sequence[PoolOffer],
    records: Mapping[str, PoolRecord],
    placement: Placement,
    now_s: float,
    hours_to_serve: float,
) -> Choice | None:
    """Choose the pool for a machine; None without offers. If all pools rest, take the one whose rest ends first.

    Args:
        offers: of one role and one market.
        records: by the pool's text.
        placement: the nodes of the role.
        now_s: seconds since the epoch.
        hours_to_serve: from a request until the machine works.
    """

    def judge(offer: PoolOffer) -> tuple[float, int, float, str, Choice]:
        pool = offer.pool
        rates = rates_of(pool, records.get(str(pool)), placement.hours.get(pool, 0.0), now_s)
        usd = offer.usd_per_h * (1 + rates.losses_per_h * hours_to_serve) / rates.success  # the module's formula
        usd *= 1 + ZONE_PREMIUM * placement.share(pool)
        rest_left_s = rest_in_s(pool, records, now_s)
        return rest_left_s, offer.rank, usd, str(pool), Choice(offer, rates, rest_left_s)

    return min(map(judge, offers), key=lambda judged: judged[:4])[-1] if offers else None


# The offers of a tick.


class Status(StrEnum):
    """Whether a machine can be requested on a market."""

    OPEN = "open"
    BACKING_OFF = "backing off"  # refused recently; requested again at `until_s`
    BROKEN = "broken"  # the last machines failed; a test machine is requested at `until_s`
    TESTING = "testing"  # none has served yet, and REFUSALS machines are starting
    TOO_EXPENSIVE = "too expensive"  # the budget does not cover it
    UNKNOWN = "unknown"  # the cloud's list of offers is missing, or a price that the budget needs


@dataclass(frozen=True, slots=True)
class Offer:
    """Machines of one role on one market, as they can be bought now."""

    role: Role
    market: Market
    status: Status
    usd_per_h: float | None  # maximum for the next machine, with its disk; None: unknown
    place: str = ""  # where the next one would be requested; empty: the cloud chooses
    until_s: float | None = None  # when it may be requested again
    start_s: float = 0.0  # expected from request to work
    lifetime_s: float = math.inf  # expected, of a machine that works
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Terms:
    """Where to request a machine, and its maximum price.

    `choice`: None where there is nothing to choose. `machine_usd_per_h`: None where no price is known.
    """

    choice: Choice | None
    machine_usd_per_h: float | None
    disk_usd_per_h: float

    @property
    def usd_per_h(self) -> float | None:
        return None if self.machine_usd_per_h is None else self.machine_usd_per_h + self.disk_usd_per_h

    @property
    def pool(self) -> Pool | None:
        return None if self.choice is None else self.choice.offer.pool


class Offers:
    """The market of one tick. Call `add` for each requested machine, so that the next is placed accordingly."""

    def __init__(self, state: RunState, snapshot: Snapshot, spec: RunSpec) -> None:
        self._state, self._snapshot, self._spec = state, snapshot, spec
        self._now_s = snapshot.now_s
        # A parked run needs no node immediately, so it retries rarely.
        self._needed = state.phase is not RunPhase.PARKED

    @cached_property
    def _placements(self) -> dict[Role, Placement]:
        return {role: Placement(self._state.live(role), self._now_s) for role in Role}

    @cached_property
    def _filling(self) -> Counter[str]:
        return Counter(node.kind for node in self._state.nodes.values() if node.phase in FILLING_NODE)

    # Facts.

    def kind(self, role: Role, market: Market) -> MachineKind:
        return self._state.kinds.get(kind_of(role, market), MachineKind())

    @cached_property
    def are_pools_known(self) -> bool:
        """Whether the pools are known, both those offered and those of the run's machines, which fix the region.

        The journal lacks only the pools of machines bought before any were known; the cloud's listing has them.
        """
        pools = self._snapshot.pools
        if not pools or self._snapshot.machines is not None:
            return pools is not None
        return all(node.pool is not None for role in Role for node in self._state.live(role))

    def max_usd_per_h(self, role: Role, market: Market) -> float:
        """Maximum price of a machine, without its disk; 0: unknown."""
        return (self._snapshot.prices or {}).get(kind_of(role, market), 0.0)

    def start_s(self, role: Role, market: Market) -> float:
        """Seconds from a request until the machine works: the last one's, else the boot timeout."""
        boot_s = self.kind(role, market).boot_s
        return self._spec.policies.boot_timeout_s if boot_s is None else boot_s

    def offer(self, role: Role, market: Market) -> Offer:
        """Return the offer for a role and a market."""
        spending, kind = Spending(self._state, self._snapshot, self._spec), self.kind(role, market)
        until_s: float | None = None
        terms = self.terms(role, market, spending)  # as it would be requested
        usd_per_h, failed = terms.usd_per_h, kind.failures_in_a_row
        reason = f"{failed} failures in a row: {kind.last_failure}" if failed else ""
        if not self.are_pools_known:
            status, reason = Status.UNKNOWN, POOLS_UNKNOWN
        elif kind.stopped and not self._may_probe(role, market):
            status, reason = Status.BROKEN, kind.stopped
            until_s = kind.failed_at_s + probe_wait_s(kind, self._needed)
        elif not kind.stopped and not self._untested_allowed(role, market):
            status = Status.TESTING
        elif refusal := spending.refusal(role, kind_of(role, market), usd_per_h):
            is_known = usd_per_h is not None and self._snapshot.prices is not None
            status, reason = Status.TOO_EXPENSIVE if is_known else Status.UNKNOWN, refusal
        else:
            until_s = kind.failed_at_s + back_off_s(failed, self._needed)
            is_waiting = failed > 0 and until_s > self._now_s
            status, until_s = (Status.BACKING_OFF, until_s) if is_waiting else (Status.OPEN, None)
        losses_per_h = LOSSES_PER_H[market] if terms.choice is None else terms.choice.rates.losses_per_h
        times_s = self.start_s(role, market), 3600 / losses_per_h
        return Offer(role, market, status, usd_per_h, str(terms.pool or ""), until_s, *times_s, reason)

    # Whether a machine may be requested.

    def launches_allowed(self, role: Role, market: Market) -> float:
        """Return how many machines may be requested now.

        None for a while after a failure, unless another pool may have machines: a zone that has some is found as
        fast as by the cloud's own failover. At most REFUSALS of a kind that has never served, and one at a time,
        after a wait, of a stopped kind.
        """
        kind = self.kind(role, market)
        if not self.are_pools_known:
            return 0.0
        if kind.stopped:
            return float(self._may_probe(role, market))
        waited_s = self._now_s - kind.failed_at_s
        if waited_s < back_off_s(kind.failures_in_a_row, self._needed) and not self._has_other_pool(role, market):
            return 0.0
        return self._untested_allowed(role, market)

    def _untested_allowed(self, role: Role, market: Market) -> float:
        kind = self.kind(role, market)
        if kind.served:
            return math.inf
        return max(0, REFUSALS - kind.unserved_in_a_row - self._filling[kind_of(role, market)])

    def _may_probe(self, role: Role, market: Market) -> bool:
        name, kind = kind_of(role, market), self.kind(role, market)
        if any(node.kind == name and _is_probe(node, kind) for node in self._state.nodes.values()):
            return False
        waited_s = self._now_s - kind.failed_at_s
        return waited_s >= probe_wait_s(kind, self._needed) or self.has_working_pool(role, market)

    def has_working_pool(self, role: Role, market: Market) -> bool:
        """Whether failures are the pools' own and another pool remains to try.

        If every machine is preempted before it serves, only a pool without recent preemptions counts.
        """
        kind = self.kind(role, market)
        if kind.never_serves or not self._has_other_pool(role, market):
            return False
        records = [self._state.pools.get(str(offer.pool)) for offer in self._pools(role, market)]
        return not kind.is_always_preempted or any(
            not record or not record.preempted_in_a_row for record in records
        )

    def _has_other_pool(self, role: Role, market: Market) -> bool:
        """Whether the last refusal was its pool's own and another pool does not rest."""
        # None: the machine was preempted before it served.
        if self.kind(role, market).last_refusal not in (Refusal.NO_CAPACITY, Refusal.QUOTA, None):
            return False
        pools = self._pools(role, market)
        return any(not rest_in_s(offer.pool, self._state.pools, self._now_s) for offer in pools)

    # Where a machine is bought, and at what price.

    def terms(self, role: Role, market: Market, spending: Spending | None = None) -> Terms:
        """Return where to buy a machine, and its price.

        Chooses the best pool that `spending` covers or, if it covers none, the best of all, so that a message can
        name its price.
        """
        pools = self._pools(role, market)
        best = self._terms(role, market, pools)
        if spending is None or best.usd_per_h is None or not spending.refusal(role, "", best.usd_per_h):
            return best
        places = {(offer.pool.cloud, offer.pool.region): offer.pool for offer in pools}
        disk_usd = {place: disks.usd_per_h(self._spec, role, pool) for place, pool in places.items()}
        cheaper = [
            offer
            for offer in pools
            if (usd := offer.usd_per_h)
            and not spending.refusal(role, "", usd + disk_usd[offer.pool.cloud, offer.pool.region])
        ]
        return self._terms(role, market, cheaper) if cheaper else best

    def next_usd_per_h(self, role: Role, market: Market) -> float:
        """Price of one more machine, without its disk; 0: unknown.

        Prices of pools that refused their last machine recently are ignored, although those pools are still
        tried. Recent means longer with each refusal in a row, so that the fleet does not keep growing for a price
        at which no machine is available.
        """

        def is_refused(pool: Pool) -> bool:
            record = self._state.pools.get(str(pool))
            if record is None or not record.refused_in_a_row:
                return False
            lasts_h = LAUNCH_HALF_LIFE_H * 2.0 ** min(record.refused_in_a_row - 1, 10)
            return self._now_s - record.refused_at_s < 3600 * min(lasts_h, PRICE_IGNORED_MAX_H)

        pools = self._pools(role, market)
        available = [
            offer for offer in pools if not is_refused(offer.pool) and not is_refused(offer.pool.in_region)
        ]
        choice = self._choice(role, market, available or pools)
        return 0.0 if choice is None else choice.offer.usd_per_h

    def refusal(self, market: Market, spending: Spending) -> str:
        """Return why the budget does not cover a rollout node on that market; empty: it does."""
        usd_per_h = self.terms(Role.ROLLOUT, market, spending).usd_per_h
        return spending.refusal(Role.ROLLOUT, kind_of(Role.ROLLOUT, market), usd_per_h)

    def reserve_trainer(self, spending: Spending) -> None:
        """Count the trainer's machine that a parked run will request again.

        Against the hourly cap it counts at the last one's price where no pool has one: if it costs more, rollout
        nodes make way for it. Against the total cap it counts at its maximum, without which it would be refused.
        """
        terms = self.terms(Role.TRAINER, market_of(Role.TRAINER, self._spec))
        max_usd, paid_usd = terms.usd_per_h or 0.0, self._state.money.trainer_usd_per_h
        is_priced = terms.choice is not None and terms.choice.offer.usd_per_h > 0
        likely_usd = max_usd if is_priced or not paid_usd else min(max_usd, paid_usd)
        spending.add(Role.TRAINER, likely_usd, stop_usd(Role.TRAINER, max_usd))

    def add(self, role: Role, terms: Terms) -> None:
        """Count a machine requested on these terms."""
        self._placements[role].add(terms.pool)

    def _terms(self, role: Role, market: Market, pools: Sequence[PoolOffer]) -> Terms:
        choice = self._choice(role, market, pools)
        listed = 0.0 if choice is None else choice.offer.usd_per_h
        usd_per_h = listed or (self._snapshot.prices or {}).get(kind_of(role, market))
        pool = None if choice is None else choice.offer.pool
        return Terms(choice, usd_per_h, disks.usd_per_h(self._spec, role, pool))

    def _choice(self, role: Role, market: Market, pools: Sequence[PoolOffer]) -> Choice | None:
        hours_to_serve = self.start_s(role, market) / 3600
        return choose(pools, self._state.pools, self._placements[role], self._now_s, hours_to_serve)

    def _pools(self, role: Role, market: Market) -> list[PoolOffer]:
        """Return the role's pools in the region of the other nodes, since private addresses do not cross regions.

        Without nodes, those in regions that offer both roles, preferably the other role on its own market.
        """
        offers = self._snapshot.pools or ()
        pools = [offer for offer in offers if (offer.role, offer.pool.market) == (role, market)]
        regions = set[tuple[str, str]]().union(*(placement.regions for placement in self._placements.values()))
        if pools and not regions:
            others = [offer.pool for offer in offers if offer.role is not role]
            own = market_of(Role.ROLLOUT if role is Role.TRAINER else Role.TRAINER, self._spec)
            best = _in_regions(pools, {(pool.cloud, pool.region) for pool in others if pool.market is own})
            if best:
                return best
            regions = {(pool.cloud, pool.region) for pool in others}
        return _in_regions(pools, regions) if regions else pools


def offers(state: RunState, snapshot: Snapshot, spec: RunSpec) -> Offers:
    """Return the market as it is now."""
    return Offers(state, snapshot, spec)


def breakers(
    state: RunState, snapshot: Snapshot, spec: RunSpec
) -> list[tuple[BuyingStopped | BuyingResumed, str]]:
    """Return which kinds stop being bought after repeated failures, and which are bought again, with reasons."""
    market, found = Offers(state, snapshot, spec), list[tuple[BuyingStopped | BuyingResumed, str]]()
    for name, kind in state.kinds.items():
        if kind.fails and not kind.stopped and not market.has_working_pool(*_KINDS[name]):
            reason = f"{kind.failures_in_a_row} failures in a row: {kind.last_failure}"
            found.append((BuyingStopped(name, reason), f"stopped buying {name}: {reason}"))
        elif kind.stopped and (not kind.fails or _has_recovered(state, name, kind, snapshot.now_s)):
            found.append((BuyingResumed(name), f"buying {name} again"))
    return found


def _has_recovered(state: RunState, name: str, kind: MachineKind, now_s: float) -> bool:
    """Whether a kind that was stopped because machines soon broke has one that lasts."""
    serving = [node for node in state.nodes.values() if node.kind == name and node.phase is NodePhase.SERVING]
    lasts = any(now_s - max(node.since_s, kind.failed_at_s) > WORKS_S for node in serving)
    return lasts and not replace(kind, broke_in_a_row=0).fails


def _is_probe(node: Node, kind: MachineKind) -> bool:
    """Whether a node tests its kind: until it serves or, if machines soon broke, for as long as it lasts."""
    if kind.broke_in_a_row >= REFUSALS and node.requested_at_s >= kind.stopped_at_s:
        return node.phase in FILLING_NODE
    return node.phase in (NodePhase.REQUESTED, NodePhase.BOOTING) and not node.served


def _in_regions(pools: list[PoolOffer], regions: set[tuple[str, str]]) -> list[PoolOffer]:
    return [offer for offer in pools if (offer.pool.cloud, offer.pool.region) in regions]
