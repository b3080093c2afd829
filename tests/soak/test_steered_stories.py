"""Thousands of the stories of `tests/policies/control/test_steered_stories.py`.

STORIES=n says how many, SEED=n where to begin.
"""

from __future__ import annotations

import logging
import os
import time

import pytest
import structlog

from tests.generators.steered_stories import tell

pytestmark = pytest.mark.soak

STORIES = int(os.environ.get("STORIES", "3000"))
SEED = int(os.environ.get("SEED", str(time.time_ns() % 10**9)))


def test_any_number_of_stories() -> None:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    print(f"{STORIES} stories from SEED={SEED}")
    for seed in range(SEED, SEED + STORIES):
        world = tell(seed)  # what it raises names the seed
        world.check(len(world.bought) <= 25, f"bought {world.bought}")
