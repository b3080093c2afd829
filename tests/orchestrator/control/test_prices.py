"""What the controller knows of prices: on both markets, for a node may be bought on either."""

from __future__ import annotations

from grpo_orch.orchestrator.clouds.protocol import CloudUnavailable, Offer
from grpo_orch.orchestrator.control.prices import MAX_FAILURES, Prices
from grpo_orch.policies.model.pools import PoolOffer
from grpo_orch.policies.model.vocabulary import Market, Role

TRAINER = Offer(Role.TRAINER, Market.ON_DEMAND, "a machine", 4.0, most_usd_per_h=5.0)  # never on spot
ROLLOUT = Offer(
    Role.ROLLOUT, Market.SPOT, "a machine", 1.0, 4.0, most_usd_per_h=2.0, other_market_most_usd_per_h=6.0
)


class Telling:
    """What is asked of a cloud here."""

    def __init__(self, *offers: Offer) -> None:
        self._offers = list(offers)

    def offers(self) -> list[Offer]:
        if not self._offers:
            raise CloudUnavailable("try again")
        return self._offers

    def pools(self) -> list[PoolOffer]:
        return []


def heard(*offers: Offer) -> object:
    prices = Prices(Telling(*offers))  # type: ignore[arg-type]  # the rest of a cloud is not asked
    prices._fetch()
    return prices._known


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


def test_an_error_that_nobody_foresaw_is_told_tried_again_and_does_not_keep_from_buying_for_ever() -> None:
    prices = Prices(Odd(MAX_FAILURES))  # type: ignore[arg-type]  # the rest of a cloud is not asked
    prices._requested_at_s = 1e18  # not asked by the looks below
    for _ in range(MAX_FAILURES - 1):
        prices._fetch()
    assert (prices.pools(), prices.trouble()) == (None, "")
    prices._fetch()
    assert (prices.pools(), prices.trouble()) == ((), "KeyError: 'zone'")
    assert prices.look() == {"trainer on demand": 5.0}  # which it did answer
    prices._fetch()
    assert (prices.pools(), prices.trouble()) == ((), "")


def test_what_was_heard_once_stays_known_while_a_cloud_does_not_answer() -> None:
    cloud = Telling(TRAINER)
    prices = Prices(cloud)  # type: ignore[arg-type]  # the rest of a cloud is not asked
    prices._requested_at_s = 1e18
    prices._fetch()
    cloud._offers.clear()
    for _ in range(MAX_FAILURES):
        prices._fetch()
    assert (prices.look(), prices.trouble()) == ({"trainer on demand": 5.0}, "")
