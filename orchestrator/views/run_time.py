"""What time it is for a run: by the clock of the controller that journals, not by the one of whoever looks.

What a machine has cost counts from when its request was journalled, and the viewer's own clock may be hours off.
The holder of the lease writes its own time with each renewal.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from checkpoint.records.documents import Lease
from orchestrator.control.lease import TTL_S
from orchestrator.control.run_clock import awake_or_asleep_s


class RunTime:
    """Reckons it from looks at the lease. `wall` is this machine's clock, which has to do until a renewal was
    seen; `clock` is one that is never set."""

    def __init__(
        self, wall: Callable[[], float] = time.time, clock: Callable[[], float] = awake_or_asleep_s
    ) -> None:
        self._wall, self._clock = wall, clock
        self._lease: Lease | None = None
        self._looked_at_s: float | None = None
        self._ahead_s: float | None = None  # of `clock`; as of the renewal that was seen soonest
        self._epoch = 0  # of whose clock that is

    def now_s(self, lease: Lease | None, told_s: float) -> float:
        """Return the seconds since the epoch, for the run.

        Args:
            lease: as just read.
            told_s: when the last event was journalled: it is later than that.
        """
        at_s = self._clock()
        if lease is not None and self._is_fresh(lease, at_s):
            self._see(lease, at_s)
        self._lease, self._looked_at_s = lease, at_s
        reckoned_s = self._wall() if self._ahead_s is None else at_s + self._ahead_s
        return max(reckoned_s, told_s, 0.0 if lease is None else lease.run_time_s)

    def _is_fresh(self, lease: Lease, at_s: float) -> bool:
        """Whether it was written since a look shortly before."""
        looked_at_s = self._looked_at_s
        return lease != self._lease and looked_at_s is not None and at_s - looked_at_s <= TTL_S

    def _see(self, lease: Lease, at_s: float) -> None:
        ahead_s = (lease.run_time_s or lease.renewed_at_s) - at_s
        known_s = self._ahead_s if lease.epoch == self._epoch else None
        self._ahead_s, self._epoch = max(ahead_s, ahead_s if known_s is None else known_s), lease.epoch
