"""Prices of a run's machines, from its cloud's offers or SkyPilot's catalog; and the place of its store."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from grpo_orch.checkpoint.store.backends.aws import endpoint_and_region
from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.orchestrator.clouds import CloudMissing
from grpo_orch.orchestrator.clouds.protocol import Offer
from grpo_orch.orchestrator.clouds.sky.records import ListPrice, PriceList
from grpo_orch.orchestrator.plan.model import CloudPrice, Prices
from grpo_orch.policies.costs.disks import OWN
from grpo_orch.policies.costs.store_costs import Location
from grpo_orch.policies.model.spec import RunSpec, accelerators_of, alternatives_of, clouds_of, place_of
from grpo_orch.policies.model.vocabulary import Market, Role

USUAL_CLOUDS = ("aws", "gcp", "azure")  # if run.yaml names none
CATALOG_UNREACHABLE = "SkyPilot could not fetch its catalog from github.com"

ListPrices = Callable[[Sequence[str]], PriceList]


@dataclass(frozen=True, slots=True)
class PriceBook:
    """Prices of a run's machines.

    Attributes:
        by_role: prices of the machines in run.yaml.
        controller_usd_per_h: price of the controller machine.
        listed: list prices of all machines.
        source: a line about the origin of the prices.
        unknown: a line about missing prices.
    """

    by_role: dict[Role, Prices] = field(default_factory=dict)
    controller_usd_per_h: float = 0.0
    listed: tuple[ListPrice, ...] = ()
    source: str = ""
    unknown: str = ""

    def of(self, role: Role) -> Prices:
        return self.by_role.get(role, Prices())


def by_offers(offers: Iterable[Offer], controller_usd_per_h: float = 0.0) -> PriceBook:
    """Return the current offers of the run's cloud as prices."""
    by_role: dict[Role, Prices] = {}
    for offer in offers:
        this, other = offer.price_usd_per_h, offer.other_market_usd_per_h
        is_spot = offer.market is Market.SPOT
        by_role[offer.role] = Prices(other, this) if is_spot else Prices(this, other)
    return PriceBook(
        by_role, controller_usd_per_h, source="prices: current offers of the cloud; spot prices change by the hour"
    )


def by_rehearsal(spec: RunSpec) -> PriceBook:
    """Return the `rehearse` prices of a run on this machine; without them it costs nothing."""
    if spec.rehearse is None:
        return PriceBook(source="prices: none, because the run is on this machine")
    roles = {Role.TRAINER: spec.rehearse.prices.trainer, Role.ROLLOUT: spec.rehearse.prices.rollout}
    by_role = {role: Prices(prices.on_demand_usd_per_h, prices.spot_usd_per_h) for role, prices in roles.items()}
    return PriceBook(by_role, source="prices: those of `rehearse` in run.yaml")


def by_catalog(spec: RunSpec, list_prices: ListPrices) -> PriceBook:
    """Return the catalog's list prices of the machines in run.yaml and of all others; query no cloud."""
    clouds = listed_clouds(spec)
    if not clouds:
        return PriceBook(source="prices: none, because the machines are your own")
    try:
        found = list_prices(clouds)
    except CloudMissing as error:
        return PriceBook(unknown=f"prices: {error}")
    if not found.prices:
        why = ", ".join(f"{cloud}: {reason}" for cloud, reason in found.missing.items())
        return PriceBook(unknown=f"prices ({why}); {CATALOG_UNREACHABLE}")
    dates = ", ".join(f"{cloud} {date}" for cloud, date in found.dates.items())
    return PriceBook(
        by_role={
            Role.TRAINER: _cheapest(spec.trainer.resources, found.prices),
            Role.ROLLOUT: _cheapest(spec.rollout.resources, found.prices),
        },
        listed=found.prices,
        source=f"prices: SkyPilot's catalog as of {dates}; cheapest region; spot prices change by the hour",
        unknown=f"prices at {', '.join(found.missing)}; {CATALOG_UNREACHABLE}" if found.missing else "",
    )


