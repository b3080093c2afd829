"""Pools in SkyPilot's words: which ones run.yaml's resources allow, and resources that allow one alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from orchestrator.clouds.protocol import CloudRefused
from orchestrator.clouds.sky.sdk.types import Cluster, SkyOffer
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
    """Return SkyPilot's `resources` for a machine of that pool: what else the alternative says that names it.

    Raises CloudRefused where none does any more.
    """
    spot = pool.market is Market.SPOT
    for _, entry in alternatives(wanted, None):
        placed = in_place(entry, pool.place)
        if placed is None or placed.get("use_spot", spot) is not spot or not _names(placed, pool):
            continue
        accelerators = {"accelerators": pool.accelerators} if pool.accelerators else {}
        return {**placed, **accelerators, "instance_type": pool.instance_type, "use_spot": spot}
    raise CloudRefused(Refusal.QUOTA, f"{role}.resources does not allow {pool} any more")


def _names(entry: dict[str, Any], pool: Pool) -> bool:
    """Whether an alternative allows the pool's kind of machine, as far as its words alone tell."""
    named = entry.get("accelerators")
    listed = [named] if isinstance(named, str) else list(named or ())
    gpu = pool.accelerators.partition(":")[0].lower()
    fits = not listed or gpu in {str(one).partition(":")[0].lower() for one in listed}
    return fits and entry.get("instance_type") in (None, pool.instance_type)


def _pool(infra: str, instance_type: str, accelerators: str, market: Market) -> Pool:
    cloud, _, region = region_of(infra).partition("/")
    zone = infra.removeprefix(region_of(infra)).strip("/")
    return Pool(cloud, region, zone, instance_type, accelerators, market)
