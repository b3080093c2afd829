"""What machines clouds offer, at which prices, and the pools among them.

Imports no SkyPilot.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from orchestrator.clouds.protocol import CloudRefused
from orchestrator.clouds.sky.calls import Call
from orchestrator.clouds.sky.errors import OTHER_MACHINE
from orchestrator.clouds.sky.records import Cluster, ListPrice, PriceList, SkyOffer, offer_of, say_once, why_not
from orchestrator.clouds.sky.work import alternatives, in_place, region_of
from policies.model.pools import Pool, PoolOffer
from policies.model.vocabulary import Market, Refusal, Role


def cheapest_first(
    wanted: Iterable[Any], clouds: Mapping[str, Any], launchables: Callable[[Any], Iterable[Any]], asked: str
) -> list[SkyOffer]:
    """Return what could be launched in each region or zone.

    Raises CloudRefused when no cloud has such a machine, and what a cloud did when none of them answers.

    Args:
        wanted: each alternative, as `sky.Resources`.
        clouds: those that may be used, by name.
        launchables: returns a machine once for each region or zone that has it.
        asked: the alternatives in words.
    """
    found: set[SkyOffer] = set()
    like: set[str] = set()
    failed: list[Exception] = []
    for one in wanted:
        one.validate()
        for name, cloud in clouds.items():
            if one.cloud is None or one.cloud.is_same_cloud(cloud):
                try:
                    found.update(_offers_at(cloud, one, launchables, like))
                except Exception as error:  # noqa: BLE001 a cluster of one's own that is away hides no other cloud
                    failed.append(error)
                    say_once("cloud_not_asked", name, why_not(error))
    if not found and failed:
        raise failed[0]
    if not found:
        hint = f"there is {', '.join(sorted(like))}" if like else OTHER_MACHINE
        raise CloudRefused(Refusal.QUOTA, f"no enabled cloud ({', '.join(clouds)}) has {asked}; {hint}")
    return sorted(found, key=lambda offer: (offer.price_usd_per_h, offer.infra, offer.instance_type))


def _offers_at(
    cloud: Any, wanted: Any, launchables: Callable[[Any], Iterable[Any]], like: set[str]
) -> Iterator[SkyOffer]:
    """What a cloud has; `like` gets what it has instead."""
    feasible = cloud.get_feasible_launchable_resources(wanted, 1)
    like.update(feasible.fuzzy_candidate_list)
    for machine in feasible.resources_list[:1]:  # the cheapest, which a launch would take
        for one in launchables(machine):
            # Where SkyPilot cannot tell the price it does not launch, either.
            if (offer := offer_of(one)) is not None:
                yield offer


# List prices, by SkyPilot's catalog.

FETCH_TIMEOUT_S = 60.0  # some ten MB a cloud


def price_list(read: Callable[[str], tuple[list[Any], str]], clouds: Iterable[str]) -> PriceList:
    """Return what these clouds' machines with GPUs cost, and which list could not be had.

    Args:
        read: returns the rows of a cloud's list, and the day on which it was fetched.
    """
    found: list[ListPrice] = []
    dates, missing = {}, {}
    for cloud in clouds:
        call = Call(lambda: "", lambda _, cloud=cloud: read(cloud), lambda _: None)  # type: ignore[misc]
        try:
            rows, dates[cloud] = call.result(FETCH_TIMEOUT_S)
            found += map(list_price_of, rows)
        except Exception as error:  # noqa: BLE001 whatever it is, there are no prices
            missing[cloud] = type(error).__name__
    return PriceList(tuple(found), dates, missing)


def day_fetched(file: Path, cloud: str) -> str:
    """The day on which SkyPilot fetched the file with a cloud's list."""
    # SkyPilot touches the file itself also when it could not fetch a newer one.
    mark = file.parents[1] / ".meta" / cloud / f"{file.name}.md5"
    fetched_s = (mark if mark.exists() else file).stat().st_mtime
    return time.strftime("%Y-%m-%d", time.gmtime(fetched_s))


def list_price_of(row: Any) -> ListPrice:
    """The price that a row of SkyPilot's catalog is (`sky.catalog.common.InstanceTypeInfo`)."""
    memory_gib = _number(row.device_memory)
    return ListPrice(
        cloud=str(row.cloud).lower(),
        region=str(row.region),
        instance_type=str(row.instance_type or ""),
        gpu=str(row.accelerator_name),
        gpus=float(row.accelerator_count),
        gpu_memory_mib=None if memory_gib is None else 1024 * memory_gib,
        on_demand_usd_per_h=_number(row.price),
        spot_usd_per_h=_number(row.spot_price),
    )


def _number(value: Any) -> float | None:
    """None for what a list leaves open."""
    return None if value is None or not math.isfinite(value) else float(value)


# Pools: which ones run.yaml's resources allow, and resources that allow one alone.

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
