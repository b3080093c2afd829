"""The node's root filesystem ("AMI"), made once and kept: `python -m tests.rigs.sky.image BUILD_DIR`.

Needs root and a package mirror and index; takes some three minutes. It is kept under a name that holds the digest
of its recipe, and appears under that name only when it is whole.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

_RECIPE = Path(__file__).with_name("image.sh")
_BUILD_WHEEL = "from sky.backends.wheel_utils import build_sky_wheel; build_sky_wheel()"


def image(build_dir: Path) -> Path:
    """The folder with `root` (a node's filesystem) and `wheels` (for `~/.sky/wheels` of the controller).

    Made if it is not there; who comes at the same time waits. Raises subprocess.CalledProcessError.
    """
    folder = build_dir.resolve() / "sky-image" / _digest()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            _remove_others(folder)
            _make(folder)
    return folder


def _digest() -> str:
    return hashlib.sha256(_RECIPE.read_bytes() + version("skypilot").encode()).hexdigest()[:16]


def hold(folder: Path) -> int:
    """Keep the image from being removed, until the descriptor that this returns is closed."""
    held = os.open(folder, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_SH)
    return held


def _remove_others(folder: Path) -> None:
    """Old images and unfinished ones, but those that a rig holds."""
    for other in folder.parent.glob("[0-9a-f]*"):
        held = os.open(other, os.O_RDONLY)
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(other)
        os.close(held)


def _make(folder: Path) -> None:
    part = folder.with_suffix(".part")
    home = part / "home"
    home.mkdir(parents=True)
    print(f"image: {folder}", flush=True)
    subprocess.run([sys.executable, "-c", _BUILD_WHEEL], env=os.environ | {"HOME": str(home)}, check=True)
    (home / ".sky" / "wheels").rename(part / "wheels")
    shutil.rmtree(home)
    command = ["unshare", "--mount", "--propagation", "private", "bash", str(_RECIPE)]
    subprocess.run([*command, str(part / "root"), str(part / "wheels")], check=True)
    part.rename(folder)
    print("image: made", flush=True)


if __name__ == "__main__":
    image(Path(sys.argv[1]))
