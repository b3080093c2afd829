"""Weights that are divided over processes are read layer by layer, with adapters merged, and stay as they are."""

from __future__ import annotations

import socket
import subprocess
import sys

from tests.budget import HANG_S


def test_divided_weights_are_read_whole() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    argv = [sys.executable, "-m", "tests.node.ranks.divided", port]
    ranks = [
        subprocess.Popen([*argv, str(rank)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT) for rank in (0, 1)
    ]
    try:
        said = [rank.communicate(timeout=HANG_S)[0].decode() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], said[0][-4000:]
