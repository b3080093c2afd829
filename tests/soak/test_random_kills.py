"""Any process of a run, at any moment, again and again: `make soak`.

The seed is printed; SEED=n repeats it. SEEDS=n tries that many, from there on.
"""

from __future__ import annotations

import math
import os
import random
import signal
import time
from pathlib import Path

import psutil
import pytest

from tests.e2e.harness import Run
from tests.e2e.tiny import DRIFT, IN_PARTS, check_healthy, final_weights, finish, tiny_run

pytestmark = pytest.mark.soak

KILLS = int(os.environ.get("KILLS", "10"))
SEED = int(os.environ.get("SEED", str(time.time_ns() % 100_000)))
SEEDS = range(SEED, SEED + int(os.environ.get("SEEDS", "1")))
PAUSE_MAX_S = 8.0  # shorter than most recoveries: faults meet each other


def victims(run: Run) -> list[int]:
    return [pid for node in run.state.nodes for pid in run.pids(node)] + [run.daemon_pid]


@pytest.mark.parametrize("max_staleness", [0, 1, 2])
def test_random_kills_change_no_weight(max_staleness: int, tiny: Path, tmp_path: Path) -> None:
    expected = weights_after(tmp_path / "undisturbed", tiny, max_staleness, 0, random.Random())
    for seed in SEEDS:
        print(f"SEED={seed}")
        kills = weights_after(tmp_path / f"seed-{seed}", tiny, max_staleness, KILLS, random.Random(seed))
        assert kills == expected


def weights_after(folder: Path, tiny: Path, max_staleness: int, kills: int, rng: random.Random) -> str:
    """The weights that a run ends with in which so many processes were killed, with two windows a step."""
    run = tiny_run(folder, tiny, replicas=2, max_staleness=max_staleness, **IN_PARTS)
    with run.up():
        for _ in range(kills):
            time.sleep(rng.uniform(0.0, PAUSE_MAX_S))
            if not run.state.nodes:
                break
            pid = rng.choice(victims(run))
            print(f"{time.time():.1f} kill {pid} {psutil.Process(pid).name()}")
            os.kill(pid, signal.SIGKILL)
            run.cli("resume", run.url, "-d", code=None)  # says who holds the run, unless it was the daemon
        finish(run)
        check_healthy(run, drift=math.inf if max_staleness else DRIFT)
        return final_weights(run)
