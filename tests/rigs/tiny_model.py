"""The tiny example's model and prompts: made once in each process of the tests, and copied for whoever asks."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from tests.budget import HANG_S

TINY = Path(__file__).parents[2] / "examples" / "tiny"


@cache
def _made(python: Path) -> tempfile.TemporaryDirectory[str]:
    folder = tempfile.TemporaryDirectory(prefix="tiny-")
    command: list[str | Path] = [python, TINY / "make_model.py", "--out", folder.name]
    subprocess.run(command, check=True, timeout=HANG_S, capture_output=True)
    return folder


def make_tiny(folder: Path, python: Path) -> Path:
    """Put into `folder` what the example's script makes, run by `python`; returns it."""
    shutil.copytree(_made(python).name, folder, dirs_exist_ok=True)
    return folder
