"""Progress of a long transfer, for a log file: a line now and then, none for a quick one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import structlog

from policies.serving.joining import Stage

log = structlog.get_logger()

SAY_S = 5.0


class TransferLog:
    """Says every SAY_S how much of `what` is done, and tells `say` each time. Safe from any thread."""

    def __init__(self, what: str, total_bytes: int = 0, say: Callable[[Stage], None] = lambda _: None) -> None:
        self._what = what
        self._total_bytes = total_bytes
        self._say = say
        self._done_bytes = 0
        self._said_s = time.monotonic()
        self._lock = threading.Lock()

    def add(self, size_bytes: int) -> None:
        """Count more that is done."""
        with self._lock:
            self.at(self._done_bytes + size_bytes, self._total_bytes)

    def at(self, done_bytes: int, total_bytes: int) -> None:
        """Count what is done in all."""
        self._done_bytes = done_bytes
        self._say(Stage(self._what, done_bytes, total_bytes))
        if time.monotonic() - self._said_s > SAY_S:
            self._said_s = time.monotonic()
            log.info(self._what, done_mib=done_bytes >> 20, of_mib=total_bytes >> 20)
