"""Spaces out writes to one object, where the store requires it.

Google Cloud Storage takes one write a second to a name and refuses more with 429
(https://cloud.google.com/storage/quotas, "Maximum rate of writes to the same object name"). A heartbeat, a status
or a row of metrics may come sooner: its writer waits here, and what comes meanwhile goes into the next write. S3
and Azure take thousands of writes a second to one name.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

INTERVALS_S = {"gs": 1.0, "gcs": 1.0}  # by scheme


def interval_of(url: str) -> float:
    """How far apart writes to one object must be, in seconds."""
    return INTERVALS_S.get(url.partition("://")[0], 0.0)


class Pace:
    """Remembers when each name was last written. Thread-safe.

    Args:
        interval_s: between two writes to one name; 0: no waiting.
    """

    def __init__(
        self,
        interval_s: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._interval_s = interval_s
        self._clock = clock
        self._sleep = sleep
        self._last_s: dict[str, float] = {}
        self._lock = threading.Lock()

    def wait(self, key: str) -> None:
        """Return when the object may be written; the next caller for it waits its turn."""
        if not self._interval_s:
            return
        with self._lock:
            now_s = self._clock()
            begun_s = now_s - self._interval_s
            self._last_s = {name: at_s for name, at_s in self._last_s.items() if at_s > begun_s}
            at_s = max(now_s, self._last_s.get(key, begun_s) + self._interval_s)
            self._last_s[key] = at_s
        if at_s > now_s:
            self._sleep(at_s - now_s)
