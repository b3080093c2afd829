"""The same kills as in `tests/test_uploader_kills.py`, many more of them: KILLS=n how many, SEED=n to repeat."""

from __future__ import annotations

import os
import time
from pathlib import Path

from checkpoint.store import Store
from tests.test_uploader_kills import kill_and_look

KILLS = int(os.environ.get("KILLS", "200"))
SEED = int(os.environ.get("SEED", str(time.time_ns() % 100_000)))


def test_any_number_of_kills_between_spool_and_store(tmp_path: Path):
    kill_and_look(Store(f"file://{tmp_path}/store"), tmp_path, {}, KILLS, SEED)
