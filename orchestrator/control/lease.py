"""The lease: names the controller of a run, for people and for `up`, `resume` and `status`.

The journal is the lock. The holder's clock may be hours off, so on another host the only proof that the holder
lives is a renewal while the lease is watched.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

from grpo_orch.checkpoint.records.documents import Lease
from grpo_orch.orchestrator.control.run_clock import awake_or_asleep_s

TTL_S = 15.0
RENEW_S = 2.0
LEASE_CHECKS, LEASE_CHECK_EVERY_S = 13, 0.5  # three renewals
NO_SKEW_S = 86400.0  # maximum difference between two hosts' clocks


def own_lease(epoch: int, now_s: float, run_time_s: float) -> Lease:
    """Return a lease for this process; `now_s` is the machine's clock, which other hosts compare with theirs."""
    host, pid = socket.gethostname(), os.getpid()
    return Lease(f"{host}/{pid}", host, pid, process_started(pid) or "", epoch, now_s, TTL_S, run_time_s)


def is_alive(lease: Lease, now_s: float) -> bool:
    """Return whether the holder lives: by its process on the same host, else by the clock."""
    if lease.host == socket.gethostname():
        return process_started(lease.pid) == lease.process_started
    return abs(now_s - lease.renewed_at_s) < lease.ttl_s


class LeaseWatch:
    """Tracks whether the holder of a lease lives. `clock`: seconds on a clock that never goes back."""

    def __init__(self, clock: Callable[[], float] = awake_or_asleep_s) -> None:
        self._clock = clock
        self._lease: Lease | None = None
        self._since_s = 0.0
        self._is_renewed = False  # since the first look

    def observe(self, lease: Lease | None, now_s: float) -> bool:
        """Return whether the holder of `lease`, as just read, lives. Compares clocks until a renewal is seen."""
        if lease is None or lease.host == socket.gethostname():
            self._lease = None
            return lease is not None and is_alive(lease, now_s)
        if lease != self._lease:
            self._is_renewed = self._lease is not None
            self._lease, self._since_s = lease, self._clock()
        if self._is_renewed:
            return self._clock() - self._since_s < lease.ttl_s
        return is_alive(lease, now_s)


def is_held(read: Callable[[], Lease | None], wait: Callable[[float], object] = time.sleep) -> bool:
    """Return whether a daemon controls the run.

    A lease of another host that looks stale, or from the future, is watched for some seconds. `read` returns the
    lease; its exceptions are passed on.
    """
    watch = LeaseWatch()
    for _ in range(LEASE_CHECKS):
        lease, now_s = read(), time.time()
        if lease is None or lease.host == socket.gethostname() or now_s - lease.renewed_at_s > NO_SKEW_S:
            return watch.observe(lease, now_s)
        if watch.observe(lease, now_s):
            return True
        wait(LEASE_CHECK_EVERY_S)
    return False


def process_started(pid: int) -> str | None:
    """Return the kernel's start time of a process (clock ticks since boot, proc(5) field 22); None if dead.

    psutil returns seconds since the epoch, which change whenever the clock is set.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else fields[19]
