"""A SkyPilot API server on this machine: started, and what a dead one left behind ended. Imports no SkyPilot.

The server leads a session of its own. When it is killed its executors live on: they ignore SIGTERM, hold port
50011, without which no new server starts, and go on with the launch they were at. Nothing they know is needed:
what they have made is on record, and launching the same name again takes it up.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from orchestrator.clouds.protocol import CloudUnavailable

START_TIMEOUT_S = 120.0


def start_server(log: Path) -> None:
    """Start an API server that logs to `log`, beside this process and not below it: it outlives this one.

    Raises CloudUnavailable.
    """
    end_orphans(log.parent)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GRPO_ORCH_")}
    command = [sys.executable, "-P", "-c", "import sky; sky.api_start()"]
    try:
        started = subprocess.run(
            command,
            env=environment,
            cwd=Path.home(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=START_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        raise CloudUnavailable(f"SkyPilot's API server does not start; see {log}") from None
    if started.returncode:
        raise CloudUnavailable(f"SkyPilot's API server does not start; see {log}, then `sky api stop`")


def end_orphans(state: Path) -> list[int]:
    """SIGKILL what outlived a dead API server whose files are below `state`. Returns the pids, none on a Mac.

    A process is such an orphan when the leader of its session is dead and it has a file below `state` open, or
    when one of those started it. A session that was begun outside of this container has number 0: nothing is known
    of its leader.
    """
    ended = []
    while pids := [pid for pid in _orphans(state.resolve()) if pid not in ended]:
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        ended += pids
    return ended


def _orphans(state: Path) -> list[int]:
    parents = {pid: parent for pid, parent, session in _processes() if session and not _is_alive(session)}
    found = [pid for pid in parents if _has_open_below(pid, state)]
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid and child not in found]
    return found


def _processes() -> Iterator[tuple[int, int, int]]:
    """Pid, parent and session of every process that is not a zombie."""
    for path in Path("/proc").glob("[0-9]*"):
        if (fields := _stat(int(path.name))) and fields[0] != "Z":
            yield int(path.name), int(fields[1]), int(fields[3])


def _is_alive(pid: int) -> bool:
    fields = _stat(pid)
    return fields is not None and fields[0] != "Z"


def _stat(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat from the state on; the name before it may hold anything."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def _has_open_below(pid: int, folder: Path) -> bool:
    try:
        links = [os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir()]
    except OSError:
        return False  # it has ended, or is another user's
    return any(link.startswith(f"{folder}/") for link in links)
