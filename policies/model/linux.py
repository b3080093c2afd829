"""What Linux tells about a process in its files under /proc, as they were read."""

from __future__ import annotations

BETWEEN_PROGRAMS_LOOKS = 1_000  # at a process that starts another program: far longer than the kernel needs
BETWEEN_PROGRAMS_S = 0.001  # from one look to the next


def is_between_programs(stat: str) -> bool:
    """Whether an environment that was read as empty was so only because the process was within execve(2).

    The kernel reads it as empty until the new program is laid out in memory: some microseconds, on a busy machine
    many milliseconds. `/proc/PID/stat` (proc_pid_stat(5)) tells where its code starts, 0 until then, and where its
    environment starts and ends: an empty one where it starts. Dead processes and the kernel's threads have no
    memory at all.
    """
    fields = stat.rpartition(")")[2].split()
    memory_bytes, code, start, end = (int(fields[number - 3]) for number in (23, 26, 50, 51))  # from the third on
    return memory_bytes > 0 and (code == 0 or start != end)
