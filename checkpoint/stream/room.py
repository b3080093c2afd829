"""Memory for what is in flight: so many bytes at a time, however many threads wait for their turn."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Room:
    """So many bytes, which threads take and give back. What is larger than all of them waits until it is alone."""

    def __init__(self, size_bytes: int) -> None:
        self._size_bytes = size_bytes
        self._free_bytes = size_bytes
        self._freed = threading.Condition()

    @contextmanager
    def place(self, size_bytes: int) -> Iterator[Callable[[], None]]:
        """Yield what takes a place of that size, once there is room. The block's end frees it."""
        needs_bytes, taken_bytes = min(size_bytes, self._size_bytes), 0

        def take() -> None:
            nonlocal taken_bytes
            with self._freed:
                self._freed.wait_for(lambda: self._free_bytes + taken_bytes >= needs_bytes)
                self._free_bytes -= needs_bytes - taken_bytes
            taken_bytes = needs_bytes

        try:
            yield take
        finally:
            with self._freed:
                self._free_bytes += taken_bytes
                self._freed.notify_all()
