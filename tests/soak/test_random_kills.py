"""Any process of a run, at any moment, again and again: `make soak`. The seed is printed; SEED=n repeats it."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import psutil
import pytest

from tests.e2e.harness import Run
from tests.e2e.tiny import check_healthy, final_weights, finish, make_tiny, tiny_run

pytestmark = pytest.mark.soak

KILLS = int(os.environ.get("KILLS", "10"))
SEED = int(os.environ.get("SEED", str(time.time_ns() % 100_000)))
PAUSE_MAX_S = 8.0  # shorter than most recoveries: faults meet each other


def victims(run: Run) -> list[int]:
    return [pid for node in run.state.nodes for pid in run.pids(node)] + [run.daemon_pid]


@pytest.mark.parametrize("seed", [SEED])
def test_random_kills_change_no_weight(seed: int, tmp_path: Path) -> None:
    print(f"SEED={seed}")
    rng = random.Random(seed)
    tiny = make_tiny(tmp_path / "tiny")
    weights = []
    for name, kills in (("undisturbed", 0), ("disturbed", KILLS)):
        run = tiny_run(tmp_path / name, tiny, replicas=2)
        try:
            run.cli("up", str(run.yaml), "-y", "-d")
            for _ in range(kills):
                time.sleep(rng.uniform(0.0, PAUSE_MAX_S))
                if not run.state.nodes:
                    break
                pid = rng.choice(victims(run))
                print(f"{time.time():.1f} kill {pid} {psutil.Process(pid).name()}")
                os.kill(pid, signal.SIGKILL)
                run.cli("resume", run.url, "-d", code=None)  # says who holds the run, unless it was the daemon
            finish(run)
            check_healthy(run)
            weights.append(final_weights(run))
        finally:
            run.end()
    assert weights[0] == weights[1]
