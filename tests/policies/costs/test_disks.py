"""What disks of real sizes cost, and where no price is known of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from grpo_orch.policies.costs import disks
from grpo_orch.policies.costs.disks import MONTH_H, disk_usd_per_h
from grpo_orch.policies.fleet.budget import not_counted
from grpo_orch.policies.model.pools import Pool
from grpo_orch.policies.model.spec import RunSpec
from grpo_orch.policies.model.vocabulary import Market, Role
from tests.stand_ins.world import spec


def at(cloud: str, region: str) -> Pool:
    return Pool(cloud, region, "", "m", "H100:8", Market.SPOT)


def on(trainer: dict[str, Any], rollout: dict[str, Any] | None = None) -> RunSpec:
    run = replace(spec(2), cloud="sky")
    rollout = trainer if rollout is None else rollout
    sections = replace(run.trainer, resources=trainer), replace(run.rollout, resources=rollout)
    return replace(run, trainer=sections[0], rollout=sections[1])


@pytest.mark.parametrize(
    ("cloud", "tier", "gb", "usd_a_month"),
    [
        ("aws", None, 256, 26.70),  # 20.48, 500 operations 2.50, 93 MB/s 3.72
        ("aws", "medium", 3490, 285.42),  # a trainer of 70 billion parameters
        ("aws", "best", 256, 1332.00),  # io2 with 20,000 operations
        ("gcp", "low", 200, 8.00),
        ("gcp", "high", 200, 34.00),
        ("azure", None, 256, 39.68),
        ("azure", None, 300, 79.36),  # billed as 512
        ("azure", "high", 300, 495.57),
    ],
)
def test_disks_of_real_sizes(cloud: str, tier: str | None, gb: int, usd_a_month: float) -> None:
    price = disk_usd_per_h(cloud, tier, gb)
    assert price is not None
    assert price * MONTH_H == pytest.approx(usd_a_month)


def test_unlisted_disk_is_unknown_and_own_disk_is_free() -> None:
    assert disk_usd_per_h("runpod", None, 256) is None
    assert disk_usd_per_h("azure", "ultra", 256) is None  # SkyPilot has none there
    assert disk_usd_per_h("kubernetes", None, 256) == 0.0


def test_a_machine_that_has_come_has_the_disk_of_its_place() -> None:
    best = {"infra": "aws/us-west-2", "disk_tier": "best"}
    run = on({"any_of": [{"infra": "aws/us-east-1"}, best, {"infra": "gcp"}, {"infra": "lambda"}]})
    usual, dearest = disk_usd_per_h("aws", None, 256), disk_usd_per_h("aws", "best", 256)
    assert disks.usd_per_h(run, Role.ROLLOUT, None) == dearest
    assert disks.usd_per_h_in(run, Role.ROLLOUT, at("aws", "us-east-1")) == usual
    assert disks.usd_per_h_in(run, Role.ROLLOUT, at("aws", "us-west-2")) == dearest
    assert disks.usd_per_h_in(run, Role.ROLLOUT, at("gcp", "us-east4")) == disk_usd_per_h("gcp", None, 256)
    for nothing_is_known in (at("lambda", "us-east-1"), at("aws", "eu-west-1"), at("azure", "eastus")):
        assert disks.usd_per_h_in(run, Role.ROLLOUT, nothing_is_known) is None
    assert disks.usd_per_h(run, Role.ROLLOUT, at("aws", "eu-west-1")) == dearest  # never nothing


def test_dearest_possible_disk_counts_or_the_one_of_its_pool() -> None:
    run = on({"disk_size": "1TB", "any_of": [{"infra": "aws/us-east-1"}, {"infra": "gcp", "disk_tier": "low"}]})
    aws, gcp = disk_usd_per_h("aws", None, 1024), disk_usd_per_h("gcp", "low", 1024)
    assert aws is not None
    assert gcp is not None
    assert disks.usd_per_h(run, Role.TRAINER, None) == aws > gcp
    assert disks.usd_per_h(run, Role.TRAINER, at("gcp", "us-central1")) == gcp
    anywhere = on({"accelerators": "H100:8"})
    assert disks.usd_per_h(anywhere, Role.ROLLOUT, None) == disk_usd_per_h("azure", None, 256)
    assert disks.usd_per_h(anywhere, Role.ROLLOUT, at("aws", "us-east-1")) == disk_usd_per_h("aws", None, 256)
    assert disks.usd_per_h(replace(anywhere, cloud="local"), Role.ROLLOUT, None) == 0.0


def test_disk_without_a_price_is_reported() -> None:
    run = on({"infra": "aws"}, {"any_of": [{"infra": "lambda"}, {"infra": "aws"}]})
    assert disks.unknown(run) == ["lambda"]
    assert "disks at lambda (price unknown)" in not_counted(run)
    assert "disks" not in not_counted(on({"infra": "aws"}))
