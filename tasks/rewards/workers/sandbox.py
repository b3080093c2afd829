"""The sandbox in which programs that a model wrote are run: bubblewrap's namespaces around
`tasks.rewards.workers.sandboxed`.

Inside there is Python and /usr, all read-only, and nothing else of the machine: no home, no environment, no /proc,
no network, no other process, no folder to write to. Where no such sandbox can be had, nothing is run: a program
that a model wrote would find the trainer's keys, its store and the cloud's metadata server.
"""

from __future__ import annotations

import functools
import itertools
import os
import shutil
import subprocess
import sys
from pathlib import Path

from tasks.rewards.workers import sandboxed
from tasks.rewards.workers.pool import NoWorker, Pool

# Of this range each sandbox takes the next, where it starts as root: the kernel counts processes by user, and
# counts none of root's. It lies between people's and systemd's own (systemd's UIDS-GIDS.md). The trainer's other
# processes begin elsewhere in it: a program would be refused its threads for what another one's has started.
USERS = range(30_000, 60_000)
APART = 7_919  # a prime: process ids are near each other
SYSTEM = ("/bin", "/lib", "/lib32", "/lib64", "/sbin")
INSIDE = "/sandboxed.py"
INSTALL = "add `apt-get install -y bubblewrap` to trainer.setup, with sudo where that is not root's"

_started = itertools.count()


@functools.cache
def sandboxes() -> Pool:
    """Sandboxes that answer samples as `sandboxed` does. They start with the first of them."""
    return Pool(_start, at_once=1)  # a program could read those that wait beside it, a right one among them


def next_user() -> int:
    """A user id that no sandbox has which runs now, of this process or of another."""
    return USERS[(os.getpid() * APART + next(_started)) % len(USERS)]


def sandbox_command(bwrap: str, user: int) -> list[str]:
    """The command of one sandbox.

    Args:
        user: whose processes those inside are, where this process is root's; else they are its own user's.
    """
    python = Path(sys.executable).resolve()  # an environment has links to it
    argv = [bwrap, "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"]
    argv += ["--die-with-parent", "--as-pid-1", "--new-session", "--clearenv", "--setenv", "PYTHONHASHSEED", "0"]
    argv += ["--cap-drop", "ALL"]
    if os.geteuid() == 0:
        argv += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]  # until it is `user`
    else:
        argv.append("--unshare-user")
    argv += ["--ro-bind", "/usr", "/usr", "--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache"]
    for folder in SYSTEM:
        if os.path.islink(folder):
            argv += ["--symlink", os.readlink(folder), folder]
        else:
            argv += ["--ro-bind-try", folder, folder]
    if not sys.base_prefix.startswith("/usr"):
        # Folders that bubblewrap makes on the way, and is not told of, are closed to `user`.
        for parent in reversed(Path(sys.base_prefix).parents[:-1]):
            argv += ["--dir", str(parent)]
        argv += ["--ro-bind", sys.base_prefix, sys.base_prefix]
    argv += ["--dir", "/dev", "--dev-bind", "/dev/null", "/dev/null"]
    argv += ["--ro-bind", sandboxed.__file__, INSIDE, "--remount-ro", "/"]
    return [*argv, "--chdir", "/", str(python), "-I", "-S", INSIDE, str(user)]


def _start() -> subprocess.Popen[bytes]:
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        raise NoWorker(f"no sandbox for programs: bwrap is not installed; {INSTALL}")
    argv = sandbox_command(bwrap, next_user())
    pipe = subprocess.PIPE
    return subprocess.Popen(argv, env={}, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True)