def listed_clouds(spec: RunSpec) -> list[str]:
    """Return the run's clouds, else the usual ones, without those of own machines, which have no list prices."""
    clouds = clouds_of(spec.trainer.resources) | clouds_of(spec.rollout.resources)
    return sorted(clouds - set(OWN)) if clouds else list(USUAL_CLOUDS)


def cloud_prices(listed: Iterable[ListPrice], gpu: str, gpus: int, market: Market) -> tuple[CloudPrice, ...]:
    """Return each cloud's cheapest machine on that market with this number of GPUs, cheapest cloud first."""
    by_cloud: dict[str, list[ListPrice]] = {}
    for price in listed:
        if price.gpu.lower() == gpu.lower() and price.gpus == gpus:
            by_cloud.setdefault(price.cloud, []).append(price)
    found = []
    for cloud, prices in by_cloud.items():
        best, lowest = min(prices, key=lambda price: _usd_per_h(price, market)), _lowest_of(prices)
        priced = CloudPrice(
            cloud=cloud,
            instance_type=best.instance_type,
            region=best.region,
            on_demand_usd_per_h=lowest.on_demand_usd_per_h,
            spot_usd_per_h=lowest.spot_usd_per_h,
        )
        found.append((_usd_per_h(best, market), cloud, priced))
    return tuple(priced for _, _, priced in sorted(found, key=lambda entry: entry[:2]))


def _cheapest(resources: dict[str, Any], listed: Sequence[ListPrice]) -> Prices:
    """Return the prices of the machines in `resources`: the cheapest of `any_of`, the first of `ordered`, as
    SkyPilot chooses."""
    groups = [[price for price in listed if _matches(price, wanted)] for wanted in alternatives_of(resources)]
    if not resources.get("ordered"):
        groups = [[price for prices in groups for price in prices]]
    lowest = [_lowest_of(prices) for prices in groups]
    on_demand, spot = (
        next((usd_per_h for prices in lowest if (usd_per_h := prices.on(market)) is not None), None)
        for market in (Market.ON_DEMAND, Market.SPOT)
    )
    return Prices(on_demand, spot)


def _matches(price: ListPrice, wanted: dict[str, Any]) -> bool:
    """Return whether the price is of the wanted machine and place."""
    gpus = {(name.lower(), count) for name, count in accelerators_of(wanted)}
    machine = wanted.get("instance_type")
    if not (gpus or machine) or not _is_in(price, place_of(wanted)):
        return False
    return machine in (None, price.instance_type) and (not gpus or (price.gpu.lower(), price.gpus) in gpus)


def _is_in(price: ListPrice, place: tuple[str, str]) -> bool:
    """Return whether the price is of that cloud and region, each of which may be `*`."""
    return all(part in ("*", name) for part, name in zip(place, (price.cloud, price.region), strict=True))


def _usd_per_h(price: ListPrice, market: Market) -> float:
    """Return the price on a market; infinite without one."""
    usd_per_h = Prices(price.on_demand_usd_per_h, price.spot_usd_per_h).on(market)
    return float("inf") if usd_per_h is None else usd_per_h


def _lowest_of(prices: Iterable[ListPrice]) -> Prices:
    """Return the lowest price on each market."""
    pairs = [(price.on_demand_usd_per_h, price.spot_usd_per_h) for price in prices]
    lowest = [min((usd for usd in known if usd is not None), default=None) for known in zip(*pairs, strict=True)]
    return Prices(*lowest)


# The store's provider and region, from its URL and options.

_STORE_CLOUDS = {"gs": "gcp", "az": "azure", "file": "local", "memory": "local", "sim": "aws"}
_AWS_HOST = re.compile(r"s3[.-]([a-z]{2}(?:-[a-z]+)+-\d)\.amazonaws\.com")


def store_place(store: Store) -> Location:
    """Return the store's cloud and region; empty strings if unknown. Raises StoreError."""
    scheme = store.url.partition("://")[0]
    if scheme != "s3":
        return Location(_STORE_CLOUDS.get(scheme, ""))
    endpoint, region = endpoint_and_region(store.options)
    if "r2.cloudflarestorage.com" in endpoint:
        return Location("r2")
    if endpoint and "amazonaws.com" not in endpoint:
        return Location("")
    found = _AWS_HOST.search(endpoint)
    return Location("aws", found[1] if found else region)
