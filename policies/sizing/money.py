"""What a run's machines cost, by the market on which they are bought. List prices, and nobody preempted."""

from __future__ import annotations

from dataclasses import dataclass

from policies.model.vocabulary import Market

DAY_H = 24


@dataclass(frozen=True, slots=True)
class Prices:
    """USD an hour of one machine on each market; None where it cannot be had there, or nobody knows."""

    on_demand_usd_per_h: float | None = None
    spot_usd_per_h: float | None = None

    def on(self, market: Market) -> float | None:
        return self.spot_usd_per_h if market is Market.SPOT else self.on_demand_usd_per_h


@dataclass(frozen=True, slots=True)
class Cost:
    """USD; `to_end_usd` is None where the run's length is not known."""

    usd_per_h: float
    usd_per_day: float
    to_end_usd: float | None


def cost(usd_per_h: float, hours: float | None) -> Cost:
    """What machines of so many dollars an hour cost, for a run of so many hours."""
    return Cost(usd_per_h, DAY_H * usd_per_h, None if hours is None else hours * usd_per_h)


def hourly(
    trainer: Prices, node: Prices, nodes: int, markets: tuple[Market, Market], beside_usd_per_h: float = 0.0
) -> float | None:
    """USD an hour of a trainer and `nodes` rollout nodes on these markets, and of what is paid for beside them;
    None where a price is not known."""
    of_trainer, of_node = trainer.on(markets[0]), node.on(markets[1]) if nodes else 0.0
    return None if of_trainer is None or of_node is None else of_trainer + nodes * of_node + beside_usd_per_h


def again_usd(train_s: float, usd_per_h: float) -> float:
    """What it costs to make a lost step again: its completions are in the store, so all machines stand for as long
    as it trains, and nothing is generated."""
    return train_s * usd_per_h / 3600
