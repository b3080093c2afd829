"""What a worker says is read as fast as it comes, however long it is."""

from __future__ import annotations

import subprocess
import sys
import time

from tasks.rewards.pool import Limits, Pool
from tests.budget import HANG_S

SAYS = """
import json, sys
print("null", flush=True)
for line in sys.stdin:
    for megabytes in json.loads(line):
        print(json.dumps(["scored", "x" * (megabytes << 20), ""]), flush=True)
"""


def test_the_time_for_a_long_answer_grows_as_its_length() -> None:
    pipe = subprocess.PIPE
    argv = [sys.executable, "-c", SAYS]
    pool = Pool(lambda: subprocess.Popen(argv, stdin=pipe, stdout=pipe, start_new_session=True), workers=1)

    def cpu_s(megabytes: int) -> float:
        started_s = time.process_time()
        (answer,) = pool.map([megabytes], Limits(HANG_S, HANG_S))
        assert len(answer.value) == megabytes << 20
        return time.process_time() - started_s

    try:
        assert cpu_s(64) < 64 * cpu_s(4), "16 times as long; looked through again with each part, 256 times"
    finally:
        pool.close()
