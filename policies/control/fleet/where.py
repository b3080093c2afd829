"""In which pool the next machine of a role is bought: `policies.fleet.pools`, asked of the tick's state."""

from __future__ import annotations

from policies.control.tick import Tick
from policies.fleet.pools import Choice, HalfLives, choose, rest_in_s
from policies.model.buying import MachineKind
from policies.model.pools import PoolOffer
from policies.model.vocabulary import Market, Refusal, Role, kind_of

POOLS_UNKNOWN = "waits to hear where machines can be had"
# What another pool may well give; None: the machine was taken back before it served.
_OF_POOL = (Refusal.NO_CAPACITY, Refusal.QUOTA, None)
_KINDS = {kind_of(role, market): (role, market) for role in Role for market in Market}


def choice_of(tick: Tick, role: Role, market: Market) -> Choice | None:
    """Return where a machine of the role is bought on that market; None where there is nothing to choose."""
    offers = _offers(tick, role, market)
    if not offers:
        return None
    fleet = tick.spec.policies.fleet
    kind = tick.state.kinds.get(kind_of(role, market), MachineKind())
    boot_s = tick.spec.policies.boot_timeout_s if kind.boot_s is None else kind.boot_s
    return choose(
        offers,
        tick.state.pools,
        tick.state.live(role),
        tick.snapshot.now_s,
        HalfLives(fleet.loss_half_life_h, fleet.launch_half_life_h),
        boot_s / 3600,
    )


def another_pool(tick: Tick, kind: str, last: Refusal | None) -> bool:
    """Whether a machine of the kind is asked for in the next pool at once: the `last` refusal was a pool's own,
    and not all rest. So a zone that has something is found as soon as by a cloud's own failover."""
    if last not in _OF_POOL:
        return False
    offers = _offers(tick, *_KINDS[kind])
    return any(not rest_in_s(one.pool, tick.state.pools, tick.snapshot.now_s) for one in offers)


def most_usd_per_h(tick: Tick, kind: str, choice: Choice | None) -> float | None:
    """What a machine of the kind may cost: its pool's price or, where it is open, the dearest; None: not known."""
    listed = 0.0 if choice is None else choice.offer.usd_per_h
    return listed or (tick.snapshot.prices or {}).get(kind)


def _offers(tick: Tick, role: Role, market: Market) -> list[PoolOffer]:
    offers = [one for one in tick.snapshot.pools or () if (one.role, one.pool.market) == (role, market)]
    return _in_one_region(tick, role, offers) if offers else []


def _in_one_region(tick: Tick, role: Role, offers: list[PoolOffer]) -> list[PoolOffer]:
    """Where other nodes are, else where both roles can be: private addresses do not reach another region."""
    others = [node.pool for other in Role for node in tick.state.live(other) if node.pool is not None]
    if others:
        there = {(pool.cloud, pool.region) for pool in others}
    else:
        wanted = [one for one in tick.snapshot.pools or () if one.role is not role]
        there = {(one.pool.cloud, one.pool.region) for one in wanted}
        if not there:
            return offers
    return [one for one in offers if (one.pool.cloud, one.pool.region) in there]
