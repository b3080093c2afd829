"""Runs a program whose process tree must end as one: `python -m tasks.machine.process_tree PROGRAM
ARGUMENT...`.

vLLM's server starts an engine, which starts workers; when the server is killed they go on, and hold the
accelerator's memory. Here whatever the program started is ended after it, and all of it when this process is told
to end or its parent is gone. The exit code is the program's.
"""

from __future__ import annotations

import os
import signal
import sys

from tasks.machine.children import adopt_orphans, end_descendants, exit_code_of, start_child

# Long enough to shut down in order, which also removes shared memory; a new server may not start before.
GRACE_S = 5.0


class _Ended(Exception):
    """A signal asked this process to end."""


def _raise_ended(number: int, _: object) -> None:
    signal.signal(number, signal.SIG_IGN)  # a second one, as the kernel's when the agent is gone, changes nothing
    raise _Ended


def main() -> int:
    adopt_orphans()
    code = 128 + signal.SIGTERM
    try:
        signal.signal(signal.SIGTERM, _raise_ended)
        child = start_child(sys.argv[1:], dict(os.environ))
        while True:
            pid, status = os.wait()  # orphans too: they are this process's children now
            if pid == child.pid:
                code = os.waitstatus_to_exitcode(status)
                break
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    except _Ended:
        pass
    end_descendants(GRACE_S)
    return exit_code_of(code)


if __name__ == "__main__":
    sys.exit(main())
