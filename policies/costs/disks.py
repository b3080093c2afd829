"""The cost of a machine's disk, which exists for as long as the machine."""

from __future__ import annotations

from collections.abc import Iterator

from grpo_orch.policies.costs.list_prices import DISK_GB, clouds_with_disks, disk_usd_per_h
from grpo_orch.policies.model.pools import Pool
from grpo_orch.policies.model.spec import RunSpec, alternatives_of, generates_itself
from grpo_orch.policies.model.vocabulary import Role
from grpo_orch.policies.weights.disk_sizes import DISK_SIZE, gb_of

ANYWHERE = ("", "*")


def usd_per_h(spec: RunSpec, role: Role, pool: Pool | None) -> float:
    """Return the price of the most expensive disk that such a machine may have, USD an hour; 0 if none is known.

    `pool`: where the machine is requested; None: wherever run.yaml's resources allow.
    """
    disks = list(_disks(spec, role, pool)) or list(_disks(spec, role, None))
    return max((price for _, price in disks if price is not None), default=0.0)


def usd_per_h_in(spec: RunSpec, role: Role, pool: Pool) -> float | None:
    """Return the same for a machine that came in that pool.

    None if the price of any possible disk is unknown, or if run.yaml does not allow the place.
    """
    prices = [price for _, price in _disks(spec, role, pool)]
    known = [price for price in prices if price is not None]
    return max(known) if known and len(known) == len(prices) else None


def unknown(spec: RunSpec) -> list[str]:
    """Return the run's clouds whose disk prices are unknown."""
    roles = (Role.TRAINER,) if generates_itself(spec) else (Role.TRAINER, Role.ROLLOUT)
    return sorted({cloud for role in roles for cloud, price in _disks(spec, role, None) if price is None})


def _disks(spec: RunSpec, role: Role, pool: Pool | None) -> Iterator[tuple[str, float | None]]:
    """Yield the cloud and hourly price of each disk that run.yaml allows, in the pool or anywhere.

    An unnamed cloud stands for all clouds with known prices.
    """
    if spec.cloud != "sky":
        return
    resources = spec.trainer.resources if role is Role.TRAINER else spec.rollout.resources
    for machine in alternatives_of(resources):
        place = str(machine.get("infra") or machine.get("cloud") or "")
        named, _, rest = place.lower().partition("/")
        region = rest.partition("/")[0] or str(machine.get("region") or "").lower()
        if pool is not None and not _is_in(pool, named, region):
            continue
        clouds = (named,) if named not in ANYWHERE else clouds_with_disks()
        clouds = clouds if pool is None else (pool.cloud,)
        gb, tier = gb_of(machine.get(DISK_SIZE)) or DISK_GB, machine.get("disk_tier")
        for cloud in clouds:
            yield cloud, disk_usd_per_h(cloud, None if tier is None else str(tier), gb)


def _is_in(pool: Pool, cloud: str, region: str) -> bool:
    return cloud in (pool.cloud.lower(), *ANYWHERE) and region in (pool.region.lower(), *ANYWHERE)
