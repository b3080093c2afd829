"""Child processes that never outlive their parent, however it ends. Linux only, as the nodes are."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from pathlib import Path

PR_SET_PDEATHSIG = 1  # linux/prctl.h
PR_SET_CHILD_SUBREAPER = 36
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


def exit_code_of(code: int) -> int:
    """A child's `returncode` as a shell has it: 128 and the signal's number for one that a signal ended."""
    return code if code >= 0 else 128 - code


def adopt_orphans() -> None:
    """From now on processes whose parent ends become children of this one, if they descend from it."""
    if _libc.prctl(PR_SET_CHILD_SUBREAPER, 1) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def end_descendants(patience_s: float) -> None:
    """Send SIGTERM to every descendant, and after `patience_s` SIGKILL to those that are left, until none is."""
    deadline_s = time.monotonic() + patience_s
    number = signal.SIGTERM
    told: set[int] = set()
    while pids := _descendants():
        for pid in pids - told:
            _send(pid, number)
        told |= pids
        if time.monotonic() > deadline_s and number is signal.SIGTERM:
            number, told = signal.SIGKILL, set()
        time.sleep(0.02)  # the kernel tells of the end of a grandchild in no other way


def _send(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def _descendants() -> set[int]:
    """The pids of all living descendants."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").iterdir():
        if path.name.isdigit() and (parent := _living_parent(int(path.name))) is not None:
            children.setdefault(parent, []).append(int(path.name))
    found: set[int] = set()
    todo = [os.getpid()]
    while todo:
        for child in children.get(todo.pop(), []):
            found.add(child)
            todo.append(child)
    return found


def _living_parent(pid: int) -> int | None:
    """The parent's pid, or None for a process that is gone or dead."""
    try:
        # The name, in parentheses, may hold spaces: count from its end. See proc(5).
        state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if state in "ZX" else int(parent)
