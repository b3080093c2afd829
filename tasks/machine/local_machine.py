"""A machine of the local cloud, `python -m tasks.machine.local_machine FD FOLDER ATTEMPT ARGV...`: runs the work.

Unlike `tasks.machine.cloud_machine` it writes no reports to the store, for the local cloud can look into the
machine's folder. It holds a lock for as long as the work runs, so that launching twice launches once: the second
process leaves. The next attempt, ordered once the end of this one is on record, waits the moment until the lock is
free. Closing FD tells the launcher that the attempt is on record. When this process is gone and the record has no
exit code, the machine died.
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

from checkpoint.store.run_store import Store
from policies.model.node_contract import RUN_ENV
from tasks.machine import dead_man
from tasks.machine.children import Started, end_in_order, exit_code_of, record, start_child, started, take
from tasks.machine.exit_note import take_reason

POLL_S = 0.01  # between two looks at the lock


def main() -> int:
    registers, folder, attempt, argv = int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4:]
    with (folder / "lock").open("a") as lock:
        if not _locked(lock, folder):
            return 0
        if started(folder).attempt >= attempt:  # of a launch that overtook this one
            return 0
        record(folder, Started(attempt, pid=os.getpid()))
        os.close(registers)
        take_reason(folder / "work")  # of an earlier attempt
        work = start_child(argv, dict(os.environ))
        signal.signal(signal.SIGTERM, lambda *_: work.terminate())
        silent = _watch_run(work)
        code = exit_code_of(work.wait())
        record(folder, Started(attempt, code, os.getpid(), take_reason(folder / "work")))
        if silent.is_set():  # nobody will clear away what the work has left
            os.killpg(0, signal.SIGKILL)
    return 0


def _locked(lock: TextIO, folder: Path) -> bool:
    """Take the lock, from an attempt that has ended a moment after it says so. False where one is at work."""
    while not take(lock):
        if started(folder).exit_code is None:
            return False
        time.sleep(POLL_S)
    return True


def _watch_run(work: subprocess.Popen[bytes]) -> threading.Event:
    """End the work once the run is silent. Returns what tells of it."""
    silent = threading.Event()

    def end() -> None:
        silent.set()
        end_in_order(work)

    if RUN_ENV in os.environ:
        dead_man.start(Store(os.environ[RUN_ENV], retry_s=0.0), os.environ, end)
    return silent


if __name__ == "__main__":
    sys.exit(main())
