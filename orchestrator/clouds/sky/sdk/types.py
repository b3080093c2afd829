"""The types of SkyPilot's adapter, importable without SkyPilot."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class ClusterState(StrEnum):
    """SkyPilot's INIT, UP and STOPPED. A cluster that was up and cannot be reached is INIT again."""

    STARTING = "starting"
    UP = "up"
    STOPPED = "stopped"


def nodes_name(run_id: str) -> str:
    """How the names of the clusters begin that are a run's nodes; also the name of their security group."""
    return f"grpo-{run_id}"


def controller_name(run_id: str) -> str:
    """The cluster of a run's controller machine. With a node's prefix a daemon elsewhere would take it down."""
    return f"grpo-controller-{run_id}"


@dataclass(frozen=True, slots=True)
class Cluster:
    """A cluster on SkyPilot's record. `infra` is `cloud/region/zone`, as far as they are known, and `machine` the
    cloud's name for its kind. A price of None is not known; one of 0 is that of a machine of one's own."""

    name: str
    state: ClusterState
    infra: str
    spot: bool
    price_usd_per_h: float | None
    ssh_address: tuple[str, int] | None  # as SkyPilot reaches it from here; None where it goes another way
    machine: str = ""
    on_demand_usd_per_h: float = 0.0  # 0: not known, too
    accelerators: str = ""  # as in SkyOffer
    unrecorded: bool = False  # SkyPilot here has no record of it


@dataclass(frozen=True, slots=True)
class Instance:
    """A machine as AWS has it. `name` is its cluster's, as on its label."""

    id: str
    name: str
    region: str
    zone: str
    machine: str
    spot: bool
    state: ClusterState
    address: str | None


@dataclass(frozen=True, slots=True)
class SkyOffer:
    """A machine that could be asked for now. `accelerators` is `NAME:COUNT` or empty."""

    infra: str
    instance_type: str
    accelerators: str
    spot: bool
    price_usd_per_h: float


@dataclass(frozen=True, slots=True)
class ListPrice:
    """A machine with GPUs in one region, as SkyPilot's catalog has it; a price is None on a market without it."""

    cloud: str
    region: str
    instance_type: str
    gpu: str
    gpus: float
    gpu_memory_mib: float | None
    on_demand_usd_per_h: float | None
    spot_usd_per_h: float | None


@dataclass(frozen=True, slots=True)
class PriceList:
    """Prices of several clouds. `dates`: when each cloud's list was fetched, as 2026-11-23; `missing`: why others
    have none."""

    prices: tuple[ListPrice, ...]
    dates: Mapping[str, str]
    missing: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class CloudCheck:
    """Whether machines can be had of a cloud, and why not."""

    name: str
    enabled: bool
    reason: str


@dataclass(frozen=True, slots=True)
class ApiServer:
    """The API server that SkyPilot's client talks to; `endpoint` without a password."""

    endpoint: str
    version: str
    local: bool
