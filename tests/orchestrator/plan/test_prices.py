"""Which price counts: of the kind, the number and the place that run.yaml names; and where a store is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.orchestrator.clouds import CloudMissing
from grpo_orch.orchestrator.clouds.protocol import Offer
from grpo_orch.orchestrator.clouds.sky.records import PriceList
from grpo_orch.orchestrator.plan.model import Prices
from grpo_orch.orchestrator.plan.prices import (
    by_catalog,
    by_offers,
    by_rehearsal,
    cloud_prices,
    listed_clouds,
    store_place,
)
from grpo_orch.policies.costs.store_costs import Location
from grpo_orch.policies.model.spec import Prices as Rehearsed
from grpo_orch.policies.model.spec import Rehearsal, RehearsedPrices, RunSpec
from grpo_orch.policies.model.vocabulary import Market, Role
from tests.orchestrator.plan.recipes import PRICES, price, spec_of

LISTED = replace(
    PRICES, prices=(*PRICES.prices, price("H200", 1, 3.0, 1.0, "aws/eu-west-1"), price("H100", 8, None, 20.0))
)


def asking(**resources: Any) -> RunSpec:
    spec = spec_of("qwen-32b")
    return replace(spec, trainer=replace(spec.trainer, resources=resources))


@pytest.mark.parametrize(
    ("resources", "on_demand", "spot"),
    [
        ({"accelerators": "H200:1"}, 3.0, 1.0),
        ({"accelerators": "h200:1", "infra": "aws/us-east-1"}, 3.96, 2.38),
        ({"accelerators": "H200:1", "infra": "aws/us-east-1/us-east-1a"}, 3.96, 2.38),
        ({"accelerators": "H200:1", "infra": "gcp"}, 4.40, 2.10),
        ({"accelerators": "H200:1", "cloud": "gcp"}, 4.40, 2.10),
        ({"accelerators": "H200:8"}, 31.0, 14.0),
        ({"accelerators": "H100:8"}, None, 20.0),
        ({"any_of": [{"infra": "aws/us-east-1"}, {"infra": "gcp"}], "accelerators": "H200:1"}, 3.96, 2.10),
        ({"any_of": [{"accelerators": "H200:8"}, {"accelerators": "L4:1"}]}, 0.70, 0.30),
        ({"ordered": [{"accelerators": "H100:8"}, {"accelerators": "L4:1"}]}, 0.70, 20.0),
        ({"accelerators": {"H200": 8, "L4": 1}}, 0.70, 0.30),
        ({"accelerators": ["H200:8", "L4:8"]}, 31.0, 14.0),
        ({"instance_type": "p5en.48xlarge"}, 31.0, 14.0),
        ({"instance_type": "p5en.48xlarge", "infra": "gcp"}, None, None),
        ({"instance_type": "m7i.large"}, None, None),
        ({"any_of": [{"infra": "gcp", "accelerators": "L4:1"}, {"instance_type": "p5en.48xlarge"}]}, 0.70, 14.0),
        ({"accelerators": "H200:1", "infra": "azure"}, None, None),
        ({"cpus": "8+"}, None, None),
    ],
)
def test_cheapest_named_machine_is_chosen(
    resources: dict[str, Any], on_demand: float | None, spot: float | None
) -> None:
    book = by_catalog(asking(**resources), lambda _: LISTED)
    assert book.of(Role.TRAINER) == Prices(on_demand, spot)


def test_named_clouds_are_asked_or_else_the_usual_ones() -> None:
    asked: list[Sequence[str]] = []

    def listed(clouds: Sequence[str]) -> PriceList:
        asked.append(clouds)
        return LISTED

    by_catalog(asking(accelerators="H200:1"), listed)
    by_catalog(asking(accelerators="H200:1", infra="lambda/us-west-1"), listed)
    assert asked == [["aws", "gcp", "azure"], ["lambda"]]
    assert listed_clouds(asking(any_of=[{"infra": "gcp"}, {"infra": "aws/us-east-1"}])) == ["aws", "gcp"]


def test_own_machines_need_no_price_list() -> None:
    def never(_: Sequence[str]) -> PriceList:
        raise AssertionError

    spec = asking(accelerators="H200:1", infra="kubernetes/here")
    book = by_catalog(spec, never)
    assert (book.of(Role.TRAINER), book.unknown) == (Prices(), "")
    assert "your own" in book.source
    assert listed_clouds(asking(any_of=[{"infra": "slurm"}, {"infra": "gcp"}])) == ["gcp"]


def test_missing_price_list_gives_a_line_with_the_reason() -> None:
    def without(_: Sequence[str]) -> PriceList:
        raise CloudMissing("install it")

    book = by_catalog(asking(), without)
    assert (book.unknown, book.of(Role.TRAINER)) == ("prices: install it", Prices())
    offline = by_catalog(asking(), lambda _: PriceList((), {}, {"aws": "ConnectionError"}))
    assert offline.unknown.startswith("prices (aws: ConnectionError); ")
    some = by_catalog(asking(accelerators="H200:1"), lambda _: LISTED)
    assert "aws 2026-11-23" in some.source
    assert some.unknown.startswith("prices at azure; ")


def test_offers_are_on_the_market_they_are_listed_for() -> None:
    book = by_offers(
        [
            Offer(Role.TRAINER, Market.ON_DEMAND, "a machine", 3.96, other_market_usd_per_h=2.38),
            Offer(Role.ROLLOUT, Market.SPOT, "a machine", 2.10, other_market_usd_per_h=4.40),
            Offer(Role.ROLLOUT, Market.SPOT, "a machine", 2.10, other_market_usd_per_h=4.40),
        ],
        0.1,
    )
    assert (book.of(Role.TRAINER), book.of(Role.ROLLOUT)) == (Prices(3.96, 2.38), Prices(4.40, 2.10))
    assert book.controller_usd_per_h == 0.1


def test_a_rehearsals_prices() -> None:
    priced = Rehearsal(prices=RehearsedPrices(rollout=Rehearsed(on_demand_usd_per_h=3.5, spot_usd_per_h=1.2)))
    spec = replace(spec_of("math-two-gpus"), rehearse=priced)
    assert by_rehearsal(spec).of(Role.ROLLOUT) == Prices(3.5, 1.2)
    assert by_rehearsal(spec_of("math-two-gpus")).of(Role.ROLLOUT) == Prices()


def test_clouds_are_in_the_order_of_their_price_on_a_market() -> None:
    on_demand = cloud_prices(LISTED.prices, "H200", 1, Market.ON_DEMAND)
    assert [(one.cloud, one.region, one.on_demand_usd_per_h) for one in on_demand] == [
        ("aws", "eu-west-1", 3.0),
        ("gcp", "us-central1", 4.40),
    ]
    spot = cloud_prices(PRICES.prices, "L4", 1, Market.SPOT)
    assert [(one.cloud, one.spot_usd_per_h) for one in spot] == [("aws", 0.30), ("gcp", None)]
    assert cloud_prices(PRICES.prices, "H200", 4, Market.SPOT) == ()


@pytest.mark.parametrize(
    ("url", "options", "place"),
    [
        ("s3://bucket/run", {"region": "eu-west-1"}, Location("aws", "eu-west-1")),
        ("s3://bucket/run", {"endpoint": "https://s3.us-east-2.amazonaws.com"}, Location("aws", "us-east-2")),
        ("s3://bucket/run", {"endpoint": "https://x.r2.cloudflarestorage.com", "region": "auto"}, Location("r2")),
        ("s3://bucket/run", {"endpoint": "https://minio.example"}, Location("")),
        ("s3://bucket/run", {}, Location("aws", "us-west-2")),
        ("gs://bucket/run", {}, Location("gcp")),
        ("memory://run", {}, Location("local")),
    ],
)
def test_stores_place_follows_its_url_and_options(
    url: str, options: dict[str, str], place: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ENDPOINT_URL", raising=False)
    monkeypatch.setenv("AWS_REGION", "us-west-2")
    store = Store("memory://place", options={})
    store.url, store.options = url, dict(options)
    assert store_place(store) == place
