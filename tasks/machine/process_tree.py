"""Run a program and end its process tree with it.

`python -m grpo_orch.tasks.machine.process_tree PROGRAM ARGUMENT...`

vLLM's server starts an engine, which starts workers. If the server is killed, they keep running and hold GPU
memory. This process ends all descendants after the program ends, on SIGTERM, and when its parent is gone. Its exit
code is the program's.
"""

from __future__ import annotations

import os
import signal
import sys

from grpo_orch.tasks.machine.children import adopt_orphans, end_descendants, exit_code_of, start_child

# For an orderly shutdown, which also removes shared memory. A new server must not start before its end.
GRACE_S = 5.0


class _Terminated(Exception):
    """This process received SIGTERM."""


def _raise_terminated(number: int, _: object) -> None:
    signal.signal(number, signal.SIG_IGN)  # ignore a second one, which the kernel sends when the agent is gone
    raise _Terminated


def main() -> int:
    adopt_orphans()
    code = 128 + signal.SIGTERM
    try:
        signal.signal(signal.SIGTERM, _raise_terminated)
        child = start_child(sys.argv[1:], dict(os.environ))
        while True:
            pid, status = os.wait()  # also returns adopted orphans
            if pid == child.pid:
                code = os.waitstatus_to_exitcode(status)
                break
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    except _Terminated:
        pass
    end_descendants(GRACE_S)
    return exit_code_of(code)


if __name__ == "__main__":
    sys.exit(main())
