"""Who steers a run: a courtesy for people and for `up`, `resume` and `status`. The lock is the journal.

Its holder dates it by a clock that may be hours off. What shows that it lives, wherever it is, is that the lease
is renewed while one looks.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

from checkpoint.records.documents import Lease
from orchestrator.control.run_clock import awake_or_asleep_s

TTL_S = 15.0
RENEW_S = 2.0
LOOKS, LOOK_EVERY_S = 13, 0.5  # three renewals
NO_SKEW_S = 86400.0  # no host's clock is off by more


def own_lease(epoch: int, now_s: float, run_time_s: float) -> Lease:
    """A lease for this process; `now_s` is by the machine's clock, which others compare theirs with."""
    host, pid = socket.gethostname(), os.getpid()
    return Lease(f"{host}/{pid}", host, pid, process_started(pid) or "", epoch, now_s, TTL_S, run_time_s)


def is_alive(lease: Lease, now_s: float) -> bool:
    """Whether its holder lives. On the holder's own host the process itself is asked, elsewhere the clock."""
    if lease.host == socket.gethostname():
        return process_started(lease.pid) == lease.pid_started
    return abs(now_s - lease.renewed_at_s) < lease.ttl_s


class LeaseWatch:
    """Whether the holder of a lease lives, from looks at it. `clock`: seconds on a clock that never goes back."""

    def __init__(self, clock: Callable[[], float] = awake_or_asleep_s) -> None:
        self._clock = clock
        self._lease: Lease | None = None
        self._since_s = 0.0
        self._renewed = False  # while we looked

    def look(self, lease: Lease | None, now_s: float) -> bool:
        """Return whether the holder of `lease`, as just read, lives. Until it was seen to be renewed, the clocks
        have to do."""
        if lease is None or lease.host == socket.gethostname():
            self._lease = None
            return lease is not None and is_alive(lease, now_s)
        if lease != self._lease:
            self._renewed = self._lease is not None
            self._lease, self._since_s = lease, self._clock()
        if self._renewed:
            return self._clock() - self._since_s < lease.ttl_s
        return is_alive(lease, now_s)


def is_held(read: Callable[[], Lease | None], wait: Callable[[float], object] = time.sleep) -> bool:
    """Whether somebody steers. A lease of another host that looks stale, or from the future, is watched for some
    seconds. `read` reads it; raises what that raises."""
    watch = LeaseWatch()
    for _ in range(LOOKS):
        lease, now_s = read(), time.time()
        if lease is None or lease.host == socket.gethostname() or now_s - lease.renewed_at_s > NO_SKEW_S:
            return watch.look(lease, now_s)
        if watch.look(lease, now_s):
            return True
        wait(LOOK_EVERY_S)
    return False


def process_started(pid: int) -> str | None:
    """The kernel's start time of a process (clock ticks since boot, proc(5) field 22); None once it is dead.

    psutil gives it as seconds since the epoch, which change whenever the clock is set.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else fields[19]
