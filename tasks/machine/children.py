"""Child processes that never outlive their parent, even if it is killed. Linux only."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import TextIO

import psutil

from grpo_orch.checkpoint.store.codec import from_json, to_json
from grpo_orch.policies.model.linux import BETWEEN_PROGRAMS_LOOKS, BETWEEN_PROGRAMS_S, is_between_programs
from grpo_orch.policies.model.node_contract import MACHINE, AttemptRecord

PR_SET_PDEATHSIG = 1  # linux/prctl.h
PR_SET_CHILD_SUBREAPER = 36
END_S = 900.0  # for a trainer to store its checkpoint
_libc = ctypes.CDLL(None, use_errno=True)


def start_child(
    argv: list[str], env: dict[str, str], death_signal: signal.Signals = signal.SIGKILL
) -> subprocess.Popen[bytes]:
    """Start a process that gets `death_signal` from the kernel when this process ends.

    Call it from the main thread: the kernel sends the signal when the calling thread ends. Only the child gets it,
    not the child's descendants; for a process tree see `tasks.machine.process_tree`.
    """
    parent = os.getpid()

    def set_death_signal() -> None:
        _libc.prctl(PR_SET_PDEATHSIG, death_signal)
        if os.getppid() != parent:  # the parent ended before the call
            os._exit(1)

    return subprocess.Popen(argv, env=env, preexec_fn=set_death_signal)


def end_with_parent() -> None:
    """Have the kernel kill this process when its parent's thread that started it ends.

    For a process that was not started by `start_child`.
    """
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def exit_code_of(code: int) -> int:
    """Convert a `returncode` to a shell's exit code: 128 plus the signal's number if a signal ended the child."""
    return code if code >= 0 else 128 - code


def adopt_orphans() -> None:
    """Make this process the parent of its descendants whose own parent ends."""
    if _libc.prctl(PR_SET_CHILD_SUBREAPER, 1) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def end_in_order(work: subprocess.Popen[bytes]) -> None:
    """Send SIGTERM, and SIGKILL after END_S. The main thread waits for the process, too."""
    work.terminate()
    try:
        work.wait(END_S)
    except subprocess.TimeoutExpired:
        work.kill()


def end_descendants(grace_s: float, marked: tuple[str, str] | None = None) -> None:
    """Send SIGTERM to all descendants, and SIGKILL after `grace_s`. Return once all have ended.

    Args:
        marked: name and value of an environment variable; only descendants that have it are ended.
    """
    deadline_s = time.monotonic() + grace_s
    number = signal.SIGTERM
    signalled: set[psutil.Process] = set()
    while living := descendants(marked):
        for process in living - signalled:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)
        signalled |= living
        if time.monotonic() > deadline_s and number is signal.SIGTERM:
            number, signalled = signal.SIGKILL, set()
        time.sleep(0.02)  # poll, since the kernel does not notify of a grandchild's end


def descendants(marked: tuple[str, str] | None) -> set[psutil.Process]:
    """Return all living descendants, or the marked ones."""
    processes = psutil.Process().children(recursive=True)
    return {
        process
        for process in processes
        if _is_alive(process) and (marked is None or _has_variable(process, *marked))
    }


def _has_variable(process: psutil.Process, name: str, value: str) -> bool:
    with contextlib.suppress(psutil.Error, OSError):  # it ended, or belongs to another user
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


# Attempts of a node's work on one machine run one at a time, under a lock. A file records the newest one.


def try_lock(lock: TextIO) -> bool:
    """Take the lock until the file is closed. Returns False if another process holds it."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def read_attempt(folder: Path) -> AttemptRecord:
    """Return the newest attempt; attempt 0 before the first."""
    path = folder / MACHINE
    return from_json(path.read_bytes(), AttemptRecord, str(path)) if path.exists() else AttemptRecord(0)


def record_attempt(folder: Path, attempt: AttemptRecord) -> None:
    """Record an attempt atomically."""
    part = folder / "machine.part"
    part.write_bytes(to_json(attempt))
    part.replace(folder / MACHINE)
