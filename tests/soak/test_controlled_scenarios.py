"""Thousands of the stories of `tests/policies/control/test_controlled_scenarios.py`, in good and in bad weather.

Half of them are under a cap that they may reach: while a controller can see and act no cap is passed
(`orchestrator.simulate.simulation`), and what is spent beyond one while none could is printed.

STORIES=n says how many, SEED=n where to begin.
"""

from __future__ import annotations

import os
import time
from dataclasses import replace
from random import Random

import pytest

from benchmarks.contest.markets import MARKETS, market
from grpo_orch.orchestrator.simulate.scenarios import run_scenario
from grpo_orch.orchestrator.simulate.simulated_cloud import Prices
from grpo_orch.policies.model.spec import Budget
from tests.stand_ins.world import spec

pytestmark = [pytest.mark.soak, pytest.mark.usefixtures("quiet_log")]

STORIES = int(os.environ.get("STORIES", "4000"))
SEED = int(os.environ.get("SEED", str(time.time_ns() % 10**9)))
NODES = 2


def test_any_number_of_stories() -> None:
    print(f"{STORIES} stories from SEED={SEED}")
    names, prices = [None, *MARKETS], Prices()
    hour_usd = prices.trainer_usd_per_h + NODES * prices.spot_usd_per_h
    over_usd: list[float] = []
    for seed in range(SEED, SEED + STORIES):
        name = names[seed // 2 % len(names)]
        cap_usd = hour_usd * Random(f"cap {seed}").uniform(0.3, 2.0) if seed % 2 else None
        run = replace(spec(NODES), budget=Budget(usd=cap_usd))
        trace = None if name is None else market(name, seed, NODES)
        told = run_scenario(seed, run, trace=trace, prices=prices)  # what it raises names the seed
        over_usd.append(max(0.0, told.usd - (cap_usd or told.usd)))
    print(
        f"beyond the cap while no controller could act: {sum(map(bool, over_usd))}; most {max(over_usd):.2f} USD"
    )
