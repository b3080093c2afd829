"""What a run's machines cost, by its cloud's offers or else SkyPilot's catalog; and where its store is."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from checkpoint.store.run_store import Store
from orchestrator.clouds import CloudMissing
from orchestrator.clouds.protocol import Offer
from orchestrator.clouds.sky.records import ListPrice, PriceList
from orchestrator.clouds.sky.work import places
from orchestrator.plan.machines import kinds_in
from orchestrator.plan.model import CloudPrice
from policies.costs.store_costs import Place
from policies.model.spec import RunSpec, alternatives_of, gpu_counts
from policies.model.vocabulary import Market, Role
from policies.sizing.money import Prices

USUAL_CLOUDS = ("aws", "gcp", "azure")  # where run.yaml names none
OWN = ("kubernetes", "k8s", "ssh", "slurm")
ONLINE = "SkyPilot fetches its catalog from github.com, and there was no answer"

ListPrices = Callable[[Sequence[str]], PriceList]


@dataclass(frozen=True, slots=True)
class PriceBook:
    """Prices of a run's machines by role, and the list that others are looked up in.

    `source` says in a line where they come from, `unknown` why there are none.
    """

    by_role: dict[Role, Prices] = field(default_factory=dict)
    beside_usd_per_h: float = 0.0  # of the controller's machine
    listed: tuple[ListPrice, ...] = ()
    source: str = ""
    unknown: str = ""

    def of(self, role: Role) -> Prices:
        return self.by_role.get(role, Prices())


def by_offers(offers: Iterable[Offer], beside_usd_per_h: float = 0.0) -> PriceBook:
    """The prices that a run's own cloud has just offered; `beside_usd_per_h` is the controller's machine's."""
    by_role: dict[Role, Prices] = {}
    for offer in offers:
        here, there = offer.price_usd_per_h, offer.other_market_usd_per_h
        on_spot = offer.market is Market.SPOT
        by_role[offer.role] = Prices(there, here) if on_spot else Prices(here, there)
    return PriceBook(
        by_role, beside_usd_per_h, source="prices: what the cloud offers now; spot changes by the hour"
    )


def by_rehearsal(spec: RunSpec) -> PriceBook:
    """The prices that a run on this machine rehearses with; without them it costs nothing."""
    if spec.rehearse is None:
        return PriceBook(source="prices: none, for the run is on this machine")
    roles = {Role.TRAINER: spec.rehearse.trainer_prices, Role.ROLLOUT: spec.rehearse.rollout_prices}
    by_role = {role: Prices(one.on_demand_usd_per_h, one.spot_usd_per_h) for role, one in roles.items()}
    return PriceBook(by_role, source="prices: those of `rehearse`")


def by_catalog(spec: RunSpec, list_prices: ListPrices) -> PriceBook:
    """The list prices of the machines that run.yaml names, and of all others; no cloud is asked."""
    clouds = clouds_of(spec)
    if not clouds:
        return PriceBook(source="prices: none, for the machines are your own")
    try:
        found = list_prices(clouds)
    except CloudMissing as error:
        return PriceBook(unknown=f"prices: {error}")
    if not found.prices:
        why = ", ".join(f"{cloud}: {reason}" for cloud, reason in found.missing.items())
        return PriceBook(unknown=f"prices ({why}); {ONLINE}")
    dates = ", ".join(f"{cloud} {date}" for cloud, date in found.dates.items())
    return PriceBook(
        by_role={
            Role.TRAINER: _cheapest(spec.trainer.resources, found.prices),
            Role.ROLLOUT: _cheapest(spec.rollout.resources, found.prices),
        },
        listed=found.prices,
        source=f"prices: SkyPilot's catalog as of {dates}; the cheapest region; spot changes by the hour",
        unknown=f"prices at {', '.join(found.missing)}; {ONLINE}" if found.missing else "",
    )


def clouds_of(spec: RunSpec) -> list[str]:
    """The clouds that the run names, else the usual ones; of one's own machines there is no list of prices."""
    named = [place for one in (spec.trainer, spec.rollout) for place in places(one.resources) if place]
    clouds = {place.split("/")[0].lower() for place in named} - {"*"}
    return sorted(clouds - set(OWN)) if clouds else list(USUAL_CLOUDS)


def cloud_prices(listed: Iterable[ListPrice], gpu: str, gpus: int, market: Market) -> tuple[CloudPrice, ...]:
    """At each cloud the cheapest machine on that market with so many of these GPUs, the cheapest cloud first."""
    by_cloud: dict[str, list[ListPrice]] = {}
    for one in listed:
        if one.gpu.lower() == gpu.lower() and one.gpus == gpus:
            by_cloud.setdefault(one.cloud, []).append(one)
    found = [_at_cloud(cloud, ones, market) for cloud, ones in by_cloud.items()]
    return tuple(sorted(found, key=lambda one: (_or_inf(_on(one, market)), one.cloud)))


