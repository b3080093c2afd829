"""In which pool the next machine of a role is bought: `policies.fleet.pools`, asked of the tick's state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from policies.control.fleet.markets import market_of
from policies.control.fleet.spending import Purse, caps_of
from policies.control.tick import Tick
from policies.fleet import disks
from policies.fleet.budget import Caps
from policies.fleet.pools import Choice, Crowd, HalfLives, choose, rest_in_s
from policies.model.buying import MachineKind
from policies.model.events import Noticed
from policies.model.phases import FILLING_NODE, LIVE_RUN
from policies.model.pools import PoolOffer
from policies.model.state import Node
from policies.model.vocabulary import Market, NodePhase, Refusal, Role, RunPhase, kind_of

PRICES = "prices"  # kind of what is noticed
POOLS_UNKNOWN = "waits to hear where machines can be had"
# What another pool may well give; None: the machine was taken back before it served.
_OF_POOL = (Refusal.NO_CAPACITY, Refusal.QUOTA, None)
_KINDS = {kind_of(role, market): (role, market) for role in Role for market in Market}


def tell_unknown(tick: Tick) -> None:
    """Say once that the cloud does not tell where machines are and what they cost: they are bought all the same,
    wherever it finds them, unless there is a budget."""
    why = tick.snapshot.prices_trouble
    if not why or tick.state.phase not in LIVE_RUN or PRICES in tick.state.noticed:
        return
    step = 0 if tick.snapshot.trainer is None else tick.snapshot.trainer.step
    capped = tick.snapshot.prices is None and caps_of(tick.state, tick.spec) != Caps(None, None)
    then = "nothing is bought, for there is a budget" if capped else "machines are bought wherever it finds them"
    tick.emit(Noticed(PRICES, step, text := f"the cloud does not say what it offers: {why}; {then}"), text)


def may_choose(tick: Tick) -> bool:
    """Whether it is known where machines can be had and where the run's are, on which the region depends. The
    journal has that, except for machines bought while no pools were known; the cloud's listing then shows it."""
    offers = tick.snapshot.pools
    if not offers or tick.snapshot.machines is not None:
        return offers is not None
    return all(node.pool is not None for role in Role for node in tick.state.live(role))


@dataclass(frozen=True, slots=True)
class Terms:
    """Where a machine is asked for, and the most that it may cost an hour. `where`: None where there is nothing to
    choose; `machine_usd_per_h`: None where no price is known."""

    where: Choice | None
    machine_usd_per_h: float | None
    disk_usd_per_h: float

    @property
    def usd_per_h(self) -> float | None:
        """All of it; None where no price is known."""
        return None if self.machine_usd_per_h is None else self.machine_usd_per_h + self.disk_usd_per_h


class Crowds:
    """Where the nodes of each role are, as requests of one tick find them: each that is made is added."""

    def __init__(self, tick: Tick) -> None:
        self.of = {role: Crowd(tick.state.live(role), tick.snapshot.now_s) for role in Role}

    def add(self, role: Role, where: Choice | None) -> None:
        self.of[role].add(None if where is None else where.offer.pool)

    @property
    def regions(self) -> set[tuple[str, str]]:
        return set().union(*(crowd.regions for crowd in self.of.values()))


def terms_of(tick: Tick, crowds: Crowds, role: Role, market: Market, fits: Callable[[float], bool]) -> Terms:
    """Return on what terms a machine of the role is bought on that market.

    `fits`: whether there is money for one of so many USD an hour. Of the pools for which there is, the best is
    taken; where there is for none, the best of all, so that it can be said what it would take.
    """
    offers, terms = _offers(tick, crowds, role, market), partial(_terms, tick, role, market)
    best = terms(choice_of(tick, crowds, role, market, offers))
    if best.usd_per_h is None or fits(best.usd_per_h):
        return best
    places = {(one.pool.cloud, one.pool.region): one.pool for one in offers}
    disk_usd = {place: disks.usd_per_h(tick.spec, role, pool) for place, pool in places.items()}
    priced = [(one, one.usd_per_h + disk_usd[one.pool.cloud, one.pool.region]) for one in offers if one.usd_per_h]
    cheaper = [one for one, usd_per_h in priced if fits(usd_per_h)]
    return terms(choice_of(tick, crowds, role, market, cheaper)) if cheaper else best


def _terms(tick: Tick, role: Role, market: Market, choice: Choice | None) -> Terms:
    pool = None if choice is None else choice.offer.pool
    usd_per_h = _most_usd_per_h(tick, kind_of(role, market), choice)
    return Terms(choice, usd_per_h, disks.usd_per_h(tick.spec, role, pool))


