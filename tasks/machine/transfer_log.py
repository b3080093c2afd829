"""Log the progress of long transfers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import structlog

from grpo_orch.policies.serving.joining import Stage

log = structlog.get_logger()

LOG_S = 5.0


class TransferLog:
    """Logs a transfer's progress every LOG_S and passes each change to `report`.

    `add` may be called from any thread. A transfer faster than LOG_S is not logged.
    """

    def __init__(self, name: str, total_bytes: int = 0, report: Callable[[Stage], None] = lambda _: None) -> None:
        self._name = name
        self._total_bytes = total_bytes
        self._report = report
        self._done_bytes = 0
        self._logged_at_s = time.monotonic()
        self._lock = threading.Lock()

    def add(self, size_bytes: int) -> None:
        """Add transferred bytes."""
        with self._lock:
            self.at(self._done_bytes + size_bytes, self._total_bytes)

    def at(self, done_bytes: int, total_bytes: int) -> None:
        """Set the total of transferred bytes."""
        self._done_bytes = done_bytes
        self._report(Stage(self._name, done_bytes, total_bytes))
        if time.monotonic() - self._logged_at_s > LOG_S:
            self._logged_at_s = time.monotonic()
            log.info(self._name, done_mib=done_bytes >> 20, of_mib=total_bytes >> 20)
