"""When a run whose trainer waits for rollout nodes returns the trainer's machine, too.

Nobody knows how long there will be none. Once the waiting trainer has cost what its restart costs, it goes: that
is at most twice the best choice, whatever comes. Its restart is its boot, in which the first rollout node waits.
"""

from __future__ import annotations

import math

from policies.fleet.how_many import HourlyPrices, StepShape, best_count, usd_a_step

IDLE_MIN_S = 300.0  # a machine is often found again within minutes, and returning one takes about as long


def idle_limit_s(trainer_boot_s: float, trainer_usd_per_h: float, node_usd_per_h: float) -> float:
    """Seconds of a waiting trainer that cost what its restart does: boot x (1 + p/P).

    Where a price is not known, 0 or less, a node counts as much as the trainer: so it is waited for longer.
    """
    known = trainer_usd_per_h > 0 and node_usd_per_h > 0
    share = node_usd_per_h / trainer_usd_per_h if known else 1.0
    return max(IDLE_MIN_S, trainer_boot_s * (1 + share))


def own_step_limit_s(shape: StepShape, on_demand: HourlyPrices, low: int, high: int) -> float:
    """Seconds that a step may take whose completions the trainer makes itself, so that it costs no more than one
    with the best of `low` to `high` nodes on demand. Infinite where the trainer costs nothing that is known.

    Args:
        shape: of a step with nodes.
        on_demand: what such a node costs, and all beside the nodes.
        low: 1 or more.
        high: `low` or more.
    """
    if on_demand.beside_usd_per_h <= 0:
        return math.inf
    usd = usd_a_step(shape, on_demand, best_count(shape, on_demand, low, high))
    return usd * 3600 / on_demand.beside_usd_per_h
