"""`grpo-orch` as a process in a terminal of 80 columns, or with pipes."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

from tests.budget import HANG_S

COMMAND = (sys.executable, "-m", "grpo_orch")
TIMEOUT_S = HANG_S


def in_terminal(
    words: list[str], folder: Path, env: Mapping[str, str], *, keys: str = "", until: str = ""
) -> tuple[int, str]:
    """Return the exit code and the output on a terminal.

    `keys` are typed at the start. Once the output has `until`, Ctrl-C is pressed.
    """
    ours, theirs = pty.openpty()
    os.write(ours, keys.encode())
    process = subprocess.Popen(
        [*COMMAND, *words], cwd=folder, env=_env(folder, env), stdin=theirs, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    killer = threading.Timer(TIMEOUT_S, process.kill)
    killer.start()
    output = b""
    try:
        while part := os.read(ours, 65536):
            output += part
            if until and until.encode() in output:
                process.send_signal(signal.SIGINT)
                until = ""
    except OSError:  # the terminal's last process has ended
        pass
    finally:
        killer.cancel()
        os.close(ours)
    return process.wait(), output.decode()


def piped(words: list[str], folder: Path, env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Run with pipes, and a standard input that never has anything."""
    reading, writing = os.pipe()
    try:
        return subprocess.run(
            [*COMMAND, *words],
            cwd=folder,
            env=_env(folder, env),
            stdin=reading,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    finally:
        os.close(reading)
        os.close(writing)


def _env(folder: Path, env: Mapping[str, str]) -> dict[str, str]:
    own = {"COLUMNS": "80", "LINES": "40", "GRPO_ORCH_HOME": str(folder / "home"), "TERM": "xterm-256color"}
    inherited = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "FORCE_COLOR")}
    return {**inherited, "PYTHONPATH": str(Path(__file__).parents[2]), **own, **env}
