"""What the controller knows of prices: on both markets, for a node may be bought on either."""

from __future__ import annotations

from grpo_orch.orchestrator.clouds.protocol import CloudUnavailable, Offer
from grpo_orch.orchestrator.control.current_prices import MAX_FAILURES, Prices
from grpo_orch.policies.model.pools import PoolOffer
from grpo_orch.policies.model.vocabulary import Market, Role

TRAINER = Offer(Role.TRAINER, Market.ON_DEMAND, "a machine", 4.0, max_usd_per_h=5.0)  # never on spot
ROLLOUT = Offer(
    Role.ROLLOUT, Market.SPOT, "a machine", 1.0, 4.0, max_usd_per_h=2.0, other_market_max_usd_per_h=6.0
)


class Telling:
    """What is asked of a cloud here."""

    def __init__(self, *offers: Offer) -> None:
        self.priced = list(offers)

    def offers(self) -> list[Offer]:
        if not self.priced:
            raise CloudUnavailable("try again")
        return self.priced

    def pools(self) -> list[PoolOffer]:
        return []


def heard(*offers: Offer) -> object:
    prices = Prices(Telling(*offers))  # type: ignore[arg-type]  # the rest of a cloud is not asked
    prices.fetch()
    return prices.observe()


def test_the_dearest_of_both_markets_is_known() -> None:
    found = heard(TRAINER, ROLLOUT)
    assert found == {"trainer on demand": 5.0, "rollout on spot": 2.0, "rollout on demand": 6.0}


def test_a_cloud_that_does_not_answer_makes_nothing_known() -> None:
    assert heard() is None


class Odd(Telling):
    """Its answer breaks what reads it, `times` times."""

    def __init__(self, times: int) -> None:
        super().__init__(TRAINER)
        self.times = times

    def pools(self) -> list[PoolOffer]:
        self.times -= 1
        if self.times >= 0:
            raise KeyError("zone")
        return []


def test_unexpected_error_is_logged_retried_and_stops_blocking() -> None:
    prices = Prices(Odd(MAX_FAILURES))  # type: ignore[arg-type]  # the rest of a cloud is not asked
    for _ in range(MAX_FAILURES - 1):
        prices.fetch()
    assert (prices.pools(), prices.trouble()) == (None, "")
    prices.fetch()
    assert (prices.pools(), prices.trouble()) == ((), "KeyError: 'zone'")
    assert prices.observe() == {"trainer on demand": 5.0}  # which it did answer
    prices.fetch()
    assert (prices.pools(), prices.trouble()) == ((), "")


def test_known_prices_stay_while_the_cloud_is_away() -> None:
    cloud = Telling(TRAINER)
    prices = Prices(cloud)  # type: ignore[arg-type]  # the rest of a cloud is not asked
    prices.fetch()
    cloud.priced.clear()
    for _ in range(MAX_FAILURES):
        prices.fetch()
    assert (prices.observe(), prices.trouble()) == ({"trainer on demand": 5.0}, "")
