"""What a killed API server leaves behind is ended, and nothing else."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.budget import HANG_S

pytestmark = pytest.mark.root

UNSHARE = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]


def tell(folder: Path, story: str) -> dict[str, Any]:
    """Have a story happen in a PID namespace, so that a mistake in what is tested ends nothing outside of it."""
    try:
        subprocess.run([*UNSHARE, "true"], check=True, capture_output=True, timeout=HANG_S)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no PID namespaces here: they take root and `unshare` of util-linux")
    argv = [*UNSHARE, sys.executable, "-m", "tests.rigs.sky_server", str(folder), story]
    ended = subprocess.run(argv, check=True, capture_output=True, text=True, timeout=HANG_S)
    found: dict[str, Any] = json.loads(ended.stdout)
    return found


def test_process_that_outlived_its_server_is_ended(tmp_path: Path) -> None:
    found = tell(tmp_path, "server dies")
    assert found["ended"] == ["one executor", "one tool"]
    assert found["living"] == ["other executor", "other tool"]
    assert found["ended again"] == []


@pytest.mark.parametrize("story", ["server lives", "session from outside"])
def test_process_with_a_possibly_living_server_stays(tmp_path: Path, story: str) -> None:
    found = tell(tmp_path, story)
    assert found["ended"] == []
    assert {"one executor", "one tool", "other executor", "other tool"} <= set(found["living"])
