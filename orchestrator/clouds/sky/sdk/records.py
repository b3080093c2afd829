"""SkyPilot's objects in our types, and our words in its keys. Imports no SkyPilot."""

from __future__ import annotations

import copy
from typing import Any

from orchestrator.clouds.sky.sdk.types import Cluster, ClusterState, Instance, SkyOffer

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
    """The cluster that a record of `sky.status` is of."""
    return cluster_at(record.name, _STATES[record.status.value], record.handle)


def cluster_at(name: str, state: ClusterState, handle: Any) -> Cluster:
    """The cluster that SkyPilot has launched and holds by this handle."""
    launched = handle.launched_resources
    addresses, ports = handle.cached_external_ips, handle.cached_external_ssh_ports
    return Cluster(
        name=name,
        state=state,
        infra=launched.infra.to_str(),
        spot=launched.use_spot,
        price_usd_per_h=float(launched.get_cost(HOUR_S)),
        ssh_address=(addresses[0], ports[0]) if addresses and ports else None,
        machine=launched.instance_type or "",
        accelerators=_accelerators(launched),
        on_demand_usd_per_h=float(launched.copy(use_spot=False).get_cost(HOUR_S)),
    )


def cluster_on_aws(instance: Instance, machine: Any) -> Cluster:
    """The cluster that is this machine of AWS; `machine` is its kind as `sky.Resources`."""
    return Cluster(
        name=instance.name,
        state=instance.state,
        infra=f"aws/{instance.region}/{instance.zone}",
        spot=instance.spot,
        price_usd_per_h=float(machine.get_cost(HOUR_S)),
        ssh_address=(instance.address, SSH_PORT) if instance.address else None,
        machine=instance.machine,
        accelerators=_accelerators(machine),
        on_demand_usd_per_h=float(machine.copy(use_spot=False).get_cost(HOUR_S)),
        unrecorded=True,
    )


def offer_of(machine: Any) -> SkyOffer:
    """The offer that a launchable `sky.Resources` is."""
    price = float(machine.get_cost(HOUR_S))
    return SkyOffer(machine.infra.to_str(), machine.instance_type, _accelerators(machine), machine.use_spot, price)


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
