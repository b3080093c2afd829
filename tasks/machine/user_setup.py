"""`setup` of run.yaml: the user's shell script that makes a machine ready, run once on each."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import structlog

log = structlog.get_logger()


def set_up(workdir: Path, script: str) -> str | None:
    """Run the user's set-up script once on this machine. Returns in words how it failed, or None."""
    done = workdir / "setup.done"
    if not script or done.exists():
        return None
    here = Path(sys.executable).parent  # so that `pip` and `python` are this environment's, on any machine
    env = {**os.environ, "PATH": os.pathsep.join([str(here), os.environ.get("PATH", os.defpath)])}
    code = subprocess.run(["bash", "-euo", "pipefail", "-c", script], check=False, env=env).returncode
    if code != 0:
        log.error("setup_failed", exit_code=code, hint="see the lines above; it is `setup` of run.yaml")
        return f"setup failed with exit code {code}"
    with contextlib.suppress(OSError):  # a disk that is full now: the script runs once more at the next start
        done.touch()
    return None
