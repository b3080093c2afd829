"""Pools in SkyPilot's words: which ones run.yaml's resources allow, and resources that allow one alone."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from orchestrator.clouds.protocol import CloudRefused
from orchestrator.clouds.sky.records import Cluster, SkyOffer
from orchestrator.clouds.sky.work import alternatives, in_place, region_of
from policies.model.pools import Pool, PoolOffer
from policies.model.vocabulary import Market, Refusal, Role

Offers = Callable[[dict[str, Any], bool], list[SkyOffer]]


def offers_of(role: Role, wanted: dict[str, Any], region: str | None, ask: Offers) -> list[PoolOffer]:
    """Return where the role's machines may be bought, on either market.

    None where one of the places has no price (Kubernetes, Slurm, SSH): there is no comparing with it.

    Args:
        role: whose `wanted` resources they are.
        wanted: in SkyPilot's keys.
        region: where they have to be, as in `aws/us-east-1`; None: anywhere.
        ask: SkyPilot, for what could be launched, on spot or on demand. Raises CloudRefused.
    """
    found: dict[Pool, PoolOffer] = {}
    for rank, entry in alternatives(wanted, region):
        for market in Market:
            spot = market is Market.SPOT
            if entry.get("use_spot", spot) is not spot:
                continue
            try:
                offers = ask({**entry, "use_spot": spot}, spot)
            except CloudRefused:
                continue  # not to be had on that market
            for offer in offers:
                if offer.price_usd_per_h <= 0:
                    return []
                pool = _pool(offer.infra, offer.instance_type, offer.accelerators, market)
                found.setdefault(pool, PoolOffer(role, pool, offer.price_usd_per_h, rank=rank))
    return list(found.values())


def pool_of(cluster: Cluster) -> Pool | None:
    """Return where a cluster is; None where SkyPilot does not know what it is."""
    market = Market.SPOT if cluster.spot else Market.ON_DEMAND
    return _pool(cluster.infra, cluster.machine, cluster.accelerators, market) if cluster.machine else None


def resources_in(wanted: dict[str, Any], role: Role, pool: Pool) -> dict[str, Any]:
    """Return SkyPilot's `resources` for a machine of that pool: what else the alternative says that names it best.

    Raises CloudRefused where none does any more.
    """
    spot, best, fits = pool.market is Market.SPOT, dict[str, Any](), 0
    for _, entry in alternatives(wanted, None):
        placed = in_place(entry, pool.place)
        if placed is None or placed.get("use_spot", spot) is not spot:
            continue
        if (how_well := _names(placed, pool)) > fits:
            best, fits = placed, how_well
    if not fits:
        raise CloudRefused(Refusal.QUOTA, f"{role}.resources does not allow {pool} any more")
    accelerators = {"accelerators": pool.accelerators} if pool.accelerators else {}
    return {**best, **accelerators, "instance_type": pool.instance_type, "use_spot": spot}


def _names(entry: dict[str, Any], pool: Pool) -> int:
    """How well an alternative's words name the pool's kind of machine; 0: they name another one."""
    if entry.get("instance_type") not in (None, pool.instance_type):
        return 0
    named = entry.get("accelerators")
    if not named:
        return 1
    each = (
        named.items() if isinstance(named, dict) else map(_counted, [named] if isinstance(named, str) else named)
    )
    return max(_fits(str(name), count, pool.accelerators) for name, count in each)


def _counted(words: str) -> tuple[str, str]:
    name, _, count = words.rpartition(":")
    return (name, count) if re.fullmatch(r"[0-9.]+", count) and name else (words, "1")


def _fits(name: str, count: object, accelerators: str) -> int:
    """As `_names`. What SkyPilot finds by memory, as `24GB+` or `nvidia:24GB+`, may be anything."""
    gpu, _, has = accelerators.partition(":")
    by_memory = re.search(r"(^|:)[0-9]+[GMT]B\+?$", name, re.IGNORECASE) is not None
    if not gpu or not (by_memory or name.lower() in gpu.lower()):  # it takes part of a name, too
        return 0
    alike = float(has or 1) == float(str(count or 1))
    return 2 + 2 * alike + (name.lower() == gpu.lower())


def _pool(infra: str, instance_type: str, accelerators: str, market: Market) -> Pool:
    cloud, _, region = region_of(infra).partition("/")
    zone = infra.removeprefix(region_of(infra)).strip("/")
    return Pool(cloud, region, zone, instance_type, accelerators, market)
