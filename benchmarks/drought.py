"""What a run gains whose trainer generates by itself while no rollout node is to be had, or parks if that is dear.

`make bench-drought` simulates hours of scarce spot, and nothing else to be had, under the production controller:
each run as it is, and beside it with `rollout.own_generation_after_s: null`. It prints each pair and one line of
JSON: `with_to_without: {trainer: {"steps": ratio, "steps_per_usd": ratio}}`, the median over the seeds.

How much slower a trainer generates than a node is an assumption: `own_slower` of
`orchestrator.simulate.simulated_cloud`.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import replace

from benchmarks.fleet import FLEET, HOURS, quiet, spec
from grpo_orch.orchestrator.simulate.market_trace import climate
from grpo_orch.orchestrator.simulate.simulated_cloud import Physics, Prices
from grpo_orch.orchestrator.simulate.simulation import Outcome, simulate_hours
from grpo_orch.policies.model.spec import RolloutSpec

SEEDS = 3
CLIMATE = "scarce"
H200_USD_PER_H = 3.96
# Eight GPUs beside nodes of one generate at eight times the speed of one: transformers' a tenth of vLLM's.
TRAINERS = {
    "1 GPU, a step mostly generation": (Physics(fixed_s=60, own_slower=10), Prices()),
    "1 GPU, mostly training": (Physics(fixed_s=240, own_slower=10), Prices()),
    "8 GPUs, a step mostly generation": (
        Physics(fixed_s=60, own_slower=10 / 8),
        Prices(trainer_usd_per_h=8 * H200_USD_PER_H),
    ),
    "8 GPUs, mostly training": (
        Physics(fixed_s=240, own_slower=10 / 8),
        Prices(trainer_usd_per_h=8 * H200_USD_PER_H),
    ),
}


def steered(physics: Physics, prices: Prices, seed: int, after_s: float | None) -> Outcome:
    run = spec(FLEET)
    rollout = replace(run.rollout, resources={"use_spot": True}, own_generation_after_s=after_s)
    trace = climate(CLIMATE, seed, FLEET)
    return simulate_hours(replace(run, rollout=rollout), trace, physics, prices, HOURS, seed)


def main() -> None:
    arguments = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    arguments.add_argument("--seeds", type=int, default=SEEDS)
    seeds = max(1, arguments.parse_args().seeds)
    quiet()
    figures: dict[str, dict[str, float]] = {}
    for name, (physics, prices) in TRAINERS.items():
        steps, a_usd = [], []
        for seed in range(seeds):
            own = steered(physics, prices, seed, RolloutSpec().own_generation_after_s)
            parked = steered(physics, prices, seed, None)
            steps.append(own.steps / parked.steps)
            a_usd.append(own.steps_per_usd / parked.steps_per_usd)
            told = f"{own.steps:.0f} and {parked.steps:.0f} steps for {own.usd:.2f} and {parked.usd:.2f} USD"
            print(f"{name}, seed {seed}: {told}", flush=True)
        figures[name] = {
            "steps": round(statistics.median(steps), 2),
            "steps_per_usd": round(statistics.median(a_usd), 2),
        }
    print(json.dumps({"with_to_without": figures, "hours": HOURS, "climate": CLIMATE, "seeds": seeds}))


if __name__ == "__main__":
    main()
