"""What a killed API server leaves behind is ended, and nothing else.

Each story happens in a PID namespace, so that a mistake in what is tested ends nothing outside of it. There this
file is run, as `python -m MODULE FOLDER STORY`, and prints which processes were ended and which live on.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from grpo_orch.orchestrator.clouds.sky.calls import kill_orphans
from tests.budget import HANG_S, until
from tests.rigs.processes import alive

pytestmark = pytest.mark.root

UNSHARE = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
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


def tell(folder: Path, story: str) -> dict[str, Any]:
    try:
        subprocess.run([*UNSHARE, "true"], check=True, capture_output=True, timeout=HANG_S)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no PID namespaces here: they take root and `unshare` of util-linux")
    argv = [*UNSHARE, sys.executable, "-m", __name__, str(folder), story]
    ended = subprocess.run(argv, check=True, capture_output=True, text=True, timeout=HANG_S)
    found: dict[str, Any] = json.loads(ended.stdout)
    return found


def test_process_that_outlived_its_server_is_ended(tmp_path: Path) -> None:
    found = tell(tmp_path, "server dies")
    assert found["ended"] == ["one executor", "one tool"]
    assert found["living"] == ["other executor", "other tool"]
    assert found["ended again"] == []


@pytest.mark.parametrize("story", ["server lives", "session from outside"])
def test_process_with_a_possibly_living_server_stays(tmp_path: Path, story: str) -> None:
    found = tell(tmp_path, story)
    assert found["ended"] == []
    assert {"one executor", "one tool", "other executor", "other tool"} <= set(found["living"])


def start(folder: Path, *, own_session: bool) -> dict[str, int]:
    """Start a server; return the pids of its processes, the server's first."""
    (folder / "api_server").mkdir(parents=True)
    argv = [sys.executable, "-c", SERVER, str(folder)]
    server = subprocess.Popen(argv, start_new_session=own_session, stdout=subprocess.DEVNULL)
    until("its processes", lambda: (folder / "pids").exists())
    executor, tool = map(int, (folder / "pids").read_text().split())
    return {f"{folder.name} server": server.pid, f"{folder.name} executor": executor, f"{folder.name} tool": tool}


def main(folder: Path, story: str) -> None:
    one = start(folder / "one", own_session=story != "session from outside")
    other = start(folder / "other", own_session=True)
    if story != "server lives":
        for server in (one["one server"], other["other server"]):
            os.kill(server, signal.SIGKILL)
            os.waitid(os.P_PID, server, os.WEXITED | os.WNOWAIT)  # a zombie from then on
    pids = one | other
    ended = kill_orphans(folder / "one" / "api_server")
    until("their end", lambda: not any(map(alive, ended)))
    found = {
        "ended": [name for name, pid in pids.items() if pid in ended],
        "living": [name for name, pid in pids.items() if alive(pid)],
        "ended again": kill_orphans(folder / "one" / "api_server"),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
