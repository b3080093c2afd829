"""Who steers a run: a courtesy for people and for `up`, `resume` and `status`. The lock is the journal."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from checkpoint.documents import Lease

TTL_S = 15.0
RENEW_S = 2.0


def own_lease(epoch: int, now_s: float) -> Lease:
    """A lease for this process."""
    host, pid = socket.gethostname(), os.getpid()
    return Lease(f"{host}/{pid}", host, pid, process_started(pid) or "", epoch, now_s, TTL_S)


def is_alive(lease: Lease, now_s: float) -> bool:
    """Whether its holder lives. On the holder's own host the process itself is asked, elsewhere the clock."""
    if lease.host == socket.gethostname():
        return process_started(lease.pid) == lease.pid_started
    return now_s - lease.renewed_at_s < lease.ttl_s


def process_started(pid: int) -> str | None:
    """The kernel's start time of a process (clock ticks since boot, proc(5) field 22); None once it is dead."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else fields[19]
