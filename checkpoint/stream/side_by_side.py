"""Transfers that run side by side, and end together."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from checkpoint.stream.elsewhere import Dropped


def all_or_first_error(futures: Sequence[Future[Any]], pool: ThreadPoolExecutor) -> None:
    """Wait for all; at the first error drop what has not begun, and raise it."""
    try:
        wait(futures, return_when="FIRST_EXCEPTION")
        failed = [error for future in futures if future.done() and (error := future.exception()) is not None]
        for error in sorted(failed, key=lambda one: isinstance(one, Dropped)):  # which only follows another
            raise error
    finally:
        pool.shutdown(cancel_futures=True)
