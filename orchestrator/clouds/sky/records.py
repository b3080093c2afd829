"""The types of SkyPilot's adapter, and how SkyPilot's own records are decoded into them. Imports no SkyPilot.

SkyPilot reads its records of clusters all at once, here and on its server: one that it cannot read, as after a
change of its version, or a price that its catalog has twice, is an error for all of them. Here a record that
cannot be decoded affects its own cluster only.
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

from orchestrator.clouds.protocol import CloudRefused, CloudUnavailable


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


# Decoding each record by itself.

log = structlog.get_logger()

_KINDS_OF_TROUBLE = 1024
INIT = "INIT"


@functools.lru_cache(maxsize=_KINDS_OF_TROUBLE)
def say_once(event: str, what: str, why: str) -> None:
    """Warn of what a record does not tell, the first time that this process meets it."""
    log.warning(event, what=what, why=why)


def why_not(error: Exception) -> str:
    """An error as the reason of `say_once`: SkyPilot's assertions end with a whole table."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def decode_each(
    decode: Callable[[list[dict[str, Any]]], list[Any]],
) -> Callable[[list[dict[str, Any]]], list[Any]]:
    """SkyPilot's `decode` of a list of records, made to decode each by itself, as far as it can be."""

    def decode_all(answer: list[dict[str, Any]]) -> list[Any]:
        return [_decoded(decode, said) for said in answer]

    return decode_all


def _decoded(decode: Callable[[list[dict[str, Any]]], list[Any]], said: dict[str, Any]) -> Any:
    why = ""
    for left_out in ({}, {"status": INIT}, {"handle": None}):
        try:
            (record,) = decode([{**said, **left_out}])
        except Exception as error:  # noqa: BLE001 whatever it is, this one record is not whole
            why = why or why_not(error)
            continue
        if why:
            say_once("cluster_half_read", said["name"], why)
        return record
    return unread(said["name"], why)


def read_each(ask: Callable[[Sequence[str]], list[Any]], names: Sequence[str]) -> list[Any]:
    """The records of these clusters, asked for together and, where the server fails at one of them, apart.

    Raises CloudUnavailable when the server does not answer.
    """
    try:
        return ask(names) if names else []
    except CloudUnavailable as error:
        if not was_answered(error):
            raise
        if len(names) == 1:
            return [unread(names[0], str(error))]
    half = len(names) // 2
    return [*read_each(ask, names[:half]), *read_each(ask, names[half:])]


def was_answered(error: CloudUnavailable) -> bool:
    """Whether it was the answer to a question, and not that none came."""
    return isinstance(error.__cause__, CloudRefused)


def unread(name: str, why: str) -> Any:
    """In place of a record of which only this is known: there is one."""
    say_once("cluster_not_read", name, why)
    return SimpleNamespace(name=name, status=SimpleNamespace(value=INIT), handle=None)


# SkyPilot's objects in our types, and our labels in its resources.

LABEL = "grpo-orch"  # on every machine, with the cluster's name
HOUR_S = 3600
SSH_PORT = 22

_STATES = {
    "INIT": ClusterState.STARTING,
    "PENDING": ClusterState.STARTING,
    "AUTOSTOPPING": ClusterState.STARTING,  # it takes itself down, and is not to be reached any more
    "UP": ClusterState.UP,
    "STOPPED": ClusterState.STOPPED,
}


def cluster_of(record: Any) -> Cluster:
    """The cluster that a record of `sky.status` is of. One that cannot be read whole hides none of the others."""
    state = _STATES.get(record.status.value, ClusterState.STARTING)
    try:
        return cluster_at(record.name, state, record.handle)
    except Exception as error:  # noqa: BLE001 whatever it is, only this one record is odd
        say_once("cluster_half_read", record.name, why_not(error))
        return cluster_at(record.name, state, None)


def cluster_at(name: str, state: ClusterState, handle: Any) -> Cluster:
    """The cluster that SkyPilot has launched and holds by this handle; what that does not tell is left open."""
    launched = None if handle is None else handle.launched_resources
    if launched is None:
        say_once("cluster_without_machine", name, "SkyPilot has no more of it on record than its name")
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
    """The cluster that is this machine of AWS. `kind`: its kind as `sky.Resources`, on spot or on demand.

    SkyPilot may know no such kind: whoever launched it may have had a newer list of them.
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
    """The clouds that can give machines: `workspaces` are `sky check`'s, with what each cloud can do there."""
    return {
        name.partition("/")[0].lower()
        for workspace in workspaces.values()
        for name, abilities in workspace.items()
        if "compute" in abilities
    }


def offer_of(machine: Any) -> SkyOffer | None:
    """The offer that a launchable `sky.Resources` is; None where no price is known: SkyPilot launches none."""
    place = machine.infra.to_str()
    market = "spot" if machine.use_spot else "on demand"
    price = _usd_per_h(lambda: machine, f"{place} {machine.instance_type} {market}")
    if price is None:
        return None
    return SkyOffer(place, machine.instance_type, _accelerators(machine), machine.use_spot, price)


def _usd_per_h(machine: Callable[[], Any], what: str) -> float | None:
    """None, which is said once, where SkyPilot's catalog has no price (ValueError), two (AssertionError) or one
    that is no number: a price is added up, compared and journalled, and JSON has no NaN."""
    try:
        price = float(machine().get_cost(HOUR_S))
        if not 0.0 <= price < math.inf:
            raise ValueError(f"a price of {price}")
        return price
    except Exception as error:  # noqa: BLE001 whatever it is, this one price is not known
        say_once("price_not_known", what, why_not(error))
        return None


def _accelerators_of(machine: Callable[[], Any], what: str) -> str:
    try:
        return _accelerators(machine())
    except Exception as error:  # noqa: BLE001 as above
        say_once("machine_not_known", what, why_not(error))
        return ""


def _accelerators(machine: Any) -> str:
    return ", ".join(f"{name}:{count:g}" for name, count in (machine.accelerators or {}).items())


def labelled(resources: dict[str, Any], name: str) -> dict[str, Any]:
    """The resources with the cluster's name on every alternative.

    Labels above the alternatives are put into each: SkyPilot would mix those of all.
    """
    config = copy.deepcopy(resources)
    above = config.pop("labels", {})
    for place in config.get("any_of") or config.get("ordered") or [config]:
        place["labels"] = {**above, **place.get("labels", {}), LABEL: name}
    return config
