"""Where machines may be bought and what they may cost, asked of the cloud beside the controller's loop."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping

import structlog

from orchestrator.clouds.protocol import Cloud, CloudRefused, CloudUnavailable, Offer
from orchestrator.control.run_clock import awake_or_asleep_s
from policies.model.pools import PoolOffer
from policies.model.vocabulary import kind_of

log = structlog.get_logger()

ASKED_EVERY_S = 3600.0  # spot prices move within hours
TRIED_EVERY_S = 30.0
TRIES = 5  # in a row that failed: from then on machines are bought wherever the cloud finds them


class Prices:
    """Prices by `kind_of`, and pools, once they are known. Nothing is asked before the first look at either."""

    def __init__(self, cloud: Cloud) -> None:
        self._cloud = cloud
        self._known: Mapping[str, float] | None = None
        self._pools: tuple[PoolOffer, ...] | None = None
        self._failures = 0  # in a row
        self._why = ""
        self._asked_at_s = -ASKED_EVERY_S
        self._asking: threading.Thread | None = None

    def look(self) -> Mapping[str, float] | None:
        """Return what was last heard; None before the first answer. Does not wait."""
        self._keep_up()
        return self._known

    def pools(self) -> tuple[PoolOffer, ...] | None:
        """As `look`: where machines may be bought; empty where the cloud has nothing that fits, as a launch will
        say, and where it has failed to answer again and again."""
        self._keep_up()
        if self._pools is None and self._failures >= TRIES:
            return ()
        return self._pools

    def trouble(self) -> str:
        """Why nothing was heard, again and again; empty: it was, or it is too early to say. It is still asked."""
        lacking = self._known is None or self._pools is None
        return self._why if lacking and self._failures >= TRIES else ""

    def _keep_up(self) -> None:
        every_s = TRIED_EVERY_S if self._known is None or self._failures else ASKED_EVERY_S
        idle = self._asking is None or not self._asking.is_alive()
        if idle and awake_or_asleep_s() - self._asked_at_s >= every_s:
            self._asked_at_s = awake_or_asleep_s()
            self._asking = threading.Thread(target=self._ask, name="prices", daemon=True)
            self._asking.start()

    def _ask(self) -> None:
        began_s = time.monotonic()
        try:
            self._known = dict(kind for one in self._cloud.offers() for kind in _kinds(one))
            self._pools = tuple(self._cloud.pools())
        except Exception as error:  # no other place hears of it, and nothing would ever be bought
            if isinstance(error, CloudRefused):
                self._pools = self._pools or ()
            self._failures += 1
            foreseen = isinstance(error, CloudRefused | CloudUnavailable | OSError)
            self._why = str(error) if foreseen else f"{type(error).__name__}: {error}"
            seconds = round(time.monotonic() - began_s, 1)
            log.warning("prices_not_known", error=self._why, seconds=seconds, exc_info=not foreseen)
            return
        self._failures, self._why = 0, ""


def _kinds(offer: Offer) -> Iterator[tuple[str, float]]:
    """The dearest price of each kind that an offer tells of, on both markets."""
    yield kind_of(offer.role, offer.market), offer.most_usd_per_h
    if offer.other_market_most_usd_per_h is not None:
        yield kind_of(offer.role, offer.market.other), offer.other_market_most_usd_per_h
