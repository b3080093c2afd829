"""The tiny example's model and prompts, which most whole runs train."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.tiny import make_tiny


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made once in each process of the tests. Runs only read it."""
    return make_tiny(tmp_path_factory.mktemp("tiny"))
