"""Tests that share a server share a process: else each process of the tests starts Ceph for itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

TESTS = """
import os, pytest
from pathlib import Path

@pytest.mark.parametrize("n", range(8))
def test_on_ceph(n):
    Path(__file__).with_name(f"{n}.ran").write_text(os.environ["PYTEST_XDIST_WORKER"])

@pytest.mark.parametrize("n", range(8))
def test_of_none(n): pass
"""


def test_tests_that_share_a_server_share_a_process(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(TESTS)
    processes = ["--numprocesses", "2", "--dist", "loadgroup"]
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "tests.conftest", *processes, str(tmp_path)]
    ended = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout
    ran = [one.read_text() for one in tmp_path.glob("*.ran")]
    assert (len(ran), len(set(ran))) == (8, 1)
