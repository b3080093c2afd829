"""Thousands of the stories of `tests/policies/control/test_steered_stories.py`, in good and in bad weather.

STORIES=n says how many, SEED=n where to begin.
"""

from __future__ import annotations

import logging
import os
import time

import pytest
import structlog

from benchmarks.contest.markets import MARKETS, market
from orchestrator.simulate.stories import tell
from tests.stand_ins.world import spec

pytestmark = pytest.mark.soak

STORIES = int(os.environ.get("STORIES", "3000"))
SEED = int(os.environ.get("SEED", str(time.time_ns() % 10**9)))


def test_any_number_of_stories() -> None:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    print(f"{STORIES} stories from SEED={SEED}")
    names = [None, *MARKETS]
    for seed in range(SEED, SEED + STORIES):
        name = names[seed % len(names)]
        tell(
            seed, spec(2), weather=None if name is None else market(name, seed, 2)
        )  # what it raises names the seed
