"""What an account may not have at all: AWS and GCP tell its quota, to whoever may ask for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from orchestrator.clouds.protocol import CloudRefused, CloudUnavailable
from orchestrator.clouds.sky.records import SkyOffer
from orchestrator.clouds.sky.work import region_of
from policies.model.vocabulary import Market, Role

if TYPE_CHECKING:
    from orchestrator.clouds.sky.sdk.skypilot import SkyPilot

QUOTA_HELP = "https://docs.skypilot.co/en/latest/cloud-setup/quota.html"
ASKED_MAX = 8  # of a role: a machine that may be anywhere has dozens of regions, a second or so each


def quota_lines(sky: SkyPilot, role: Role, resources: dict[str, Any], market: Market) -> list[str]:
    """Which of the kinds that SkyPilot offers for these resources, the cheapest first, have a quota of zero.

    A quota is a kind's on a market of a region. Empty also where no offers or quotas can be told.
    """
    try:
        offers = sky.offers(resources, spot=market is Market.SPOT)
        kinds: dict[tuple[str, str], SkyOffer] = {}
        for offer in offers:
            kinds.setdefault((region_of(offer.infra), offer.instance_type), offer)
        asked = list(kinds.items())[:ASKED_MAX]
        lacking = [kind for kind, offer in asked if not sky.has_quota(offer)]
    except (CloudRefused, CloudUnavailable):
        return []
    words = market.replace("_", " ")
    return [f"{role}: {zero_quota(kind, words, region)}" for region, kind in lacking]


def zero_quota(kind: str, market: str, places: str) -> str:
    """What to tell of a quota of zero."""
    return f"the account's quota for {kind} {market} is zero in {places}; ask for more: {QUOTA_HELP}"
