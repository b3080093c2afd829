"""The cost of a run's machines, by market. List prices, without preemptions."""

from __future__ import annotations

from dataclasses import dataclass

from grpo_orch.policies.model.vocabulary import Market

DAY_H = 24


@dataclass(frozen=True, slots=True)
class Prices:
    """USD an hour of one machine on each market; None if unavailable there, or unknown."""

    on_demand_usd_per_h: float | None = None
    spot_usd_per_h: float | None = None

    def on(self, market: Market) -> float | None:
        return self.spot_usd_per_h if market is Market.SPOT else self.on_demand_usd_per_h


@dataclass(frozen=True, slots=True)
class Cost:
    """Cost in USD; `to_end_usd` is None if the run's length is unknown."""

    usd_per_h: float
    usd_per_day: float
    to_end_usd: float | None


def cost(usd_per_h: float, hours: float | None) -> Cost:
    """Return the cost of machines at this hourly price, for a run of `hours`."""
    return Cost(usd_per_h, DAY_H * usd_per_h, None if hours is None else hours * usd_per_h)


def hourly(
    trainer: Prices, node: Prices, nodes: int, markets: tuple[Market, Market], other_usd_per_h: float = 0.0
) -> float | None:
    """Return the USD an hour of a trainer and `nodes` rollout nodes on these markets, plus `other_usd_per_h`.

    None if a price is unknown.
    """
    trainer_usd, node_usd = trainer.on(markets[0]), node.on(markets[1]) if nodes else 0.0
    return None if trainer_usd is None or node_usd is None else trainer_usd + nodes * node_usd + other_usd_per_h


def repeat_step_usd(train_s: float, usd_per_h: float) -> float:
    """Return the cost of repeating a lost step: all machines for as long as it trains.

    Nothing is generated, because its completions are in the store.
    """
    return train_s * usd_per_h / 3600
