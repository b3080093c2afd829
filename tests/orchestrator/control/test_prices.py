"""What the controller knows of prices: on both markets, for a node may be bought on either."""

from __future__ import annotations

from orchestrator.clouds.protocol import CloudUnavailable, Offer
from orchestrator.control.prices import Prices
from policies.model.pools import PoolOffer
from policies.model.vocabulary import Market, Role

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
    prices._ask()
    return prices._known


def test_the_dearest_of_both_markets_is_known() -> None:
    found = heard(TRAINER, ROLLOUT)
    assert found == {"trainer on demand": 5.0, "rollout on spot": 2.0, "rollout on demand": 6.0}


def test_a_cloud_that_does_not_answer_makes_nothing_known() -> None:
    assert heard() is None
