"""The cost of a machine's disk, which exists for as long as the machine.

The clouds' machine catalogs do not have it. List prices of 2025 for US regions, without taxes and discounts; up to
a third higher elsewhere. A price that is not listed is unknown (None), never 0.

Disks are those of SkyPilot 0.14.1's `disk_tier` (`sky/clouds/aws.py`, `gcp.py`, `azure.py`): on AWS gp3 with 3,500
or 7,000 operations a second and a sixteenth of that in MB/s, of which 3,000 and 125 are free, or io2 with 20,000;
on GCP persistent disks; on Azure Premium SSD, `high` at the performance of a P50.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from grpo_orch.policies.model.pools import Pool
from grpo_orch.policies.model.spec import RunSpec, alternatives_of, generates_itself, place_of
from grpo_orch.policies.model.vocabulary import Role
from grpo_orch.policies.weights.disk_sizes import DISK_SIZE, gb_of

MONTH_H = 730.0  # as the clouds count
DISK_GB = 256  # SkyPilot's default
DISK_TIER = "medium"
# The user's own machines, whose disks cost nothing and have a fixed size.
OWN = ("kubernetes", "k8s", "ssh", "slurm", "local")


@dataclass(frozen=True, slots=True)
class DiskPrice:
    """USD a month, for each GB and for the disk. `in_steps`: Azure bills the next power of two of GB."""

    usd_per_gb_month: float
    usd_per_month: float = 0.0
    in_steps: bool = False

    def usd_per_h(self, gb: float) -> float:
        size = 2 ** (max(1, round(gb)) - 1).bit_length() if self.in_steps else gb
        return (self.usd_per_gb_month * size + self.usd_per_month) / MONTH_H


_GP3_IO_USD, _GP3_MB_USD, _IO2_IO_USD = 0.005, 0.04, 0.065  # each a month
_ULTRA_IOS = 20_000  # requested from both AWS and GCP
_DISKS: Mapping[str, Mapping[str, DiskPrice]] = {
    "aws": {
        "low": DiskPrice(0.05),
        "medium": DiskPrice(0.08, (3500 - 3000) * _GP3_IO_USD + (3500 // 16 - 125) * _GP3_MB_USD),
        "high": DiskPrice(0.08, (7000 - 3000) * _GP3_IO_USD + (7000 // 16 - 125) * _GP3_MB_USD),
        "ultra": DiskPrice(0.125, _ULTRA_IOS * _IO2_IO_USD),
    },
    "gcp": {
        "low": DiskPrice(0.04),
        "medium": DiskPrice(0.10),
        "high": DiskPrice(0.17),
        "ultra": DiskPrice(0.125, _ULTRA_IOS * _IO2_IO_USD),
    },
    "azure": {
        "low": DiskPrice(0.05, in_steps=True),
        "medium": DiskPrice(0.155, in_steps=True),
        "high": DiskPrice(0.0, 495.57),
    },
}
_BEST = {"aws": "ultra", "gcp": "ultra", "azure": "high"}


def disk_usd_per_h(cloud: str, tier: str | None, gb: float) -> float | None:
    """Return the hourly price of a disk of SkyPilot's tier; None if it is not listed."""
    if cloud in OWN:
        return 0.0
    named = DISK_TIER if tier is None else tier.lower()
    if named == "best":
        named = _BEST.get(cloud, named)
    price = _DISKS.get(cloud, {}).get(named)
    return None if price is None else price.usd_per_h(gb)


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
        named, region = place_of(machine)
        if pool is not None and not {named, region} <= {"*", pool.cloud.lower(), pool.region.lower()}:
            continue
        clouds = (named,) if named != "*" else tuple(_DISKS)
        clouds = clouds if pool is None else (pool.cloud,)
        gb, tier = gb_of(machine.get(DISK_SIZE)) or DISK_GB, machine.get("disk_tier")
        for cloud in clouds:
            yield cloud, disk_usd_per_h(cloud, None if tier is None else str(tier), gb)
