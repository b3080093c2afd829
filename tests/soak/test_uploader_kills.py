"""Many more of the kills in `tests/checkpoint/stream/test_uploader.py`.

KILLS=n says how many, SEED=n repeats one.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from grpo_orch.checkpoint.store.run_store import Store
from tests.checkpoint.stream.test_uploader import kill_and_look

pytestmark = pytest.mark.soak

KILLS = int(os.environ.get("KILLS", "200"))
SEED = int(os.environ.get("SEED", str(time.time_ns() % 100_000)))


def test_any_number_of_kills_between_spool_and_store(tmp_path: Path) -> None:
    kill_and_look(Store(f"file://{tmp_path}/store"), tmp_path, {}, KILLS, SEED)
