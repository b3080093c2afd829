"""The most that a machine of each kind may cost, asked of the cloud beside the controller's loop."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping

import structlog

from orchestrator.clouds.protocol import Cloud, CloudRefused, CloudUnavailable
from orchestrator.control.run_clock import awake_or_asleep_s
from policies.model.vocabulary import kind_of

log = structlog.get_logger()

ASKED_EVERY_S = 3600.0  # spot prices move within hours
TRIED_EVERY_S = 30.0


class Prices:
    """By `kind_of`, once they are known. Nothing is asked before the first `look`."""

    def __init__(self, cloud: Cloud) -> None:
        self._cloud = cloud
        self._known: Mapping[str, float] | None = None
        self._asked_at_s = -ASKED_EVERY_S
        self._asking: threading.Thread | None = None

    def look(self) -> Mapping[str, float] | None:
        """Return what was last heard; None before the first answer. Does not wait."""
        every_s = TRIED_EVERY_S if self._known is None else ASKED_EVERY_S
        idle = self._asking is None or not self._asking.is_alive()
        if idle and awake_or_asleep_s() - self._asked_at_s >= every_s:
            self._asked_at_s = awake_or_asleep_s()
            self._asking = threading.Thread(target=self._ask, name="prices", daemon=True)
            self._asking.start()
        return self._known

    def _ask(self) -> None:
        began_s = time.monotonic()
        try:
            offers = self._cloud.offers()
        except (CloudRefused, CloudUnavailable, OSError) as error:
            log.warning("prices_not_known", error=str(error), seconds=round(time.monotonic() - began_s, 1))
            return
        self._known = {kind_of(one.role, one.market): one.most_usd_per_h for one in offers}
