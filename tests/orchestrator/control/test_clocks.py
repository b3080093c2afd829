"""Who steers, and what an unbroken row of looks is, told with clocks that may be hours off."""

from __future__ import annotations

import socket
import time
from dataclasses import replace

import pytest

from grpo_orch.checkpoint.records.documents import Lease
from grpo_orch.orchestrator.control.lease import (
    LEASE_CHECK_EVERY_S,
    LEASE_CHECKS,
    RENEW_S,
    TTL_S,
    LeaseWatch,
    is_held,
    own_lease,
)
from grpo_orch.orchestrator.control.run_clock import RunClock, Steadiness

HOUR_S = 3600.0
NOW_S = 1.7e9


def elsewhere(ahead_s: float) -> Lease:
    return Lease("there/7", "there", 7, "1", 3, NOW_S + ahead_s, TTL_S, NOW_S)


class Holder:
    """Another host, whose clock is off, and its lease; it renews while it lives. `wait` lets time pass."""

    def __init__(self, ahead_s: float, *, lives: bool) -> None:
        self.lease = elsewhere(ahead_s)
        self.lives = lives
        self.waited_s = self._renewed_s = 0.0

    def read(self) -> Lease:
        return self.lease

    def wait(self, seconds: float) -> None:
        self.waited_s += seconds
        if self.lives and self.waited_s - self._renewed_s > RENEW_S:
            self._renewed_s = self.waited_s
            self.lease = replace(self.lease, renewed_at_s=self.lease.renewed_at_s + RENEW_S)


@pytest.mark.parametrize("ahead_s", [-HOUR_S, 0.0, HOUR_S])
def test_living_holder_is_respected_with_any_clock(ahead_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: NOW_S)
    living, dead = Holder(ahead_s, lives=True), Holder(ahead_s - 2 * TTL_S, lives=False)
    assert is_held(living.read, living.wait)
    assert not is_held(dead.read, dead.wait)
    assert dead.waited_s == LEASE_CHECKS * LEASE_CHECK_EVERY_S > 2 * RENEW_S


def test_certain_outcome_is_not_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    own = own_lease(1, time.time() - HOUR_S, NOW_S)
    assert own.host == socket.gethostname()
    assert is_held(lambda: own, waited.append)
    assert not is_held(lambda: replace(own, process_started="another"), waited.append)
    assert not is_held(lambda: None, waited.append)
    monkeypatch.setattr(time, "time", lambda: NOW_S)
    assert not is_held(lambda: elsewhere(-48 * HOUR_S), waited.append)
    assert waited == []


def test_viewer_trusts_renewals_and_not_the_clock() -> None:
    now_s = [0.0]
    watch = LeaseWatch(lambda: now_s[0])
    lease = elsewhere(-HOUR_S)
    assert not watch.observe(lease, NOW_S)
    for renewal in range(1, 4):
        now_s[0] += RENEW_S
        lease = replace(lease, renewed_at_s=lease.renewed_at_s + renewal)
        assert watch.observe(lease, NOW_S)
    now_s[0] += TTL_S + 1
    assert not watch.observe(lease, NOW_S)


def test_steadiness_ends_after_half_a_minute_without_a_look() -> None:
    row = Steadiness()
    looks = [row.observe(at_s) for at_s in (100.0, 130.0, 160.0, 190.5, 191.5)]
    assert looks == [0.0, 30.0, 60.0, 0.0, 1.0]


def test_steadiness_restarts_after_a_failed_look() -> None:
    row = Steadiness()
    row.observe(100.0)
    row.observe(101.0)
    row.interrupt()
    assert [row.observe(102.0), row.observe(103.0)] == [0.0, 1.0]


def test_setting_the_clock_changes_nothing() -> None:
    walls, counted_s = [5000.0], [100.0]
    clock = RunClock(lambda: walls[0], lambda: counted_s[0])
    walls[0], counted_s[0] = 1.0, 107.0
    assert clock.now_s() == 5007.0
