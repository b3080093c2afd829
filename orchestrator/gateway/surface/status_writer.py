"""Write the gateway's status to the run's store, for the controller and the views.

They may not be able to reach the gateway, which listens on the trainer's machine.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Hashable
from dataclasses import replace

import structlog

from grpo_orch.checkpoint.records import documents
from grpo_orch.checkpoint.store.errors import StoreError
from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.policies.model.vocabulary import Precedence
from grpo_orch.policies.serving.gateway_status import GatewayStatus
from grpo_orch.policies.serving.wire import STATUS_S

log = structlog.get_logger()

CHECK_S = 0.25  # changes within this interval are written together
RETRY_S = 1.0  # after a failed write


class StatusWriter:
    """Writes the status soon after each membership change, and every STATUS_S without one.

    Args:
        store: the run's store, without retries, since the next attempt writes a newer status.
        by: the precedence of the machine's trainer, which is part of the document's name.
        status: returns the current status, whose `seq` is set here; called on the event loop.
        clock: monotonic, in seconds.
    """

    def __init__(
        self,
        store: Store,
        by: Precedence,
        status: Callable[[], GatewayStatus],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._by = by
        self._status = status
        self._clock = clock
        self._seq = 0
        self._is_failing = False

    async def run(self) -> None:
        """Check and write, forever, in a thread, so that the event loop never waits for the store."""
        written: Hashable = None
        written_at_s = -math.inf
        while True:
            status, now_s = self._status(), self._clock()
            if _membership(status) != written or now_s - written_at_s >= STATUS_S:
                self._seq += 1
                await asyncio.to_thread(self._write, replace(status, seq=self._seq))
                if not self._is_failing:
                    written, written_at_s = _membership(status), now_s
            await asyncio.sleep(RETRY_S if self._is_failing else CHECK_S)

    def _write(self, status: GatewayStatus) -> None:
        try:
            documents.members(self._by).write(self._store, status)
        except StoreError as error:
            if not self._is_failing:
                log.warning("status_write_failed", error=str(error))
            self._is_failing = True
        else:
            if self._is_failing:
                log.info("status_write_recovered")
            self._is_failing = False


def _membership(status: GatewayStatus) -> Hashable:
    """Return the part of the status whose change is written soon; counts wait for STATUS_S."""
    members = tuple(
        (member.node, member.boot_id, member.policy, member.serving, member.draining) for member in status.members
    )
    return status.policy, members, tuple(status.changes[-1:])
