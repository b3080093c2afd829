"""A process of TRL's own training is killed in the middle of a step, where ZeRO-3 divides the model.

`make bench-ranks` tries the other ways, too.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.budget import HANG_S
from tests.node.ranks.kills import kill_one
from tests.node.trainer.rig import make_tiny


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize(("way", "max_staleness"), [("zero3", 0), ("zero3", 1), ("ddp", 1)])
def test_a_rank_that_is_killed_changes_no_weight(way: str, max_staleness: int, tiny: Path, tmp_path: Path) -> None:
    found = kill_one(way, tmp_path, tiny, random.SystemRandom().randrange(10**6), HANG_S, max_staleness)
    print(found)
    assert found.restored > 0, "nothing was restored"
    assert found.same_weights
    assert found.same_metrics
