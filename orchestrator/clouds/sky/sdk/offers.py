"""The machines that clouds offer, the cheapest first. Imports no SkyPilot."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from orchestrator.clouds.protocol import CloudRefused
from orchestrator.clouds.sky.errors import OTHER_MACHINE
from orchestrator.clouds.sky.records import SkyOffer, offer_of, say_once, why_not
from policies.model.vocabulary import Refusal


def cheapest_first(
    wanted: Iterable[Any], clouds: Mapping[str, Any], launchables: Callable[[Any], Iterable[Any]], asked: str
) -> list[SkyOffer]:
    """Return what could be launched in each region or zone.

    Raises CloudRefused when no cloud has such a machine, and what a cloud did when none of them answers.

    Args:
        wanted: each alternative, as `sky.Resources`.
        clouds: those that may be used, by name.
        launchables: returns a machine once for each region or zone that has it.
        asked: the alternatives in words.
    """
    found: set[SkyOffer] = set()
    like: set[str] = set()
    failed: list[Exception] = []
    for one in wanted:
        one.validate()
        for name, cloud in clouds.items():
            if one.cloud is None or one.cloud.is_same_cloud(cloud):
                try:
                    found.update(_offers_of(cloud, one, launchables, like))
                except Exception as error:  # noqa: BLE001 a cluster of one's own that is away hides no other cloud
                    failed.append(error)
                    say_once("cloud_not_asked", name, why_not(error))
    if not found and failed:
        raise failed[0]
    if not found:
        hint = f"there is {', '.join(sorted(like))}" if like else OTHER_MACHINE
        raise CloudRefused(Refusal.QUOTA, f"no enabled cloud ({', '.join(clouds)}) has {asked}; {hint}")
    return sorted(found, key=lambda offer: (offer.price_usd_per_h, offer.infra, offer.instance_type))


def _offers_of(
    cloud: Any, wanted: Any, launchables: Callable[[Any], Iterable[Any]], like: set[str]
) -> Iterator[SkyOffer]:
    """What a cloud has; `like` gets what it has instead."""
    feasible = cloud.get_feasible_launchable_resources(wanted, 1)
    like.update(feasible.fuzzy_candidate_list)
    for machine in feasible.resources_list[:1]:  # the cheapest, which a launch would take
        for one in launchables(machine):
            # Where SkyPilot cannot tell the price it does not launch, either.
            if (offer := offer_of(one)) is not None:
                yield offer
