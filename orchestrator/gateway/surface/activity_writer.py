"""Keeps in the run's store what the gateway's members did each minute, for those who look at the run later.

Nothing depends on it: what goes wrong here costs minutes of that record, and neither ends nor holds the gateway.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence

import structlog

from checkpoint.records.activity import HOUR_S, MINUTE_S, counted, write_part
from checkpoint.store.errors import StoreError
from checkpoint.store.run_store import Store
from policies.serving.activity import activities
from policies.serving.gateway_status import MemberStatus

log = structlog.get_logger()

LOOK_S = 1.0
LONGEST_S = 5.0  # after a gap that is longer, as of a process that was stopped, nothing is known of it
HOURS_EVERY_S = 600  # the open hour is written so often


class ActivityWriter:
    """Looks every second and writes every minute. What cannot be written is tried again with the next minute.

    Args:
        store: the run's store, without retries; a thread of the writer's own uses it, and nobody else.
        boot_id: names this gateway process.
        look: returns the members as they are now; called on the event loop.
        clock: seconds, never going back.
        wall: seconds since the epoch.
    """

    def __init__(
        self,
        store: Store,
        boot_id: str,
        look: Callable[[], Sequence[MemberStatus]],
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._store, self._boot_id = store, boot_id
        self._look, self._clock, self._wall = look, clock, wall
        self._minutes, self._hours = counted(MINUTE_S), counted(HOUR_S)
        self._looked_s = clock()
        self._lock = threading.Lock()
        self._due: dict[tuple[int, int], dict[str, bytes]] = {}  # by slot's length and group: not written yet
        self._fresh = threading.Event()  # more is due since the last write
        self._failing = False

    async def run(self) -> None:
        """Look, for ever. The thread that writes is a daemon: no write that hangs holds the gateway's end."""
        threading.Thread(target=self._keep_writing, name="activity", daemon=True).start()
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                self.see()
            except Exception as error:  # noqa: BLE001  # of a record to look at
                self._say("activity_not_seen", error)

    def see(self) -> None:
        """Count the time since the last look, and note what is to be written."""
        now_s, wall_s = self._clock(), self._wall()
        for_s, self._looked_s = now_s - self._looked_s, now_s
        found = activities(self._look()) if for_s <= LONGEST_S else {}
        minute = self._minutes.see(found, wall_s, for_s)
        hour = self._hours.see(found, wall_s, for_s)
        if minute is not None:
            self._is_due(MINUTE_S, minute, self._minutes.packed(minute))
            if hour is None and wall_s % HOURS_EVERY_S < MINUTE_S:
                hour = self._hours.group
        if hour is not None:
            self._is_due(HOUR_S, hour, self._hours.packed(hour, open_too=True))

    def write(self) -> None:
        """Write what is due. What the store does not take is due again, unless there is newer by then."""
        with self._lock:
            due, self._due = self._due, {}
        for (slot_s, group), machines in due.items():
            try:
                write_part(self._store, slot_s, group, self._boot_id, machines)
            except StoreError as error:
                self._say("activity_not_written", error)
                with self._lock:
                    self._due.setdefault((slot_s, group), machines)
            except Exception as error:  # noqa: BLE001  # it would fail again
                self._say("activity_not_written", error)
            else:
                self._failing = False

    def _keep_writing(self) -> None:
        while True:
            self._fresh.wait()
            self._fresh.clear()
            self.write()

    def _is_due(self, slot_s: int, group: int, machines: dict[str, bytes]) -> None:
        with self._lock:
            self._due[slot_s, group] = machines
        self._fresh.set()

    def _say(self, what: str, error: Exception) -> None:
        """The first in a row, up to the next write."""
        if not self._failing:
            log.warning(what, error=f"{type(error).__name__}: {error}")
        self._failing = True
