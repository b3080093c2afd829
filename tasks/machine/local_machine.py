"""Run a node's work on the local cloud.

`python -m grpo_orch.tasks.machine.local_machine FD FOLDER ATTEMPT ARGV...`

Unlike `tasks.machine.cloud_machine` it writes no reports to the store, since the local cloud reads the machine's
folder. It holds a lock while the work runs, so that a second launch of the attempt exits. The next attempt,
started once this one's end is recorded, waits until the lock is released. This process closes FD once the attempt
is recorded. If it is gone and the record has no exit code, the machine died.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TextIO

from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.policies.model.node_contract import RUN_ENV, AttemptRecord
from grpo_orch.tasks.machine import dead_man
from grpo_orch.tasks.machine.children import (
    end_in_order,
    exit_code_of,
    read_attempt,
    record_attempt,
    start_child,
    try_lock,
)
from grpo_orch.tasks.machine.exit_note import take_reason

POLL_S = 0.01  # between attempts to take the lock


def main() -> int:
    fd, folder, attempt, argv = int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4:]
    with (folder / "lock").open("a") as lock:
        if not _locked(lock, folder):
            return 0
        if read_attempt(folder).attempt >= attempt:  # a concurrent launch was faster
            return 0
        record_attempt(folder, AttemptRecord(attempt, pid=os.getpid()))
        os.close(fd)
        take_reason(folder / "work")  # of an earlier attempt
        work = start_child(argv, dict(os.environ))
        signal.signal(signal.SIGTERM, lambda *_: work.terminate())
        abandoned = _watch_run(work)
        code = exit_code_of(work.wait())
        record_attempt(folder, AttemptRecord(attempt, code, os.getpid(), take_reason(folder / "work")))
        if abandoned.is_set():  # no controller will clean up the work's remaining processes
            os.killpg(0, signal.SIGKILL)
    return 0


def _locked(lock: TextIO, folder: Path) -> bool:
    """Take the lock, waiting for an attempt whose end is recorded. Returns False if an attempt is running."""
    while not try_lock(lock):
        if read_attempt(folder).exit_code is None:
            return False
        time.sleep(POLL_S)
    return True


def _watch_run(work: subprocess.Popen[bytes]) -> threading.Event:
    """End the work if the run is abandoned. Returns an event that is set then."""
    abandoned = threading.Event()

    def end() -> None:
        abandoned.set()
        end_in_order(work)

    if RUN_ENV in os.environ:
        dead_man.start(Store(os.environ[RUN_ENV], retry_s=0.0), os.environ, end)
    return abandoned


if __name__ == "__main__":
    sys.exit(main())
