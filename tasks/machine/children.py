"""Child processes that never outlive their parent, however it ends. Linux only, as the nodes are."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import psutil

from checkpoint.store.codec import from_json, to_json
from policies.model.linux import BETWEEN_PROGRAMS_LOOKS, BETWEEN_PROGRAMS_S, is_between_programs
from policies.model.node_contract import MACHINE

PR_SET_PDEATHSIG = 1  # linux/prctl.h
PR_SET_CHILD_SUBREAPER = 36
END_S = 900.0  # a trainer stores what it has
_libc = ctypes.CDLL(None, use_errno=True)


def start_child(
    argv: list[str], env: dict[str, str], death_signal: signal.Signals = signal.SIGKILL
) -> subprocess.Popen[bytes]:
    """Start a process that gets `death_signal` from the kernel when this one ends.

    To be called from the main thread: the kernel means the thread that starts it. The signal reaches the child
    alone, not the processes that it starts; for a tree see `tasks.machine.process_tree`.
    """
    parent = os.getpid()

    def tie() -> None:
        _libc.prctl(PR_SET_PDEATHSIG, death_signal)
        if os.getppid() != parent:  # it ended before the tie was made
            os._exit(1)

    return subprocess.Popen(argv, env=env, preexec_fn=tie)


def end_with_parent() -> None:
    """From now on the kernel kills this process when its parent, or the thread of it that started this, ends.

    For a process whose launcher does not tie it.
    """
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def exit_code_of(code: int) -> int:
    """A child's `returncode` as a shell has it: 128 and the signal's number for one that a signal ended."""
    return code if code >= 0 else 128 - code


def adopt_orphans() -> None:
    """From now on processes whose parent ends become children of this one, if they descend from it."""
    if _libc.prctl(PR_SET_CHILD_SUBREAPER, 1) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def end_in_order(work: subprocess.Popen[bytes]) -> None:
    """Send SIGTERM, and SIGKILL to what has not ended within END_S. Somebody else waits for the process, too."""
    work.terminate()
    try:
        work.wait(END_S)
    except subprocess.TimeoutExpired:
        work.kill()


def end_descendants(grace_s: float, marked: tuple[str, str] | None = None) -> None:
    """Send SIGTERM to every descendant, and after `grace_s` SIGKILL to those that are left, until none is.

    Args:
        marked: those alone that have this variable with this value in their environment.
    """
    deadline_s = time.monotonic() + grace_s
    number = signal.SIGTERM
    told: set[psutil.Process] = set()
    while living := _descendants(marked):
        for process in living - told:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)
        told |= living
        if time.monotonic() > deadline_s and number is signal.SIGTERM:
            number, told = signal.SIGKILL, set()
        time.sleep(0.02)  # the kernel tells of the end of a grandchild in no other way


def _descendants(marked: tuple[str, str] | None) -> set[psutil.Process]:
    """All living descendants, or those that are marked."""
    found = psutil.Process().children(recursive=True)
    return {one for one in found if _is_alive(one) and (marked is None or _has(one, *marked))}


def _has(process: psutil.Process, name: str, value: str) -> bool:
    with contextlib.suppress(psutil.Error, OSError):  # it ends, or is not ours to look into
        for _ in range(BETWEEN_PROGRAMS_LOOKS):
            environment = process.environ()
            stat = Path(f"/proc/{process.pid}/stat").read_text("utf-8", "replace")
            if environment or not is_between_programs(stat):
                return bool(environment.get(name) == value)
            time.sleep(BETWEEN_PROGRAMS_S)
    return False


def _is_alive(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


# The attempts of a node's work on one machine: one at a time, under a lock, and the newest on record.


@dataclass(frozen=True, slots=True)
class Started:
    """The newest attempt that was started here, by process `pid`. `exit_code` is None until its end was seen;
    `reason` is the work's own last line."""

    attempt: int
    exit_code: int | None = None
    pid: int = 0
    reason: str = ""


def take(lock: TextIO) -> bool:
    """Take the lock, which lasts as long as the file is open. Returns False where another process has it."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def started(folder: Path) -> Started:
    """What is on record; attempt 0 before the first."""
    path = folder / MACHINE
    return from_json(path.read_bytes(), Started, str(path)) if path.exists() else Started(0)


def record(folder: Path, newest: Started) -> None:
    """Put it on record, whole or not at all."""
    part = folder / "machine.part"
    part.write_bytes(to_json(newest))
    part.replace(folder / MACHINE)
