"""SkyPilot's objects in our types."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

from grpo_orch.orchestrator.clouds.sky.offers import list_price_of
from grpo_orch.orchestrator.clouds.sky.records import ClusterState, cluster_of, offer_of


@pytest.mark.parametrize(
    ("cost", "known"), [(2.5, 2.5), (0, 0.0), *((cost, None) for cost in (math.nan, math.inf, -1.0, None))]
)
def test_price_that_is_no_number_is_not_known(cost: float | None, known: float | None) -> None:
    """JSON has no NaN: a journal entry with such a price could not be read back, and the run not be resumed."""
    machine = SimpleNamespace(
        infra=SimpleNamespace(to_str=lambda: "aws/r1"),
        instance_type="g5.xlarge",
        accelerators=None,
        use_spot=True,
        get_cost=lambda _: cost,
    )
    offer = offer_of(machine)
    assert (None if offer is None else offer.price_usd_per_h) == known


@pytest.mark.parametrize("price", [None, math.nan, math.inf])
def test_list_price_that_is_no_number_is_not_known(price: float | None) -> None:
    row = SimpleNamespace(
        cloud="AWS",
        region="r1",
        instance_type="g5.xlarge",
        accelerator_name="A10G",
        accelerator_count=1,
        device_memory=price,
        price=price,
        spot_price=price,
    )
    found = list_price_of(row)
    assert (found.gpu_memory_mib, found.on_demand_usd_per_h, found.spot_usd_per_h) == (None, None, None)


def test_record_with_odd_handle_is_a_cluster_without_price() -> None:
    """The look at all clusters reads it again and again: an error there would hide every machine of the run."""
    handle = SimpleNamespace(launched_resources=SimpleNamespace(accelerators={"L4": "x"}))
    found = cluster_of(SimpleNamespace(name="c-0", status=SimpleNamespace(value="UP"), handle=handle))
    assert (found.name, found.state, found.price_usd_per_h) == ("c-0", ClusterState.UP, None)
