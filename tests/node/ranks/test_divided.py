"""Weights that are divided over processes are read layer by layer, with adapters merged, and stay as they are."""

from __future__ import annotations

import os
import subprocess
import sys

from torch.distributed import TCPStore

from tests.budget import HANG_S


def test_divided_weights_are_read_whole() -> None:
    # Where they meet is here, as with a launcher: a port that one of them were to open might be taken by then.
    meeting = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    argv = [sys.executable, "-m", "tests.node.ranks.divided", str(meeting.port)]
    env = {**os.environ, "TORCHELASTIC_USE_AGENT_STORE": "True"}
    ranks = [
        subprocess.Popen([*argv, str(rank)], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        for rank in (0, 1)
    ]
    try:
        said = [rank.communicate(timeout=HANG_S)[0].decode() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], said[0][-4000:]
