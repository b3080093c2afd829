"""Interpret files under /proc."""

from __future__ import annotations

BETWEEN_PROGRAMS_LOOKS = 1_000  # reads of a process within execve(2): far longer than the kernel needs
BETWEEN_PROGRAMS_S = 0.001  # from one read to the next


def is_between_programs(stat: str) -> bool:
    """Whether a process's environment was read as empty only because the process was within execve(2).

    The kernel reports it as empty until the new program is laid out in memory: some microseconds, on a busy
    machine many milliseconds. `/proc/PID/stat` (proc_pid_stat(5)) has the start of its code, 0 until then, and the
    start and end of its environment, equal if it is empty. Dead processes and kernel threads have no memory.
    """
    fields = stat.rpartition(")")[2].split()
    memory_bytes, code, start, end = (int(fields[number - 3]) for number in (23, 26, 50, 51))  # from the third on
    return memory_bytes > 0 and (code == 0 or start != end)
