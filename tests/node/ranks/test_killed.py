"""A trainer of several processes on one machine: one publishes, one restores, and none that is lost costs a step.

The machine's GPUs are what no test machine has: the processes meet over gloo, each on the CPU. `make bench-ranks`
tries the other ways to divide what is trained, too.
"""

from __future__ import annotations

import random
import threading
from pathlib import Path

import psutil
import pytest

from grpo_orch.policies.model.vocabulary import PolicyVersion
from tests.budget import HANG_S
from tests.node.ranks.kills import kill_one, of, ranks_of
from tests.node.trainer.rig import open_rig


@pytest.mark.parametrize(("way", "max_staleness", "windows"), [("ddp", 1, 2), ("zero3", 0, 2)])
def test_killed_rank_changes_no_weight(
    way: str, max_staleness: int, windows: int, tiny: Path, tmp_path: Path
) -> None:
    seed = random.SystemRandom().randrange(10**6)
    found = kill_one(way, tmp_path, tiny, seed, HANG_S, max_staleness, windows)
    print(found)
    assert found.restored > 0, "nothing was restored"
    assert found.same_weights
    assert found.same_metrics


def test_ranks_end_with_their_launcher(tiny: Path, tmp_path: Path) -> None:
    with open_rig(tmp_path, tiny, **of(2)) as rig:
        asked, over = threading.Event(), threading.Event()

        def hold(version: str) -> None:  # they cannot end by themselves
            if PolicyVersion.parse(version).step >= 1:
                asked.set()
                over.wait(HANG_S)
                raise ConnectionError("who asked is gone")

        rig.gateway.on_asked = hold
        launcher = rig.start_ranks()
        rig.until("training", asked.is_set)
        ranks = ranks_of(launcher)
        assert len(ranks) == 2
        launcher.kill()
        launcher.wait()
        _, alive = psutil.wait_procs(ranks, timeout=HANG_S)
        over.set()
        assert not alive
