"""The types of SkyPilot's adapter, and the decoding of SkyPilot's records into them. Imports no SkyPilot.

SkyPilot decodes its cluster records together, here and on its server: one unreadable record (after a change of
version, say) or a duplicate price in its catalog is an error for all of them. Here a record that cannot be
decoded affects only its own cluster.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import SimpleNamespace
from typing import Any

import structlog

from grpo_orch.orchestrator.clouds.protocol import CloudRefused, CloudUnavailable


class ClusterState(StrEnum):
    """SkyPilot's INIT, UP and STOPPED. A cluster that was up and cannot be reached is INIT again."""

    STARTING = "starting"
    UP = "up"
    STOPPED = "stopped"


def nodes_name(run_id: str) -> str:
    """Return the prefix of the cluster names of a run's nodes, which also names their security group."""
    return f"grpo-{run_id}"


def controller_name(run_id: str) -> str:
    """Return the cluster name of a run's controller machine.

    It lacks the nodes' prefix, with which a daemon elsewhere would take the machine down.
    """
    return f"grpo-controller-{run_id}"


@dataclass(frozen=True, slots=True)
class Cluster:
    """A cluster in SkyPilot's records.

    `infra` is `cloud/region/zone` as far as known, `machine` the instance type. A price of None is unknown; the
    user's own machines have a price of 0.
    """

    name: str
    state: ClusterState
    infra: str
    spot: bool
    price_usd_per_h: float | None
    ssh_address: tuple[str, int] | None  # for a direct connection from here; None: not direct
    machine: str = ""
    on_demand_usd_per_h: float = 0.0  # 0: also if unknown
    accelerators: str = ""  # as in SkyOffer
    unrecorded: bool = False  # the local SkyPilot has no record of it


@dataclass(frozen=True, slots=True)
class Instance:
    """A machine as AWS reports it. `name` is the cluster name on its label."""

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
    """A machine that could be launched now. `accelerators` is `NAME:COUNT` or empty."""

    infra: str
    instance_type: str
    accelerators: str
    spot: bool
    price_usd_per_h: float


@dataclass(frozen=True, slots=True)
class ListPrice:
    """A GPU machine in one region of SkyPilot's catalog. A price is None on a market that lacks the machine."""

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
    """Prices of several clouds.

    `dates`: when each cloud's list was fetched, as 2026-11-23; `missing`: why a cloud has no list.
    """

    prices: tuple[ListPrice, ...]
    dates: Mapping[str, str]
    missing: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class CloudCheck:
    """Whether a cloud's machines are available, and why not."""

    name: str
    enabled: bool
    reason: str


@dataclass(frozen=True, slots=True)
class ApiServer:
    """The API server of SkyPilot's client. `endpoint` has no password."""

    endpoint: str
    version: str
    local: bool


# Decoding records separately.

log = structlog.get_logger()

_WARNINGS_MAX = 1024
INIT = "INIT"


@functools.lru_cache(maxsize=_WARNINGS_MAX)
def warn_once(event: str, subject: str, reason: str) -> None:
    """Log a warning unless this process has logged the same one."""
    log.warning(event, subject=subject, reason=reason)


def first_line(error: Exception) -> str:
    """Return an error's type and first line, for `warn_once`: SkyPilot's assertions end with a whole table."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def decode_separately(
    decode: Callable[[list[dict[str, Any]]], list[Any]],
) -> Callable[[list[dict[str, Any]]], list[Any]]:
    """Make SkyPilot's `decode` of a list decode each record separately, and as much of it as possible."""

    def decode_all(records: list[dict[str, Any]]) -> list[Any]:
        return [_decoded(decode, record) for record in records]

    return decode_all


def _decoded(decode: Callable[[list[dict[str, Any]]], list[Any]], encoded: dict[str, Any]) -> Any:
    reason = ""
    for replaced in ({}, {"status": INIT}, {"handle": None}):
        try:
            (record,) = decode([{**encoded, **replaced}])
        except Exception as error:  # noqa: BLE001 an error of any kind leaves this record incomplete
            reason = reason or first_line(error)
            continue
        if reason:
            warn_once("cluster_record_incomplete", encoded["name"], reason)
        return record
    return undecoded_cluster(encoded["name"], reason)


def read_separately(read: Callable[[Sequence[str]], list[Any]], names: Sequence[str]) -> list[Any]:
    """Read the records of these clusters together, or by bisection if the server fails on one of them.

    Raises CloudUnavailable when the server does not answer.
    """
    try:
        return read(names) if names else []
    except CloudUnavailable as error:
        if not is_refusal(error):
            raise
        if len(names) == 1:
            return [undecoded_cluster(names[0], str(error))]
    half = len(names) // 2
    return [*read_separately(read, names[:half]), *read_separately(read, names[half:])]


def is_refusal(error: CloudUnavailable) -> bool:
    """Whether the server answered with an error, as opposed to not answering."""
    return isinstance(error.__cause__, CloudRefused)


def undecoded_cluster(name: str, reason: str) -> Any:
    """Return a placeholder for a cluster record that cannot be decoded."""
    warn_once("cluster_record_unreadable", name, reason)
    return SimpleNamespace(name=name, status=SimpleNamespace(value=INIT), handle=None)


