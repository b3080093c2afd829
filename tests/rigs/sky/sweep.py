"""The end of a rig, whoever started it: `python -m tests.rigs.sky.sweep` removes those whose tests were killed."""

from __future__ import annotations

import hashlib
import re
import shutil
import tempfile
from pathlib import Path

import psutil

from tests.rigs.sky import machine, network

_RIG = re.compile(r"grpo-rig-(\d+)-\d+")


def sweep() -> None:
    """Remove all rigs whose process is gone."""
    places = (Path("/run/netns"), Path(tempfile.gettempdir()))
    for name in {path.name for place in places for path in place.glob("grpo-rig-*")}:
        owner = _RIG.fullmatch(name)
        if owner and not psutil.pid_exists(int(owner[1])):
            remove(name)


def remove(name: str) -> None:
    """Remove the rig `name`, or what is left of it. Not to be called from inside."""
    folder = Path(tempfile.gettempdir()) / name
    if network.exists(name):
        network.remove(name)
    machine.kill_all(folder)
    shutil.rmtree(folder, ignore_errors=True)
    shutil.rmtree(ssh_sockets(name), ignore_errors=True)


def user_id(name: str) -> str:
    """SkyPilot's id of the rig's user: part of the names of clusters, keys and sockets."""
    return hashlib.sha256(name.encode()).hexdigest()[:8]


def ssh_sockets(name: str) -> Path:
    """Where SkyPilot keeps its connections, whatever TMPDIR is."""
    return Path(f"/tmp/sky_ssh_{user_id(name)}")


if __name__ == "__main__":
    sweep()
