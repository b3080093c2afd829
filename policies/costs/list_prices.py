"""List prices missing from the clouds' machine catalogs: disks, stores and traffic.

For US regions, without taxes and discounts, as published by the clouds in 2025; up to a third higher elsewhere. A
price that is not listed is unknown (None), never 0.

Disks are those of SkyPilot 0.14.1's `disk_tier` (`sky/clouds/aws.py`, `gcp.py`, `azure.py`): on AWS gp3 with 3,500
or 7,000 operations a second and a sixteenth of that in MB/s, of which 3,000 and 125 are free, or io2 with 20,000;
on GCP persistent disks; on Azure Premium SSD, `high` at the performance of a P50.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

MONTH_H = 730.0  # as the clouds count
DISK_GB = 256  # SkyPilot's default
DISK_TIER = "medium"
# The user's own machines, whose disks cost nothing.
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


def clouds_with_disks() -> tuple[str, ...]:
    """Return the clouds with listed disk prices."""
    return tuple(_DISKS)


@dataclass(frozen=True, slots=True)
class StorePrice:
    """Prices of a store: requests that write or list, requests that read, a GB sent out of the region or of the
    cloud, and a GB stored for a month. Incoming bytes are free everywhere."""

    put_usd: float
    get_usd: float
    to_other_region_usd_per_gb: float
    to_internet_usd_per_gb: float
    usd_per_gb_month: float


# AWS S3, Google Cloud Storage, Azure's hot tier and Cloudflare's R2, each in its standard class.
_STORES: Mapping[str, StorePrice] = {
    "aws": StorePrice(5e-6, 4e-7, 0.02, 0.09, 0.023),
    "gcp": StorePrice(5e-6, 4e-7, 0.02, 0.12, 0.02),
    "azure": StorePrice(5e-6, 4e-7, 0.02, 0.087, 0.018),
    "r2": StorePrice(4.5e-6, 3.6e-7, 0.0, 0.0, 0.015),
}


def store_price(cloud: str) -> StorePrice | None:
    """Return the prices of a cloud's store and traffic; None if they are not listed."""
    return StorePrice(0.0, 0.0, 0.0, 0.0, 0.0) if cloud in OWN else _STORES.get(cloud)
