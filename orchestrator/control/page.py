"""The run page beside the daemon: a process of its own, which neither holds the run up nor outlives the daemon."""

from __future__ import annotations

import os
import subprocess
import sys

import structlog

log = structlog.get_logger()


def start_page(store_url: str, listening_fd: int) -> subprocess.Popen[bytes] | None:
    """Have another process serve the page on a socket that listens already, and keep nothing of the socket here.

    It reads from a pipe that this process holds, and ends when that does: however this one ends. What goes wrong
    there is in the daemon's log.
    """
    argv = [sys.executable, "-m", "orchestrator.web.server", store_url, str(listening_fd)]
    try:
        return subprocess.Popen(argv, stdin=subprocess.PIPE, pass_fds=(listening_fd,))
    except OSError as error:
        log.warning("page_not_started", error=str(error))
        return None
    finally:
        os.close(listening_fd)
