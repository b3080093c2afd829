"""Kill the trainer when a call of the user's code does not return.

A separate watchdog process does it: code that holds the interpreter's lock, such as a regular expression, blocks
every thread and signal handler of its own process.
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

from grpo_orch.policies.model import exit_codes
from grpo_orch.tasks.machine.exit_note import leave_exit_code


@contextlib.contextmanager
def kill_after(limit_s: float, workdir: Path, why: str, within: str = "a call") -> Iterator[None]:
    """Kill this process with SIGKILL, noting BAD_SPEC, if the block takes longer than `limit_s`.

    If the process exits inside the block, the last line on stderr names `within`.

    Args:
        workdir: the machine's, where exit codes are noted.
        why: the reason in one line; the trainer's last line on stderr.
        within: name of the call.
    """
    argv = [sys.executable, "-m", __name__, str(limit_s), str(workdir), why, within]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, start_new_session=True) as watchdog:
        try:
            yield
        finally:
            watchdog.kill()


def main() -> None:
    trainer, (limit_s, workdir, why, within) = os.getppid(), sys.argv[1:]
    # stdin closes when the trainer exits, unless processes of the user's code still hold the other end.
    closed, _, _ = select.select([sys.stdin], [], [], float(limit_s))
    if closed:  # a call that returned would have killed this process already
        print(f"grpo-orch trainer: the process ended within {within}", file=sys.stderr, flush=True)
    elif os.getppid() == trainer:
        leave_exit_code(Path(workdir), exit_codes.BAD_SPEC, why)
        print(f"grpo-orch trainer: {why}", file=sys.stderr, flush=True)
        os.kill(trainer, signal.SIGKILL)


if __name__ == "__main__":
    main()
