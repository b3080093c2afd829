"""The dead-man's switch: a machine's work ends by itself once nobody steers the run and nobody works in it.

Word of the run is what its daemon and its gateway write into the store every few seconds: the lease and the
membership. The gateway works on without a daemon, for as long as the trainer does; so a run that is under way is
left alone, however long its daemon is dead. When neither has written anything for long, the machines that are left
cost money for nobody. Not to be able to read the store is not taken for silence, unless it lasts a day.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping

import structlog

from checkpoint.records import documents
from checkpoint.store import layout
from checkpoint.store.errors import StoreError
from checkpoint.store.run_store import Store
from policies.model.node_contract import DEAD_MAN_ENV

log = structlog.get_logger()

LOOKS = 30  # in the time that the silence may last; what passes between two counts three times that at most
UNREADABLE_S = 86400.0


class DeadManSwitch:
    """Whether the run has been silent for `silent_s`.

    Both parties date what they write by clocks of their own, so that only a change of it counts. Time in which
    this machine or process stood still is not silence of others. `clock`: seconds on a clock that never goes back.
    """

    def __init__(self, store: Store, silent_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._limit_s = silent_s
        self._clock = clock
        self._words: dict[str, bytes | None] = {}  # by object, as last read
        self._members: str | None = None  # of the newest gateway that is known
        self._silent_s = self._unread_s = 0.0
        self._looked_at_s = clock()

    def is_due(self) -> bool:
        """Look once. Returns whether it is time to end."""
        now_s = self._clock()
        passed_s, self._looked_at_s = min(now_s - self._looked_at_s, 3 * self._limit_s / LOOKS), now_s
        try:
            heard = self._is_word()
        except StoreError:
            self._unread_s += passed_s
            return self._unread_s > UNREADABLE_S
        self._silent_s = 0.0 if heard else self._silent_s + passed_s
        self._unread_s = 0.0
        return self._silent_s > self._limit_s

    def _is_word(self) -> bool:
        """Whether either has written. What shows it is asked first and the rest not at all: all machines ask,
        again and again, and a listing costs as much as a dozen reads. Raises StoreError."""
        if self._has_changed(layout.LEASE) or (self._members is not None and self._has_changed(self._members)):
            return True
        newest = documents.newest_gateway(self._store)
        if newest is None:
            return False
        self._members = layout.members(newest)
        return self._has_changed(self._members)

    def _has_changed(self, key: str) -> bool:
        word, known = self._store.get_or_none(key), self._words.get(key)
        self._words[key] = word
        return word != known


def start(store: Store, environment: Mapping[str, str], end: Callable[[], None]) -> None:
    """Watch beside the caller for as long as `environment` says, and call `end` once when it is time."""
    silent_s = float(environment.get(DEAD_MAN_ENV, "0"))
    if silent_s <= 0:
        return
    switch = DeadManSwitch(store, silent_s)

    def watch() -> None:
        between = threading.Event()
        while not switch.is_due():
            between.wait(silent_s / LOOKS)
        hint = "neither daemon nor gateway was heard, so the work of this machine ends"
        log.warning("run_is_silent", for_s=silent_s, hint=hint)
        end()

    threading.Thread(target=watch, name="dead-man", daemon=True).start()
