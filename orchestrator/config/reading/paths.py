"""Paths in a run.yaml: what is relative is relative to the folder of the file."""

from __future__ import annotations

import os
from pathlib import Path


def absolute(text: str, workdir: Path) -> Path:
    """Raises nothing: `~` alone is expanded, not the home of another user."""
    path = Path(text)
    if path.parts[:1] == ("~",):
        path = Path.home().joinpath(*path.parts[1:])
    # Not `resolve`: where a link leads may change, and the user knows the path by this name.
    return Path(os.path.normpath(workdir / path))
