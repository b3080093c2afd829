"""SkyPilot's `resources` keys, as its own schema (0.14.1, `sky/utils/schemas.py`) has them.

Values beyond their type are SkyPilot's to judge: it knows the clouds, and its catalogs change.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from orchestrator.config.problems import Findings, KeyPath, unknown_key
from orchestrator.config.structure import Kind, mismatch, shown
from policies.model.processes import ALTERNATIVES
from policies.weights import disk_size

WHOSE = "SkyPilot's resources keys (0.14.1)"
KEYS = {
    "accelerator_args": "dict",
    "accelerators": "str | dict | list[str]",
    "autostop": "bool | int | str | dict",
    "cloud": "str",
    "cpus": "str | float",
    "disk_size": "str | int",
    "disk_tier": "str",
    "image_id": "str | dict | None",
    "infra": "str",
    "instance_type": "str",
    "job_recovery": "str | dict",
    "labels": "dict[str]",
    "local_disk": "str",
    "max_hourly_cost": "float",
    "memory": "str | float",
    "network_tier": "str",
    "priority": "int",
    "priority_class": "str",
    "region": "str",
    "use_spot": "bool",
    "volumes": "list",
    "zone": "str",
}
PORTS = "ports stay closed: nodes reach each other without; leave it out"


def check_resources(data: dict[str, Any], path: KeyPath, findings: Findings, *, nested: bool = False) -> None:
    """Report unknown, refused and mistyped keys, those inside `any_of` and `ordered` too."""
    allowed = KEYS if nested else {**KEYS, **dict.fromkeys(ALTERNATIVES, "list")}
    for key, value in data.items():
        below = (*path, key)
        if key == "ports":
            findings.add(below, PORTS)
        elif key not in allowed:
            findings.add(below, unknown_key(key, allowed, WHOSE))
        elif message := mismatch(value, Kind(allowed[key])):
            findings.add(below, message)
        elif key == disk_size.KEY and disk_size.gb_of(value) is None:
            findings.add(below, f"{disk_size.EXPECTED}, got {shown(value)}")
        elif key in ALTERNATIVES:
            for index, item in enumerate(value):
                if message := mismatch(item, Kind("dict")):
                    findings.add((*below, index), message)
                else:
                    check_resources(item, (*below, index), findings, nested=True)


def named_regions(resources: Mapping[str, Any]) -> set[str]:
    """The regions that checked resources name, alternatives included, as in `aws/us-east-1`."""
    return {"/".join(parts[:2]) for parts in _places(resources) if len(parts) > 1 and "*" not in parts[:2]}


def named_clouds(resources: Mapping[str, Any]) -> set[str]:
    """The clouds that checked resources name, alternatives included, in lower case."""
    return {parts[0].lower() for parts in _places(resources)} - {"*"}


def _places(resources: Mapping[str, Any]) -> list[list[str]]:
    nested = [one for key in ALTERNATIVES for one in resources.get(key) or ()]
    return [_place(one) for one in (resources, *nested)]


def _place(entry: Mapping[str, Any]) -> list[str]:
    words = entry.get("infra") or "/".join(str(entry.get(key) or "*") for key in ("cloud", "region"))
    return [part.strip() for part in str(words).split("/")]
