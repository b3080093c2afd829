"""A thousand of the simulated stories, each under a cap that it may reach: while a controller can see and act no
cap is passed (`orchestrator.simulate.world`), and what is spent beyond one while none could is printed.

STORIES=n says how many, SEED=n where to begin.
"""

from __future__ import annotations

import logging
import os
import time
from dataclasses import replace
from random import Random

import pytest
import structlog

from benchmarks.contest.markets import MARKETS, market
from orchestrator.simulate.cloud import Prices
from orchestrator.simulate.stories import tell
from policies.model.spec import Budget
from tests.stand_ins.world import spec

pytestmark = pytest.mark.soak

STORIES = int(os.environ.get("STORIES", "1000"))
SEED = int(os.environ.get("SEED", str(time.time_ns() % 10**9)))
NODES = 2


def test_no_cap_is_passed_while_a_controller_can_see_and_act() -> None:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    print(f"{STORIES} stories from SEED={SEED}")
    names, prices = [None, *MARKETS], Prices()
    hour_usd = prices.trainer_usd_per_h + NODES * prices.spot_usd_per_h
    over_usd: list[float] = []
    for seed in range(SEED, SEED + STORIES):
        name = names[seed % len(names)]
        cap_usd = hour_usd * Random(f"cap {seed}").uniform(0.3, 2.0)
        capped = replace(spec(NODES), budget=Budget(usd=cap_usd))
        weather = None if name is None else market(name, seed, NODES)
        told = tell(seed, capped, weather=weather, prices=prices)  # what it raises names the seed
        over_usd.append(max(0.0, told.usd - cap_usd))
    passed = [usd for usd in over_usd if usd]
    print(f"no cap passed while a controller could act; beyond it without one: {len(passed)} of {STORIES}")
    print(f"the most of these: {max(over_usd):.2f} USD")
