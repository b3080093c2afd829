"""The recipes' plans, from config.json made by hand and a list of prices that is made up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from grpo_orch.orchestrator.cli.prepare import RECIPES
from grpo_orch.orchestrator.clouds.sky.records import ListPrice, PriceList
from grpo_orch.orchestrator.config.load import load
from grpo_orch.orchestrator.config.model_size import SizeUnknown
from grpo_orch.orchestrator.plan.gather import make_plan
from grpo_orch.orchestrator.plan.machines import KnownModel, find_model
from grpo_orch.orchestrator.plan.model import Plan
from grpo_orch.orchestrator.plan.prices import by_catalog, by_rehearsal
from grpo_orch.policies.costs.store_costs import Location
from grpo_orch.policies.model.spec import RunSpec
from grpo_orch.policies.sizing.shapes import shape_of
from grpo_orch.policies.weights.disk_sizes import ModelSize
from tests.generators.model_configs import CONFIGS


def price(
    gpu: str,
    gpus: int,
    on_demand: float | None,
    spot: float | None,
    place: str = "aws/us-east-1",
    machine: str = "",
) -> ListPrice:
    cloud, region = place.split("/")
    return ListPrice(cloud, region, machine or f"{gpu}-{gpus}".lower(), gpu, gpus, None, on_demand, spot)


PRICES = PriceList(
    (
        price("H200", 1, 3.96, 2.38),
        price("H200", 1, 4.40, 2.10, "gcp/us-central1"),
        price("H200", 8, 31.0, 14.0, machine="p5en.48xlarge"),
        price("L4", 1, 0.80, 0.30),
        price("L4", 1, 0.70, None, "gcp/us-central1"),
        price("B200", 1, 6.0, None),
    ),
    {"aws": "2026-11-23", "gcp": "2026-11-20"},
    {"azure": "ConnectionError"},
)


def spec_of(recipe: str) -> RunSpec:
    return load(RECIPES / recipe / "run.yaml", lambda: 2).spec


def size_of(spec: RunSpec, config: Mapping[str, Any] | None = None) -> ModelSize:
    """What the hub would say of the model."""
    if spec.trainer.model not in CONFIGS:
        raise SizeUnknown("it is nobody's")
    config = config or CONFIGS[spec.trainer.model]
    params = shape_of(config).params
    return ModelSize(params, 2 * params, config)


def known(spec: RunSpec, **changes: Any) -> KnownModel:
    """The model, with changes to its config.json."""
    return find_model(spec, lambda one: size_of(one, {**CONFIGS[one.trainer.model], **changes}))


def plan_of(spec: RunSpec, prices: PriceList = PRICES) -> Plan:
    def listed(_: Sequence[str]) -> PriceList:
        return prices

    book = by_catalog(spec, listed) if spec.cloud == "sky" else by_rehearsal(spec)
    return make_plan(spec, size_of, book, store=Location("aws"))
