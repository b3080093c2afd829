"""What these tests have in common."""

from __future__ import annotations

from pathlib import Path

import pytest

from tasks.rollout.compile_caches import FOLDERS
from tests.tasks.rollout.compiled.nodes import Machines


@pytest.fixture
def machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machines:
    for name in FOLDERS:
        monkeypatch.delenv(name, raising=False)
    return Machines(tmp_path)
