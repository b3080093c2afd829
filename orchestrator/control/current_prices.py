"""Pools and prices of machines, requested from the cloud in a background thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping

import structlog

from grpo_orch.orchestrator.clouds.protocol import Cloud, CloudRefused, CloudUnavailable, Offer
from grpo_orch.orchestrator.control.run_clock import awake_or_asleep_s
from grpo_orch.policies.model.pools import PoolOffer
from grpo_orch.policies.model.vocabulary import kind_of

log = structlog.get_logger()

REFRESH_S = 3600.0  # spot prices change within hours
RETRY_S = 30.0
MAX_FAILURES = 5  # in a row; after that machines are bought wherever the cloud finds them


class Prices:
    """Prices by `kind_of`, and pools, once they are known. The first `observe` or `pools` starts the requests."""

    def __init__(self, cloud: Cloud) -> None:
        self._cloud = cloud
        self._known: Mapping[str, float] | None = None
        self._pools: tuple[PoolOffer, ...] | None = None
        self._failures = 0  # in a row
        self._error = ""
        self._requested_at_s = -REFRESH_S
        self._request: threading.Thread | None = None

    def observe(self) -> Mapping[str, float] | None:
        """Return the latest prices; None before the first answer. Does not wait."""
        self._refresh()
        return self._known

    def pools(self) -> tuple[PoolOffer, ...] | None:
        """Return the latest pools; None before the first answer. Does not wait.

        Empty if the cloud offers no suitable pool, which a launch reports, or after MAX_FAILURES.
        """
        self._refresh()
        if self._pools is None and self._failures >= MAX_FAILURES:
            return ()
        return self._pools

    def trouble(self) -> str:
        """Return the last error after MAX_FAILURES without any answer, else an empty string. Retries continue."""
        is_unknown = self._known is None or self._pools is None
        return self._error if is_unknown and self._failures >= MAX_FAILURES else ""

    def _refresh(self) -> None:
        every_s = RETRY_S if self._known is None or self._failures else REFRESH_S
        is_idle = self._request is None or not self._request.is_alive()
        if is_idle and awake_or_asleep_s() - self._requested_at_s >= every_s:
            self._request = threading.Thread(target=self.fetch, name="prices", daemon=True)
            self._request.start()

    def fetch(self) -> None:
        """Request prices and pools now. Logs and counts a failure."""
        self._requested_at_s = awake_or_asleep_s()
        began_s = time.monotonic()
        try:
            self._known = dict(price for offer in self._cloud.offers() for price in _prices_of(offer))
            self._pools = tuple(self._cloud.pools())
        except Exception as error:  # in a thread: unlogged it would be lost, and no machine would be bought
            if isinstance(error, CloudRefused):
                self._pools = self._pools or ()
            self._failures += 1
            is_expected = isinstance(error, CloudRefused | CloudUnavailable | OSError)
            self._error = str(error) if is_expected else f"{type(error).__name__}: {error}"
            seconds = round(time.monotonic() - began_s, 1)
            log.warning("prices_unavailable", error=self._error, seconds=seconds, exc_info=not is_expected)
            return
        self._failures, self._error = 0, ""


def _prices_of(offer: Offer) -> Iterator[tuple[str, float]]:
    """Yield the highest price of each kind in an offer, on both markets."""
    yield kind_of(offer.role, offer.market), offer.max_usd_per_h
    if offer.other_market_max_usd_per_h is not None:
        yield kind_of(offer.role, offer.market.other), offer.other_market_max_usd_per_h