# SkyPilot's objects as our types, and our labels in its resources.

LABEL = "grpo-orch"  # on every machine, with the cluster's name
HOUR_S = 3600
SSH_PORT = 22

_STATES = {
    "INIT": ClusterState.STARTING,
    "PENDING": ClusterState.STARTING,
    "AUTOSTOPPING": ClusterState.STARTING,  # it is shutting itself down and cannot be reached
    "UP": ClusterState.UP,
    "STOPPED": ClusterState.STOPPED,
}


def cluster_of(record: Any) -> Cluster:
    """Convert a record of `sky.status`; one that cannot be read completely hides no other."""
    state = _STATES.get(record.status.value, ClusterState.STARTING)
    try:
        return cluster_at(record.name, state, record.handle)
    except Exception as error:  # noqa: BLE001 an error of any kind concerns only this record
        warn_once("cluster_record_incomplete", record.name, first_line(error))
        return cluster_at(record.name, state, None)


def cluster_at(name: str, state: ClusterState, handle: Any) -> Cluster:
    """Convert SkyPilot's handle of a cluster; what the handle lacks stays unknown."""
    launched = None if handle is None else handle.launched_resources
    if launched is None:
        warn_once("cluster_without_machine", name, "SkyPilot's record has only its name")
        return Cluster(name, state, infra="", spot=False, price_usd_per_h=None, ssh_address=None)
    addresses, ports = handle.cached_external_ips, handle.cached_external_ssh_ports
    return Cluster(
        name=name,
        state=state,
        infra=launched.infra.to_str() or "",
        spot=bool(launched.use_spot),
        price_usd_per_h=_usd_per_h(lambda: launched, name),
        ssh_address=(addresses[0], ports[0]) if addresses and ports else None,
        machine=launched.instance_type or "",
        accelerators=_accelerators(launched),
        on_demand_usd_per_h=_usd_per_h(lambda: launched.copy(use_spot=False), f"{name} on demand") or 0.0,
    )


def cluster_on_aws(instance: Instance, kind: Callable[[bool], Any]) -> Cluster:
    """Convert a machine that AWS reports. `kind(spot)` returns its instance type as `sky.Resources`.

    The local SkyPilot may not know the type: another one with a newer catalog may have launched the machine.
    """
    return Cluster(
        name=instance.name,
        state=instance.state,
        infra=f"aws/{instance.region}/{instance.zone}",
        spot=instance.spot,
        price_usd_per_h=_usd_per_h(lambda: kind(instance.spot), instance.name),
        ssh_address=(instance.address, SSH_PORT) if instance.address else None,
        machine=instance.machine,
        accelerators=_accelerators_of(lambda: kind(instance.spot), instance.name),
        on_demand_usd_per_h=_usd_per_h(lambda: kind(False), f"{instance.name} on demand") or 0.0,
        unrecorded=True,
    )


def clouds_with_machines(workspaces: Mapping[str, Mapping[str, Collection[str]]]) -> set[str]:
    """Return the clouds that provide machines; `workspaces` is the result of `sky check`."""
    return {
        name.partition("/")[0].lower()
        for workspace in workspaces.values()
        for name, abilities in workspace.items()
        if "compute" in abilities
    }


def offer_of(machine: Any) -> SkyOffer | None:
    """Convert a launchable `sky.Resources`; None without a price, since SkyPilot does not launch it then."""
    place = machine.infra.to_str()
    market = "spot" if machine.use_spot else "on demand"
    price = _usd_per_h(lambda: machine, f"{place} {machine.instance_type} {market}")
    if price is None:
        return None
    return SkyOffer(place, machine.instance_type, _accelerators(machine), machine.use_spot, price)


def _usd_per_h(machine: Callable[[], Any], subject: str) -> float | None:
    """Return the price of a machine, or warn and return None where SkyPilot's catalog has no usable one.

    The catalog may have no price (ValueError), two (AssertionError) or NaN. Prices are added up, compared and
    journalled, and JSON has no NaN.
    """
    try:
        price = float(machine().get_cost(HOUR_S))
        if not 0.0 <= price < math.inf:
            raise ValueError(f"a price of {price}")
        return price
    except Exception as error:  # noqa: BLE001 an error of any kind leaves only this price unknown
        warn_once("price_unknown", subject, first_line(error))
        return None


def _accelerators_of(machine: Callable[[], Any], subject: str) -> str:
    try:
        return _accelerators(machine())
    except Exception as error:  # noqa: BLE001 as above
        warn_once("instance_type_unknown", subject, first_line(error))
        return ""


def _accelerators(machine: Any) -> str:
    return ", ".join(f"{name}:{count:g}" for name, count in (machine.accelerators or {}).items())


def labelled(resources: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the resources with the cluster's name as a label on every alternative.

    Labels above the alternatives are copied into each, since SkyPilot would mix the labels of all.
    """
    config = copy.deepcopy(resources)
    shared = config.pop("labels", {})
    for place in config.get("any_of") or config.get("ordered") or [config]:
        place["labels"] = {**shared, **place.get("labels", {}), LABEL: name}
    return config
