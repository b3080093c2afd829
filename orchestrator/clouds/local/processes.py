"""A machine of the local cloud, as its processes: each carries the machine's mark in its environment."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from checkpoint.store.codec import from_json
from checkpoint.store.errors import Corrupt
from policies.model.linux import BETWEEN_PROGRAMS_LOOKS, BETWEEN_PROGRAMS_S, is_between_programs
from policies.model.node_contract import MACHINE

MARK = "GRPO_ORCH_MACHINE"  # in the environment of every process of a machine: its folder


def kill_all(folder: Path) -> None:
    """SIGKILL every process that carries the machine's mark, until none is left."""
    while pids := marked_processes(folder):
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue


def marked_processes(folder: Path) -> list[int]:
    """The pids of a machine."""
    return [pid for pid in psutil.pids() if carries_mark(pid, folder)]


def carries_mark(pid: int, folder: Path) -> bool:
    """Whether the process belongs to the machine. A dead one does not, also while it waits to be reaped."""
    mark = os.fsencode(f"{MARK}={folder}")
    with contextlib.suppress(OSError):
        for _ in range(BETWEEN_PROGRAMS_LOOKS):
            environment = Path(f"/proc/{pid}/environ").read_bytes()
            if environment or not is_between_programs(Path(f"/proc/{pid}/stat").read_text("utf-8", "replace")):
                return mark in environment.split(b"\0")
            time.sleep(BETWEEN_PROGRAMS_S)
    return False


@dataclass(frozen=True, slots=True)
class OnRecord:
    """A machine's newest attempt. `exit_code` is None until it has ended, `pid` is the machine's own process and
    `reason` the last line of the work that ended."""

    attempt: int
    pid: int
    exit_code: int | None = None
    reason: str = ""


_DIED = OnRecord(0, 0)  # no process has the pid 0


def on_record(folder: Path) -> OnRecord:
    """Read the machine's record. Raises FileNotFoundError.

    A damaged record counts as that of a machine whose process died: a power cut, which ends the processes too, may
    leave it empty. The daemon reads it in every tick, and launches of other runs read it.
    """
    data = (folder / MACHINE).read_bytes()
    try:
        return from_json(data, OnRecord, str(folder / MACHINE))
    except Corrupt:
        return _DIED
