"""In CI a test is not skipped without an honest reason."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = """
import pytest
def test_one(): pytest.skip("because")
def test_two(): pytest.skip("this machine has a GPU")
"""


@pytest.mark.parametrize(("ci", "outcomes"), [("", "2 skipped"), ("true", "1 failed, 1 skipped")])
def test_a_skip_fails_in_ci_unless_the_machine_explains_it(ci: str, outcomes: str, tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(TESTS)
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "tests.conftest", str(tmp_path)]
    ended = subprocess.run(argv, env={**os.environ, "CI": ci}, capture_output=True, text=True, check=False)
    assert ended.stdout.splitlines()[-1].startswith(f"{outcomes} in ")
