"""The process that is a machine of the local cloud: `... local_machine FD FOLDER ATTEMPT ARGV...`.

It holds a lock on its folder for as long as the machine is up, runs the work as its child, and writes the exit
code when the work has ended. The lock is what makes launching twice launch once: the second process finds it taken
and leaves. Closing FD tells the launcher that the machine is on record. When the process is gone and there is no
exit code, the machine died.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main() -> int:
    registers, folder, attempt, argv = int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4:]
    lock = (folder / "lock").open("a")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return 0
    record = folder / "machine.json"
    before = json.loads(record.read_text()) if record.exists() else {"attempt": 0}
    if before["attempt"] >= attempt:
        return 0  # that attempt was already started, by a launch that overtook this one
    write(record, {"attempt": attempt, "pid": os.getpid()})
    os.close(registers)
    libc = ctypes.CDLL(None, use_errno=True)
    work = subprocess.Popen(argv, preexec_fn=lambda: libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL))
    signal.signal(signal.SIGTERM, lambda *_: work.terminate())
    code = work.wait()
    write(folder / "exit.json", {"attempt": attempt, "exit_code": code if code >= 0 else 128 - code})
    return 0


def write(path: Path, document: dict[str, int]) -> None:
    part = path.with_suffix(".part")
    part.write_text(json.dumps(document))
    part.replace(path)


if __name__ == "__main__":
    sys.exit(main())
