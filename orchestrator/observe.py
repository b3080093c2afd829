"""One look at the world: cloud, gateway, trainer, commands. A party that does not answer is None, never empty."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from dataclasses import replace

from checkpoint import documents
from checkpoint.store import Store
from orchestrator.clouds.protocol import Cloud, CloudUnavailable
from policies.snapshot import LaunchRefused, Machine, Member, Snapshot, Trainer
from policies.wire import STATUS_S, GatewayStatus, MemberStatus

FRESH_S = 3 * STATUS_S  # what is older than this says nothing about now
_CLOCK = time.CLOCK_BOOTTIME if sys.platform == "linux" else time.CLOCK_MONOTONIC


def _awake_or_asleep_s() -> float:
    """Seconds on a clock that never goes back, and goes on while a laptop sleeps."""
    return time.clock_gettime(_CLOCK)


class GatewayWatch:
    """What the gateway last wrote of itself, as long as that is fresh.

    The gateway writes on a machine with another clock, so that the time of its writing would prove nothing. What
    was not there at one look and is there at the next was written in between: it is not older than the first look.

    Args:
        store: the run's store.
        believe_first: take what the first look finds for fresh, though nothing shows when it was written.
        clock: seconds on a clock of this machine that never goes back.
    """

    def __init__(
        self, store: Store, *, believe_first: bool = False, clock: Callable[[], float] = _awake_or_asleep_s
    ) -> None:
        self._store = store
        self._clock = clock
        self._status: GatewayStatus | None = None
        self._looked_at_s = clock() if believe_first else -math.inf
        self._written_after_s = -math.inf

    def look(self) -> GatewayStatus | None:
        """Return the newest status of the run's gateway, or None when it may be older than FRESH_S.

        Raises StoreError when the store cannot be read.
        """
        now_s = self._clock()
        address = documents.read_gateway(self._store)
        found = documents.read_members(self._store)
        # A gateway that was replaced may write on for a while, beside its successor.
        if address is None or (found is not None and found.boot_id != address.boot_id):
            found = None
        if found is not None and self._is_news(found):
            self._status, self._written_after_s = found, self._looked_at_s
        self._looked_at_s = now_s
        if self._status is None or address is None or self._status.boot_id != address.boot_id:
            return None
        return self._status if self._clock() - self._written_after_s < FRESH_S else None

    def _is_news(self, found: GatewayStatus) -> bool:
        known = self._status
        return known is None or found.boot_id != known.boot_id or found.seq > known.seq


class TrainerWatch:
    """The trainer's heartbeat, dated by this machine's clock: its own may differ by more than a beat's life.

    The first one found counts as new: a trainer that is dead is noticed so much later by a new controller.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._said: Trainer | None = None
        self._seen_at_s = 0.0

    def look(self, now_s: float) -> Trainer | None:
        """Return the newest beat with the time at which it was first seen. Raises StoreError."""
        beat = documents.read_trainer(self._store)
        if beat != self._said:
            self._said, self._seen_at_s = beat, now_s
        return None if beat is None else replace(beat, beat_at_s=self._seen_at_s)


class Observer:
    """Looks. Remembers of earlier looks only what shows whether gateway and trainer are alive."""

    def __init__(self, store: Store, cloud: Cloud) -> None:
        self._store = store
        self._cloud = cloud
        self._gateway = GatewayWatch(store)
        self._trainer = TrainerWatch(store)

    def look(self, now_s: float, refused: tuple[LaunchRefused, ...]) -> Snapshot:
        """Return what is there now. Raises StoreError when the store cannot be read."""
        status = self._gateway.look()
        return Snapshot(
            now_s=now_s,
            machines=self._machines(),
            members=None if status is None else {m.node: _member(m) for m in status.members},
            gateway_boot_id=None if status is None else status.boot_id,
            gateway_age_s=0.0 if status is None else status.up_s,
            trainer=self._trainer.look(now_s),
            refused=refused,
            commands=documents.read_commands(self._store),
        )

    def _machines(self) -> dict[str, Machine] | None:
        try:
            return self._cloud.machines()
        except CloudUnavailable:
            return None


def _member(status: MemberStatus) -> Member:
    return Member(status.node, status.boot_id, status.policy, status.serving, status.requests_running)
