"""Calls that may hang, made in a thread of their own: to a folder on a network, which no time limit reaches."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any

WAITING_MOST = 1000  # calls behind one that hangs: some minutes to days of steps, and a few megabytes


class Late(Exception):
    """A call was not done in time. It goes on, and those after it wait for it."""


_asked: list[Unhurried] = []  # all of this process


def finish() -> None:
    """Wait for all calls that are still to be made, however long that takes. Its caller has a limit."""
    wait([one.last for one in _asked if one.last is not None])


class Unhurried:
    """Makes one call after another. Their caller waits for each; while one is late, for none of those after it."""

    def __init__(self) -> None:
        self._calls: queue.Queue[tuple[Callable[[], Any], Future[Any]]] = queue.Queue(WAITING_MOST)
        self.last: Future[Any] | None = None
        _asked.append(self)
        threading.Thread(target=self._work, name="reports", daemon=True).start()

    def do(self, call: Callable[[], Any], limit_s: float, *, at_last: bool = False) -> Any:
        """Return what `call` returns; None where one before it is still late, unless `at_last`, and it only waits.

        Raises Late, and what `call` raises.
        """
        done: Future[Any] = Future()
        behind = self.last is not None and not self.last.done()
        try:
            self._calls.put_nowait((call, done))
        except queue.Full:
            raise Late(f"{WAITING_MOST} calls wait behind one that hangs") from None
        self.last = done
        if behind and not at_last:
            return None
        try:
            return done.result(limit_s)
        except TimeoutError as error:
            if done.done():  # its own
                raise
            raise Late(f"not done within {limit_s:g} s") from error

    def _work(self) -> None:
        while True:
            call, done = self._calls.get()
            try:
                done.set_result(call())
            except BaseException as error:  # noqa: BLE001  # whoever waits has it
                done.set_exception(error)
