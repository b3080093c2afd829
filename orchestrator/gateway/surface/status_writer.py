"""Writes the gateway's status to the run's store, where the controller and the views read it.

They cannot ask the gateway, for it listens beside the trainer on an address that they may not reach.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Hashable
from dataclasses import replace

import structlog

from checkpoint.records import documents
from checkpoint.store.errors import StoreError
from checkpoint.store.run_store import Store
from policies.model.vocabulary import Precedence
from policies.serving.gateway_status import GatewayStatus
from policies.serving.wire import STATUS_S

log = structlog.get_logger()

LOOK_S = 0.25  # changes that come within this are written together
RETRY_S = 1.0  # after a write that failed


class StatusWriter:
    """Writes the status soon after each change of the membership, and every STATUS_S without one.

    Args:
        store: the run's store, without retries: what could not be written is old by then, and the next try writes
            what is true then.
        by: the precedence of the machine's trainer, under which it is written.
        look: returns the status as it is now; called on the event loop. `seq` is set here.
        clock: seconds, never going back.
    """

    def __init__(
        self,
        store: Store,
        by: Precedence,
        look: Callable[[], GatewayStatus],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._by = by
        self._look = look
        self._clock = clock
        self._seq = 0
        self._failing = False

    async def run(self) -> None:
        """Look and write, for ever, one write at a time, in a thread: the event loop never waits for the store."""
        told: Hashable = None
        told_at_s = -math.inf
        while True:
            status, now_s = self._look(), self._clock()
            if _membership(status) != told or now_s - told_at_s >= STATUS_S:
                self._seq += 1
                await asyncio.to_thread(self._write, replace(status, seq=self._seq))
                if not self._failing:
                    told, told_at_s = _membership(status), now_s
            await asyncio.sleep(RETRY_S if self._failing else LOOK_S)

    def _write(self, status: GatewayStatus) -> None:
        try:
            documents.members(self._by).write(self._store, status)
        except StoreError as error:
            if not self._failing:
                log.warning("status_write_failed", error=str(error))
            self._failing = True
        else:
            if self._failing:
                log.info("status_write_recovered")
            self._failing = False


def _membership(status: GatewayStatus) -> Hashable:
    """What is written at once when it changes; the counts can wait for the next beat."""
    members = tuple((one.node, one.boot_id, one.policy, one.serving, one.draining) for one in status.members)
    return status.policy, members, tuple(status.changes[-1:])
