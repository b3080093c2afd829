"""What machines cost."""

from __future__ import annotations

import pytest

from grpo_orch.policies.model.vocabulary import Market
from grpo_orch.policies.sizing.money import Prices, cost, hourly, repeat_step_usd


def test_a_day_of_the_pair_and_a_step() -> None:
    """A trainer for 3.96 an hour with a spot node for 2.38: 152.16 USD a day; two more on demand, 285.12."""
    trainer, node = Prices(3.96, 2.38), Prices(3.96, 2.38)
    mixed = hourly(trainer, node, 1, (Market.ON_DEMAND, Market.SPOT))
    assert mixed is not None
    assert cost(mixed, 10).usd_per_day == pytest.approx(152.16)
    assert cost(mixed, 10).to_end_usd == pytest.approx(63.4)
    assert cost(mixed, None).to_end_usd is None
    dear = hourly(trainer, node, 2, (Market.ON_DEMAND, Market.ON_DEMAND))
    assert dear is not None
    assert cost(dear, None).usd_per_day == pytest.approx(285.12)
    assert repeat_step_usd(36, 100) == pytest.approx(1)


def test_unknown_price_is_no_price() -> None:
    alone = Prices(on_demand_usd_per_h=1.0)
    assert hourly(alone, alone, 1, (Market.ON_DEMAND, Market.SPOT)) is None
    assert hourly(alone, Prices(), 0, (Market.ON_DEMAND, Market.SPOT)) == 1.0
