"""What the disk of a run's machine costs: it is there for as long as the machine is."""

from __future__ import annotations

from collections.abc import Iterator

from policies.costs.list_prices import DISK_GB, clouds_with_disks, disk_usd_per_h
from policies.model.pools import Pool
from policies.model.spec import RunSpec, alternatives_of, generates_itself
from policies.model.vocabulary import Role
from policies.weights.disks import DISK_SIZE, gb_of

ANYWHERE = ("", "*")


def usd_per_h(spec: RunSpec, role: Role, pool: Pool | None) -> float:
    """Return the dearest disk that such a machine may have, USD an hour; 0 where no price is known of any.

    `pool`: where the machine is asked for; None: wherever run.yaml's resources allow.
    """
    there = list(_disks(spec, role, pool)) or list(_disks(spec, role, None))
    return max((price for _, price in there if price is not None), default=0.0)


def usd_per_h_in(spec: RunSpec, role: Role, pool: Pool) -> float | None:
    """Return the same of a machine that has come in that pool; None where it is not known of all that it may
    have, or where run.yaml does not name the place."""
    prices = [price for _, price in _disks(spec, role, pool)]
    known = [price for price in prices if price is not None]
    return max(known) if known and len(known) == len(prices) else None


def unknown(spec: RunSpec) -> list[str]:
    """The clouds of a run on which no price is known of its disks."""
    roles = (Role.TRAINER,) if generates_itself(spec) else (Role.TRAINER, Role.ROLLOUT)
    return sorted({cloud for role in roles for cloud, price in _disks(spec, role, None) if price is None})


def _disks(spec: RunSpec, role: Role, pool: Pool | None) -> Iterator[tuple[str, float | None]]:
    """Each disk that run.yaml allows, there or anywhere: its cloud, and what it costs an hour. A cloud that is not
    named is each of those whose prices are known."""
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
        for one in clouds:
            yield one, disk_usd_per_h(one, None if tier is None else str(tier), gb)


def _is_in(pool: Pool, cloud: str, region: str) -> bool:
    return cloud in (pool.cloud.lower(), *ANYWHERE) and region in (pool.region.lower(), *ANYWHERE)
