"""Whether the rig can run here: it is for root on a Linux that lets it make namespaces."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile

_PROGRAMS = ("debootstrap", "ip", "nsenter", "nc", "rsync", "ssh", "ssh-keygen", "unshare")
# A machine's namespaces, a cable and a disk, in a folder given as the argument; nothing is left of them.
_TRIAL = """
set -e
ip link add name trial type veth peer name trial-end
cd "$1"
mkdir lower upper work root
mount -t overlay overlay -o lowerdir=lower,upperdir=upper,workdir=work root
"""


def missing() -> str:
    """Why the rig can't run here, with the remedy; nothing if it can."""
    if os.geteuid():
        return "it needs root"
    if programs := [name for name in _PROGRAMS if shutil.which(name) is None]:
        return f"{', '.join(programs)} not installed: run `make test-packages`"
    with tempfile.TemporaryDirectory() as folder:
        namespaces = ["unshare", "--net", "--mount", "--pid", "--uts", "--ipc", "--fork"]
        trial = subprocess.run(
            [*namespaces, "bash", "-c", _TRIAL, "trial", folder],
            capture_output=True,
            text=True,
            check=False,
        )
    if trial.returncode:
        text = " ".join(trial.stderr.split())
        return f"no namespaces, or no overlay on {tempfile.gettempdir()} (TMPDIR names another place): {text}"
    return ""
