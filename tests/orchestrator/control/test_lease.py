"""Whether somebody steers, told from a lease whose holder's clock may be hours off."""

from __future__ import annotations

import socket
import time
from dataclasses import replace

import pytest

from checkpoint.records.documents import Lease
from orchestrator.control.lease import LOOK_EVERY_S, LOOKS, RENEW_S, TTL_S, LeaseWatch, is_held, own_lease

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
def test_who_lives_is_seen_to_whatever_its_clock_says(ahead_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: NOW_S)
    living, dead = Holder(ahead_s, lives=True), Holder(ahead_s - 2 * TTL_S, lives=False)
    assert is_held(living.read, living.wait)
    assert not is_held(dead.read, dead.wait)
    assert dead.waited_s == LOOKS * LOOK_EVERY_S > 2 * RENEW_S


def test_nobody_waits_for_what_is_certain(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    own = own_lease(1, time.time() - HOUR_S, NOW_S)
    assert own.host == socket.gethostname()
    assert is_held(lambda: own, waited.append)
    assert not is_held(lambda: replace(own, pid_started="another"), waited.append)
    assert not is_held(lambda: None, waited.append)
    monkeypatch.setattr(time, "time", lambda: NOW_S)
    assert not is_held(lambda: elsewhere(-48 * HOUR_S), waited.append)
    assert waited == []


def test_who_watches_believes_the_renewals_and_not_the_clock() -> None:
    now_s = [0.0]
    watch = LeaseWatch(lambda: now_s[0])
    lease = elsewhere(-HOUR_S)
    assert not watch.look(lease, NOW_S)
    for renewal in range(1, 4):
        now_s[0] += RENEW_S
        lease = replace(lease, renewed_at_s=lease.renewed_at_s + renewal)
        assert watch.look(lease, NOW_S)
    now_s[0] += TTL_S + 1
    assert not watch.look(lease, NOW_S)
