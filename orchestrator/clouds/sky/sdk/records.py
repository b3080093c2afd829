"""SkyPilot's objects in our types, and our words in its keys. Imports no SkyPilot."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

from orchestrator.clouds.sky.sdk.each import say_once, why_not
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
