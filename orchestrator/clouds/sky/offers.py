"""Clouds' offers and list prices, and the pools among them. Imports no SkyPilot."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from grpo_orch.orchestrator.clouds.protocol import CloudRefused
from grpo_orch.orchestrator.clouds.sky.calls import Call
from grpo_orch.orchestrator.clouds.sky.errors import OTHER_MACHINE
from grpo_orch.orchestrator.clouds.sky.records import (
    Cluster,
    ListPrice,
    PriceList,
    SkyOffer,
    first_line,
    offer_of,
    warn_once,
)
from grpo_orch.orchestrator.clouds.sky.work import alternatives, in_place, region_of
from grpo_orch.policies.model.pools import Pool, PoolOffer
from grpo_orch.policies.model.vocabulary import Market, Refusal, Role


def cheapest_first(
    wanted: Iterable[Any], clouds: Mapping[str, Any], launchables: Callable[[Any], Iterable[Any]], description: str
) -> list[SkyOffer]:
    """Return what could be launched in each region or zone, the cheapest first.

    Raises CloudRefused when no cloud has such a machine, or the first cloud's error when no cloud answers.

    Args:
        wanted: each alternative, as `sky.Resources`.
        clouds: the enabled clouds, by name.
        launchables: returns a machine once for each region or zone that has it.
        description: the alternatives, for the error message.
    """
    found: set[SkyOffer] = set()
    similar: set[str] = set()
    errors: list[Exception] = []
    for alternative in wanted:
        alternative.validate()
        for name, cloud in clouds.items():
            if alternative.cloud is None or alternative.cloud.is_same_cloud(cloud):
                try:
                    found.update(_offers_at(cloud, alternative, launchables, similar))
                except Exception as error:  # noqa: BLE001 an unreachable cloud must not hide the others
                    errors.append(error)
                    warn_once("cloud_query_failed", name, first_line(error))
    if not found and errors:
        raise errors[0]
    if not found:
        hint = f"similar: {', '.join(sorted(similar))}" if similar else OTHER_MACHINE
        raise CloudRefused(Refusal.QUOTA, f"no enabled cloud ({', '.join(clouds)}) has {description}; {hint}")
    return sorted(found, key=lambda offer: (offer.price_usd_per_h, offer.infra, offer.instance_type))


def _offers_at(
    cloud: Any, wanted: Any, launchables: Callable[[Any], Iterable[Any]], similar: set[str]
) -> Iterator[SkyOffer]:
    """Yield a cloud's offers, and add the names of similar machines to `similar`."""
    feasible = cloud.get_feasible_launchable_resources(wanted, 1)
    similar.update(feasible.fuzzy_candidate_list)
    for machine in feasible.resources_list[:1]:  # the cheapest, which a launch would take
        for launchable in launchables(machine):
            # SkyPilot does not launch a machine without a price.
            if (offer := offer_of(launchable)) is not None:
                yield offer


# List prices from SkyPilot's catalog.

FETCH_TIMEOUT_S = 60.0  # about 10 MB a cloud


def price_list(read: Callable[[str], tuple[list[Any], str]], clouds: Iterable[str]) -> PriceList:
    """Return the prices of these clouds' GPU machines, and which lists are unavailable.

    Args:
        read: returns the rows of a cloud's list and the day it was fetched.
    """
    found: list[ListPrice] = []
    dates, missing = {}, {}
    for cloud in clouds:
        call = Call(lambda: "", lambda _, cloud=cloud: read(cloud), lambda _: None)  # type: ignore[misc]
        try:
            rows, dates[cloud] = call.result(FETCH_TIMEOUT_S)
            found += map(list_price_of, rows)
        except Exception as error:  # noqa: BLE001 an error of any kind means no prices
            missing[cloud] = type(error).__name__
    return PriceList(tuple(found), dates, missing)


def day_fetched(file: Path, cloud: str) -> str:
    """Return the day on which SkyPilot fetched the file with a cloud's list."""
    # SkyPilot also touches the file after it failed to fetch a newer one.
    mark = file.parents[1] / ".meta" / cloud / f"{file.name}.md5"
    fetched_s = (mark if mark.exists() else file).stat().st_mtime
    return time.strftime("%Y-%m-%d", time.gmtime(fetched_s))


