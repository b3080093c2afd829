"""When rollout machines on demand stand in for spot machines that cannot be had, and how many.

With k nodes on spot at q an hour, j on demand at p and P for everything else, a step costs
(P + k q + j p)(a + b/(k + j)). With n = k + j that is (P - k (p - q) + n p)(a + b/n): the sum of
`policies.fleet.how_many`, with less beside the nodes. So the more there is on spot, the fewer stand in.
"""

from __future__ import annotations

from policies.fleet.how_many import HourlyPrices, StepShape, best_count

WAIT_MIN_S = 60.0  # zones that refuse for a moment are no outage


def stand_ins(
    shape: StepShape | None,
    beside_usd_per_h: float,
    on_demand_usd_per_h: float,
    spot: int,
    spot_usd_per_h: float,
    low: int,
    high: int,
) -> int:
    """Return how many nodes on demand make a step cheapest beside `spot` ones, `low` to `high` nodes in all.

    Without a measured step, what the trainer needs to go on: `low` or one node in all.
    """
    least = max(low, spot, 1)
    if shape is None or spot >= high:
        return max(0, min(least, high) - spot)
    beside = beside_usd_per_h - spot * (on_demand_usd_per_h - spot_usd_per_h)
    if beside <= 0:
        return least - spot
    return best_count(shape, HourlyPrices(beside, on_demand_usd_per_h), least, high) - spot


def wait_s(nodes: int, on_demand_usd_per_h: float, beside_usd_per_h: float, boot_s: float) -> float:
    """Seconds of an idle trainer that cost what starting so many nodes on demand does.

    Waiting so long before they are bought costs at most twice the best choice, however long spot stays away.
    Raises ValueError where a price is not known.
    """
    if beside_usd_per_h <= 0 or on_demand_usd_per_h <= 0:
        raise ValueError("the wait needs both prices")
    return max(WAIT_MIN_S, nodes * on_demand_usd_per_h * boot_s / beside_usd_per_h)