def is_paid_for(tick: Tick, role: Role, market: Market) -> bool:
    """Whether there is money for one machine more of the role on that market, somewhere, as it would be bought:
    once those that leave are gone, in place of rollout nodes that are only asked for, and beside the trainer that
    a parked run will ask for again."""
    purse, crowds = Purse(tick, [one for one in tick.state.nodes.values() if _stays(one)]), Crowds(tick)
    if tick.state.phase is RunPhase.PARKED and role is not Role.TRAINER:
        keep_for_trainer(tick, purse, crowds)
    terms = terms_of(tick, crowds, role, market, partial(purse.fits, role))
    return not purse.refusal(role, kind_of(role, market), terms.usd_per_h)


def keep_for_trainer(tick: Tick, purse: Purse, crowds: Crowds) -> None:
    """Count the trainer's machine that a parked run will ask for again. An hour at what its last one cost, where
    no pool tells a price: should it cost more, it is asked for before any other (`spending.refuse`). In all at the
    most that it may cost: for want of that it would be refused."""
    terms = terms_of(tick, crowds, Role.TRAINER, market_of(Role.TRAINER, tick.spec), lambda _: True)
    most_usd, paid_usd = terms.usd_per_h or 0.0, tick.state.trainer_usd_per_h
    is_priced = terms.where is not None and terms.where.offer.usd_per_h > 0
    likely_usd = most_usd if is_priced or not paid_usd else min(most_usd, paid_usd)
    purse.keep_back(Role.TRAINER, likely_usd, most_usd)


def excess_again(tick: Tick, market: Market) -> str:
    """Say how a rollout node on that market and the trainer's machine, with which a parked run would go on, pass
    `budget.usd`; empty: they do not, or what they cost is not known."""
    caps = Caps(caps_of(tick.state, tick.spec).usd, None)
    if caps.usd is None or tick.snapshot.prices is None:
        return ""
    purse = Purse(tick, [one for one in tick.state.nodes.values() if _stays(one)], caps)
    crowds = Crowds(tick)
    keep_for_trainer(tick, purse, crowds)
    usd_per_h = terms_of(tick, crowds, Role.ROLLOUT, market, partial(purse.fits, Role.ROLLOUT)).usd_per_h
    return "" if usd_per_h is None else purse.refusal(Role.ROLLOUT, kind_of(Role.ROLLOUT, market), usd_per_h)


def _stays(node: Node) -> bool:
    asked = node.role is Role.ROLLOUT and node.phase is NodePhase.REQUESTED
    return node.phase in FILLING_NODE and not asked


def choice_of(
    tick: Tick, crowds: Crowds, role: Role, market: Market, offers: Sequence[PoolOffer]
) -> Choice | None:
    """Return in which of these pools a machine of the role is bought on that market; None without any."""
    if not offers:
        return None
    fleet = tick.spec.policies.fleet
    kind = tick.state.kinds.get(kind_of(role, market), MachineKind())
    boot_s = tick.spec.policies.boot_timeout_s if kind.boot_s is None else kind.boot_s
    return choose(
        offers,
        tick.state.pools,
        crowds.of[role],
        tick.snapshot.now_s,
        HalfLives(fleet.loss_half_life_h, fleet.launch_half_life_h),
        boot_s / 3600,
    )


def another_pool(tick: Tick, crowds: Crowds, kind: str, last: Refusal | None) -> bool:
    """Whether a machine of the kind is asked for in the next pool at once: the `last` refusal was a pool's own,
    and not all rest. So a zone that has something is found as soon as by a cloud's own failover."""
    if last not in _OF_POOL:
        return False
    offers = _offers(tick, crowds, *_KINDS[kind])
    return any(not rest_in_s(one.pool, tick.state.pools, tick.snapshot.now_s) for one in offers)


def _most_usd_per_h(tick: Tick, kind: str, choice: Choice | None) -> float | None:
    """What a machine of the kind may cost: its pool's price or, where it is open, the dearest; None: not known."""
    listed = 0.0 if choice is None else choice.offer.usd_per_h
    return listed or (tick.snapshot.prices or {}).get(kind)


def _offers(tick: Tick, crowds: Crowds, role: Role, market: Market) -> list[PoolOffer]:
    offers = [one for one in tick.snapshot.pools or () if (one.role, one.pool.market) == (role, market)]
    return _in_one_region(tick, crowds, role, offers) if offers else []


def _in_one_region(tick: Tick, crowds: Crowds, role: Role, offers: list[PoolOffer]) -> list[PoolOffer]:
    """Where other nodes are, else where both roles can be: private addresses do not reach another region. One is
    preferred that has the other role's machines on the market on which they are bought."""
    if not (there := crowds.regions):
        wanted = [one for one in tick.snapshot.pools or () if one.role is not role]
        there = {(one.pool.cloud, one.pool.region) for one in wanted}
        usual = [one.pool for one in wanted if one.pool.market is market_of(one.role, tick.spec)]
        if best := _those_in(offers, {(pool.cloud, pool.region) for pool in usual}):
            return best
        if not there:
            return offers
    return _those_in(offers, there)


def _those_in(offers: list[PoolOffer], regions: set[tuple[str, str]]) -> list[PoolOffer]:
    return [one for one in offers if (one.pool.cloud, one.pool.region) in regions]
