"""Dead-man's switch: end a machine's work when neither the daemon nor the gateway of its run is alive.

The daemon and the gateway write to the store every few seconds: the lease and the membership. The gateway runs as
long as the trainer, even without a daemon, so a training run continues however long its daemon is down. Once both
have been silent for long, the remaining machines only cost money. A store that cannot be read does not count as
silence until that has lasted a day.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping

import structlog

from grpo_orch.checkpoint.records import documents
from grpo_orch.checkpoint.store import layout
from grpo_orch.checkpoint.store.errors import StoreError
from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.policies.model.node_contract import DEAD_MAN_ENV

log = structlog.get_logger()

CHECKS = 30  # per limit; the time between two checks counts at most three times its planned length
UNREADABLE_S = 86400.0


class DeadManSwitch:
    """Detects that the run has been silent for `silent_s`.

    Daemon and gateway use their own clocks, so only changes of their records count. Time in which this machine or
    process was suspended does not count as silence. `clock` returns seconds and is monotonic.
    """

    def __init__(self, store: Store, silent_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._limit_s = silent_s
        self._clock = clock
        self._records: dict[str, bytes | None] = {}  # by key, as last read
        self._members: str | None = None  # key of the newest known gateway's membership
        self._silent_s = self._unreadable_s = 0.0
        self._checked_at_s = clock()

    def is_due(self) -> bool:
        """Check once. Returns whether the work must end."""
        now_s = self._clock()
        passed_s, self._checked_at_s = min(now_s - self._checked_at_s, 3 * self._limit_s / CHECKS), now_s
        try:
            has_activity = self._has_activity()
        except StoreError:
            self._unreadable_s += passed_s
            return self._unreadable_s > UNREADABLE_S
        self._silent_s = 0.0 if has_activity else self._silent_s + passed_s
        self._unreadable_s = 0.0
        return self._silent_s > self._limit_s

    def _has_activity(self) -> bool:
        """Return whether either has written since the last check. Raises StoreError.

        Stops at the first change: all machines check repeatedly, and a listing costs as much as a dozen reads.
        """
        if self._has_changed(layout.LEASE) or (self._members is not None and self._has_changed(self._members)):
            return True
        newest = documents.newest_gateway(self._store)
        if newest is None:
            return False
        self._members = layout.members(newest)
        return self._has_changed(self._members)

    def _has_changed(self, key: str) -> bool:
        record, known = self._store.get_or_none(key), self._records.get(key)
        self._records[key] = record
        return record != known


def start(store: Store, environment: Mapping[str, str], end: Callable[[], None]) -> None:
    """Watch the run in the background and call `end` once it is silent; the limit is in `environment`."""
    silent_s = float(environment.get(DEAD_MAN_ENV, "0"))
    if silent_s <= 0:
        return
    switch = DeadManSwitch(store, silent_s)

    def watch() -> None:
        while not switch.is_due():
            time.sleep(silent_s / CHECKS)
        hint = "no sign of the daemon or the gateway, so this machine's work ends"
        log.warning("dead_man_triggered", silent_s=silent_s, hint=hint)
        end()

    threading.Thread(target=watch, name="dead-man", daemon=True).start()