def list_price_of(row: Any) -> ListPrice:
    """Convert a row of SkyPilot's catalog (`sky.catalog.common.InstanceTypeInfo`)."""
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
    """Return the value, or None if the list lacks it."""
    return None if value is None or not math.isfinite(value) else float(value)


# Pools that run.yaml's resources allow, and resources that allow a single pool.

Offers = Callable[[dict[str, Any], bool], list[SkyOffer]]


def offers_of(role: Role, wanted: dict[str, Any], region: str | None, query: Offers) -> list[PoolOffer]:
    """Return the pools of both markets that the role may buy from.

    Empty if a place has no price (Kubernetes, Slurm, SSH), since prices cannot be compared then.

    Args:
        role: the role that the `wanted` resources belong to.
        wanted: resources in SkyPilot's keys.
        region: the required region, as in `aws/us-east-1`; None: any.
        query: returns SkyPilot's offers, on spot (True) or on demand. Raises CloudRefused.
    """
    found: dict[Pool, PoolOffer] = {}
    for rank, entry in alternatives(wanted, region):
        for market in Market:
            spot = market is Market.SPOT
            if entry.get("use_spot", spot) is not spot:
                continue
            try:
                offers = query({**entry, "use_spot": spot}, spot)
            except CloudRefused:
                continue  # unavailable on that market
            for offer in offers:
                if offer.price_usd_per_h <= 0:
                    return []
                pool = _pool(offer.infra, offer.instance_type, offer.accelerators, market)
                found.setdefault(pool, PoolOffer(role, pool, offer.price_usd_per_h, rank=rank))
    return list(found.values())


def pool_of(cluster: Cluster) -> Pool | None:
    """Return a cluster's pool; None if SkyPilot does not know its instance type."""
    market = Market.SPOT if cluster.spot else Market.ON_DEMAND
    return _pool(cluster.infra, cluster.machine, cluster.accelerators, market) if cluster.machine else None


def resources_in(wanted: dict[str, Any], role: Role, pool: Pool) -> dict[str, Any]:
    """Return SkyPilot's `resources` for a machine of that pool, with the other keys of the best alternative.

    Raises CloudRefused if no alternative matches any more.
    """
    spot = pool.market is Market.SPOT
    best, best_score = dict[str, Any](), 0
    for _, entry in alternatives(wanted, None):
        placed = in_place(entry, pool.zone_path)
        if placed is None or placed.get("use_spot", spot) is not spot:
            continue
        if (score := _match_score(placed, pool)) > best_score:
            best, best_score = placed, score
    if not best_score:
        raise CloudRefused(Refusal.QUOTA, f"{role}.resources no longer allows {pool}")
    accelerators = {"accelerators": pool.accelerators} if pool.accelerators else {}
    return {**best, **accelerators, "instance_type": pool.instance_type, "use_spot": spot}


def _match_score(entry: dict[str, Any], pool: Pool) -> int:
    """Return how closely an alternative names the pool's instance type; 0: it names another one."""
    if entry.get("instance_type") not in (None, pool.instance_type):
        return 0
    named = entry.get("accelerators")
    if not named:
        return 1
    counted = (
        named.items() if isinstance(named, dict) else map(_counted, [named] if isinstance(named, str) else named)
    )
    return max(_accelerator_score(str(name), count, pool.accelerators) for name, count in counted)


def _counted(accelerator: str) -> tuple[str, str]:
    name, _, count = accelerator.rpartition(":")
    return (name, count) if re.fullmatch(r"[0-9.]+", count) and name else (accelerator, "1")


def _accelerator_score(name: str, count: object, accelerators: str) -> int:
    """As `_match_score`. A name by memory, as `24GB+` or `nvidia:24GB+`, matches any GPU."""
    gpu, _, pool_count = accelerators.partition(":")
    by_memory = re.search(r"(^|:)[0-9]+[GMT]B\+?$", name, re.IGNORECASE) is not None
    if not gpu or not (by_memory or name.lower() in gpu.lower()):  # SkyPilot also matches part of a name
        return 0
    same_count = float(pool_count or 1) == float(str(count or 1))
    return 2 + 2 * same_count + (name.lower() == gpu.lower())


def _pool(infra: str, instance_type: str, accelerators: str, market: Market) -> Pool:
    cloud, _, region = region_of(infra).partition("/")
    zone = infra.removeprefix(region_of(infra)).strip("/")
    return Pool(cloud, region, zone, instance_type, accelerators, market)