def _at_cloud(cloud: str, ones: Sequence[ListPrice], market: Market) -> CloudPrice:
    best = min(ones, key=lambda one: _or_inf(_on(one, market)))
    return CloudPrice(
        cloud=cloud,
        instance_type=best.instance_type,
        region=best.region,
        on_demand_usd_per_h=_least(one.on_demand_usd_per_h for one in ones),
        spot_usd_per_h=_least(one.spot_usd_per_h for one in ones),
    )


def _cheapest(resources: dict[str, Any], listed: Sequence[ListPrice]) -> Prices:
    """Of the machines that are named, where they are named: of `any_of` the cheapest that the list has, of
    `ordered` the first, as SkyPilot takes them."""
    each = [[one for one in listed if _is_such(one, wanted)] for wanted in alternatives_of(resources)]
    by_rank = each if resources.get("ordered") else [[one for ones in each for one in ones]]
    on_demand = [_least(one.on_demand_usd_per_h for one in ones) for ones in by_rank]
    spot = [_least(one.spot_usd_per_h for one in ones) for ones in by_rank]
    return Prices(_first(on_demand), _first(spot))


def _is_such(price: ListPrice, wanted: dict[str, Any]) -> bool:
    """Whether it is of such a machine, in the place that is named."""
    gpus, machine = _gpus(wanted.get("accelerators")), wanted.get("instance_type")
    if not (gpus or machine) or not all(_is_in(price, one or "*") for one in places(wanted)):
        return False
    return machine in (None, price.instance_type) and (not gpus or (price.gpu.lower(), price.gpus) in gpus)


def _gpus(accelerators: Any) -> set[tuple[str, float | None]]:
    """Kinds, in small letters, and how many of each, any of which will do."""
    if isinstance(accelerators, Mapping):
        accelerators = [f"{kind}:{count}" for kind, count in accelerators.items()]
    listed = [accelerators] if isinstance(accelerators, str) else accelerators or ()
    return {(kinds_in(one)[0].lower(), count) for one in listed for count in gpu_counts({"accelerators": one})}


def _is_in(price: ListPrice, place: str) -> bool:
    """Whether it is in such a place: `aws/us-east-1/us-east-1a`, `aws` or `*`."""
    here = (price.cloud, price.region)
    return all(part in ("*", at) for part, at in zip(place.split("/"), here, strict=False))


def _on(price: CloudPrice | ListPrice, market: Market) -> float | None:
    return price.spot_usd_per_h if market is Market.SPOT else price.on_demand_usd_per_h


def _or_inf(price: float | None) -> float:
    return float("inf") if price is None else price


def _first(prices: Iterable[float | None]) -> float | None:
    return next((price for price in prices if price is not None), None)


def _least(prices: Iterable[float | None]) -> float | None:
    return min((price for price in prices if price is not None), default=None)


# The store's provider and region, as far as its URL and options tell.

_STORE_CLOUDS = {"gs": "gcp", "az": "azure", "file": "local", "memory": "local", "sim": "aws"}
_ENDPOINT = ("endpoint", "endpoint_url", "aws_endpoint", "aws_endpoint_url")
_REGION = ("region", "default_region", "aws_region", "aws_default_region")
_AWS_HOST = re.compile(r"s3[.-]([a-z]{2}(?:-[a-z]+)+-\d)\.amazonaws\.com")


def store_place(store: Store) -> Place:
    """Return where the store is; empty words for what is not known."""
    scheme = store.url.partition("://")[0]
    if scheme not in ("s3", "s3a"):
        return Place(_STORE_CLOUDS.get(scheme, ""))
    options = {str(key).lower(): str(value) for key, value in store.options.items()}
    environment = {key.lower(): value for key, value in os.environ.items() if key.startswith("AWS_")}
    endpoint, region = _first_named(_ENDPOINT, options, environment), _first_named(_REGION, options, environment)
    if "r2.cloudflarestorage.com" in endpoint:
        return Place("r2")
    if endpoint and "amazonaws.com" not in endpoint:
        return Place("")
    found = _AWS_HOST.search(endpoint)
    return Place("aws", found[1] if found else region)


def _first_named(names: tuple[str, ...], *maps: Mapping[str, str]) -> str:
    return next((one[name] for one in maps for name in names if one.get(name)), "")
