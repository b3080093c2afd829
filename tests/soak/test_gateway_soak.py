"""Real rollout nodes under the gateway, and what befalls nodes, again and again: `make soak`.

The seed is printed; SEED=n repeats it, and FAULTS=n says how many.
"""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest

from tests.e2e.gateway_lab.faults import FAULTS
from tests.e2e.gateway_lab.lab import real_lab

pytestmark = pytest.mark.soak

COUNT = int(os.environ.get("FAULTS", "20"))
SEED = int(os.environ.get("SEED", str(time.time_ns() % 100_000)))
HOLD_MAX_S = 8.0  # shorter and longer than what it takes to notice


@pytest.mark.parametrize("seed", [SEED])
def test_random_faults_change_no_completion(seed: int, tmp_path: Path) -> None:
    print(f"SEED={seed}")
    chance = random.Random(seed)
    with real_lab(tmp_path) as lab:
        for _ in range(COUNT):
            lab.until_serving(1)
            fault = FAULTS[chance.choice(sorted(FAULTS))]
            lab.disturb(fault, chance, hold_s=chance.uniform(0.0, HOLD_MAX_S))
