"""Ends the trainer where a call of the user's code does not come back.

By a process beside it: code that holds the interpreter's lock, as a regular expression does, stops every thread
and every signal's handler of its own process.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from policies.model import exit_codes
from tasks.machine.exit_note import leave_exit_code


@contextlib.contextmanager
def ended_after(limit_s: float, workdir: Path, why: str, within: str = "a call") -> Iterator[None]:
    """What takes longer within ends this process by SIGKILL, and notes the exit code of what only the user can
    repair. Where the process ends within by itself, its last line says so.

    Args:
        workdir: the machine's, where exit codes are noted.
        why: in one line, the trainer's last.
        within: what is called.
    """
    argv = [sys.executable, "-m", __name__, str(limit_s), str(workdir), why, within]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, start_new_session=True) as beside:
        try:
            yield
        finally:
            beside.kill()


def main() -> None:
    trainer, (limit_s, workdir, why, within) = os.getppid(), sys.argv[1:]
    # Its input ends with the trainer, unless the user's code has left processes that hold the other end.
    over, _, _ = select.select([sys.stdin], [], [], float(limit_s))
    if over:  # a call that comes back ends this process first
        print(f"grpo-orch trainer: the process ended within {within}", file=sys.stderr, flush=True)
    elif os.getppid() == trainer:
        leave_exit_code(Path(workdir), exit_codes.BAD_SPEC, why)
        print(f"grpo-orch trainer: {why}", file=sys.stderr, flush=True)
        os.kill(trainer, signal.SIGKILL)


if __name__ == "__main__":
    main()
