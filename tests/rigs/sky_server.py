"""Real processes in the place of API servers, for a PID namespace of their own: what is tested there kills.

`python -m tests.rigs.sky_server FOLDER STORY` prints what `kill_orphans` ended and what lives on, by name.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil

from grpo_orch.orchestrator.clouds.sky.calls import kill_orphans
from tests.budget import HANG_S

# A server starts an executor, which ignores SIGTERM and starts a tool. Server and executor have the server's log
# open, the tool has not.
SERVER = """
import subprocess, sys, time
folder = sys.argv[1]
log = open(f"{folder}/api_server/server.log", "a")
executor = '''
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
tool = subprocess.Popen(["sleep", "600"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
with open(sys.argv[1] + "/pids.part", "w") as out:
    out.write(f"{os.getpid()} {tool.pid}")
os.rename(sys.argv[1] + "/pids.part", sys.argv[1] + "/pids")
time.sleep(600)
'''
subprocess.Popen([sys.executable, "-c", executor, folder], stdout=log, stderr=log)
time.sleep(600)
"""


class Server:
    """A server, its executor and the executor's tool, with their files in a folder."""

    def __init__(self, folder: Path, *, own_session: bool = True) -> None:
        self.state = folder / "api_server"
        self.state.mkdir(parents=True)
        argv = [sys.executable, "-c", SERVER, str(folder)]
        self._process = subprocess.Popen(argv, start_new_session=own_session, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + HANG_S
        while not (folder / "pids").exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        executor, tool = map(int, (folder / "pids").read_text().split())
        name = folder.name
        self.pids = {f"{name} server": self._process.pid, f"{name} executor": executor, f"{name} tool": tool}

    def kill(self) -> None:
        """Kill the server alone; as nobody waits for it, it is a zombie from then on."""
        self._process.kill()
        os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)


def is_alive(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def main() -> None:
    folder, story = Path(sys.argv[1]), sys.argv[2]
    one = Server(folder / "one", own_session=story != "session from outside")
    other = Server(folder / "other")
    if story != "server lives":
        one.kill()
        other.kill()
    pids = one.pids | other.pids
    ended = kill_orphans(one.state)
    deadline = time.monotonic() + HANG_S
    while any(map(is_alive, ended)):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    found = {
        "ended": [name for name, pid in pids.items() if pid in ended],
        "living": [name for name, pid in pids.items() if is_alive(pid)],
        "ended again": kill_orphans(one.state),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
