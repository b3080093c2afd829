"""What the disk of a run's machine costs: it is there for as long as the machine is."""

from __future__ import annotations

from collections.abc import Iterator

from policies.fleet.list_prices import DISK_GB, clouds_with_disks, disk_usd_per_h
from policies.model.processes import alternatives_of
from policies.model.spec import RunSpec, generates_itself
from policies.model.vocabulary import Role
from policies.weights.disk_size import KEY, gb_of

ANYWHERE = ("", "*")


def usd_per_h(spec: RunSpec, role: Role, cloud: str | None) -> float:
    """Return the dearest disk that such a machine may have, USD an hour; 0 where no price is known of any.

    `cloud`: where the machine is asked for; None: wherever run.yaml's resources allow.
    """
    return max((price for _, price in _disks(spec, role, cloud) if price is not None), default=0.0)


def unknown(spec: RunSpec) -> list[str]:
    """The clouds of a run on which no price is known of its disks."""
    roles = (Role.TRAINER,) if generates_itself(spec) else (Role.TRAINER, Role.ROLLOUT)
    return sorted({cloud for role in roles for cloud, price in _disks(spec, role, None) if price is None})


def _disks(spec: RunSpec, role: Role, cloud: str | None) -> Iterator[tuple[str, float | None]]:
    """Each disk that run.yaml allows: its cloud, and what it costs an hour. A cloud that is not named is each of
    those whose prices are known."""
    if spec.cloud != "sky":
        return
    resources = spec.trainer.resources if role is Role.TRAINER else spec.rollout.resources
    for machine in alternatives_of(resources):
        place = str(machine.get("infra") or machine.get("cloud") or "")
        named = place.partition("/")[0].lower()
        if cloud is not None and named not in (cloud, *ANYWHERE):
            continue
        clouds = (cloud or named,) if cloud or named not in ANYWHERE else clouds_with_disks()
        gb, tier = gb_of(machine.get(KEY)) or DISK_GB, machine.get("disk_tier")
        for one in clouds:
            yield one, disk_usd_per_h(one, None if tier is None else str(tier), gb)
