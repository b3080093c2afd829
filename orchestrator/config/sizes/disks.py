"""Disks of `cloud: sky`: as large as the model needs where none is named; notices tell of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from orchestrator.config.reading.problems import Findings
from orchestrator.config.sizes.model import NotKnown
from policies.model.processes import ALTERNATIVES
from policies.model.spec import RunSpec, generates_itself
from policies.model.vocabulary import Role
from policies.weights.disk_size import KEY, gb_of
from policies.weights.disks import GB, ModelSize, disk_gb, disk_parts

DEFAULT_GB = 256  # SkyPilot's (0.14.1)
# There the disk is the pool's: on Kubernetes to ask for more than its machines have is to get none.
OWN_DISKS = ("kubernetes", "k8s", "ssh", "slurm")


def size_disks(spec: RunSpec, find_size: Callable[[RunSpec], ModelSize], findings: Findings) -> RunSpec:
    """Return the specification with the disks that its model needs. `find_size` raises NotKnown."""
    if spec.cloud != "sky":
        return spec
    try:
        size = find_size(spec)
    except NotKnown as error:
        kept = f"no disk is asked for beyond {KEY} of `resources`, or SkyPilot's {DEFAULT_GB} GB"
        findings.notice(("trainer", "model"), f"its size is not known here ({error}), so {kept}")
        return spec
    trainer, rollout = spec.trainer, spec.rollout
    resources = _sized(Role.TRAINER, trainer.resources, spec, size, findings)
    spec = replace(spec, trainer=replace(trainer, resources=resources))
    if generates_itself(spec):
        return spec
    resources = _sized(Role.ROLLOUT, rollout.resources, spec, size, findings)
    return replace(spec, rollout=replace(rollout, resources=resources))


def _sized(
    role: Role, resources: dict[str, Any], spec: RunSpec, size: ModelSize, findings: Findings
) -> dict[str, Any]:
    """The section's resources, with a disk where one is to be asked for."""
    needed_gb, named = disk_gb(role, spec, size), _named_gb(resources)
    smallest_gb = min(named, default=DEFAULT_GB)
    if smallest_gb >= needed_gb:
        return resources
    asks = not named and not _has_its_own(resources)
    parts = [f"{what} {bytes_ / GB:.0f}" for what, bytes_ in disk_parts(role, spec, size).items()]
    if asks:
        said = f"no {KEY} is named, so {needed_gb} GB are asked for"
    else:
        has = f"{KEY} is {smallest_gb} GB" if named else f"no {KEY} is asked for on such machines"
        said = f"{has}, and about {needed_gb} GB are needed"
    findings.notice((role.value, "resources", KEY), f"{said}: {', '.join(parts)}")
    return {**resources, KEY: needed_gb} if asks else resources


def _named_gb(resources: Mapping[str, Any]) -> list[int]:
    """The sizes in it, those of alternatives included."""
    nested = [one for key in ALTERNATIVES for one in resources.get(key) or () if isinstance(one, Mapping)]
    return [found for one in (resources, *nested) if (found := gb_of(one.get(KEY))) is not None]


def _has_its_own(resources: Mapping[str, Any]) -> bool:
    nested = [one for key in ALTERNATIVES for one in resources.get(key) or () if isinstance(one, Mapping)]
    places = [str(one.get(key) or "") for one in (resources, *nested) for key in ("infra", "cloud")]
    return any(place.lower().startswith(OWN_DISKS) for place in places)
