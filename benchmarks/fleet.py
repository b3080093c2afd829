"""What the controller's tick costs with many nodes, and what a dollar buys under each fleet policy and climate.

`make bench-fleet` tells how far it is, prints tables, and one line of JSON:

- `tick_ms: {nodes: ms}`: the processor's time for a settled tick of the production controller over a store in
  memory, the median;
- `goodput_per_dollar: {climate: {policy: ratio to all on demand}}`, `oracle_share: {climate: ours / oracle}`: over
  HOURS of each climate, the median over seeds; `oracle_share_median` over all climates and seeds;
- `over_budget_usd_max`: what the worst of `capped_runs`, each with a cap of its own, in all climates, spent beyond
  it;
- `article`: the USD of a day without preemption for an H200 on demand and a pair on spot, beside three on demand.

`--seeds N` takes more or fewer seeds of each climate.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from random import Random

import structlog

from benchmarks.contest.contenders import CONTENDERS, contenders, steer
from benchmarks.contest.markets import MARKETS, market
from benchmarks.contest.oracle import ORACLE, oracle
from grpo_orch.orchestrator.clouds.protocol import LaunchOrder
from grpo_orch.orchestrator.simulate.simulated_cloud import BRISK, Physics, Prices
from grpo_orch.orchestrator.simulate.simulation import ON_DEMAND, Simulation
from grpo_orch.policies.model.spec import Budget, Dataset, Replicas, RolloutSpec, RunSpec, TrainerSpec
from grpo_orch.policies.model.state import Node
from grpo_orch.policies.model.vocabulary import Market, NodePhase, Role, kind_of, node_id_of, slot_of

NODES = (100, 1_000, 10_000)
TICKS = 9
HOURS = 12.0  # of each policy in each climate: two to four seconds of a quiet core
SEEDS = 3
FLEET = 4  # rollout nodes at most, where policies are compared
PHYSICS = Physics(save_steps=20)
INSTANT = replace(PHYSICS, launch_s=0.0, setup_s=0.0, first_weights_s=0.0, weights_s=0.0)
CAPS_USD = (1.0, 8.0)  # drawn from between these
CAP_HOURS = 6.0  # by when each is reached, if it is
BUDGET = "under a budget"  # in the place of a policy: CAPPED runs, one after the other
CAPPED = 26  # a thousand in three seeds of eleven markets

Job = tuple[str, int, str]  # climate, seed, policy


def spec(nodes: int, least: int = 1) -> RunSpec:
    trainer = TrainerSpec(model="m", dataset=Dataset(path="d"), reward_funcs=("r.f",))
    rollout = RolloutSpec(replicas=Replicas(min=least, max=nodes))
    return RunSpec(name="bench", storage="sim://run", trainer=trainer, grpo={}, rollout=rollout)


def tick_ms(nodes: int) -> float:
    """Milliseconds of a settled tick with so many nodes that serve, the cloud's listing included."""
    world = Simulation(0, spec(nodes, nodes), physics=INSTANT, max_steps=10**9)
    assert world.newest is not None
    controller, clock = world.newest.controller, world.newest.clock
    found = [_serving(slot_of(Role.ROLLOUT, place), clock.now_s()) for place in range(nodes)]
    for node in found:
        world.cloud.launch(LaunchOrder(node.id, node.role, node.market, node.attempt, {}))
    state = controller.state
    controller.state = replace(
        state,
        is_proved=True,
        nodes={**state.nodes, **{node.id: node for node in found}},
        slots={**state.slots, **{node.slot: 1 for node in found}},
    )
    world.run_for(30.0)
    serving = [node for node in controller.state.live(Role.ROLLOUT) if node.phase is NodePhase.SERVING]
    assert len(serving) == nodes == len(world.cloud.bought) - 1
    took = []
    for _ in range(TICKS):
        began = time.process_time()
        controller.tick(clock.now_s())
        took.append((time.process_time() - began) * 1000)
    return statistics.median(took)


def _serving(slot: str, now_s: float) -> Node:
    kind = kind_of(Role.ROLLOUT, Market.SPOT)
    node = node_id_of(slot, 1)
    phase = NodePhase.SERVING
    return Node(node, Role.ROLLOUT, slot, 1, Market.SPOT, phase, now_s, now_s, kind=kind, served=True)


def article_usd() -> tuple[float, float]:
    """A day's USD, with a pair on spot and with all on demand."""
    trace = market("unclouded", 0, 2)
    ours, on_demand = (
        steer(name, spec(2, 2), trace, INSTANT, Prices(), 24.0, 0).usd for name in ("ours", ON_DEMAND)
    )
    return ours, on_demand


def measure(job: Job) -> float:
    """Steps a dollar of a policy in a climate; of BUDGET the most that one of its runs spent beyond its cap."""
    name, seed, policy = job
    if policy == BUDGET:
        return max(_over_usd(name, seed * CAPPED + one) for one in range(CAPPED))
    trace = market(name, seed, FLEET)
    if policy == ORACLE:
        return oracle(spec(FLEET), trace, PHYSICS, Prices(), HOURS).steps_per_usd
    return steer(policy, spec(FLEET), trace, PHYSICS, Prices(), HOURS, seed).steps_per_usd


def _over_usd(name: str, seed: int) -> float:
    cap_usd = Random(f"cap {name} {seed}").uniform(*CAPS_USD)
    run = replace(spec(FLEET), budget=Budget(usd=cap_usd))
    world = Simulation(seed, run, trace=market(name, seed, FLEET), physics=BRISK, max_steps=10**9)
    world.rest()
    while not world.is_over and world.time_s < CAP_HOURS * 3600:
        world.run_for(60.0)
    return max(0.0, world.cloud.spent_usd - cap_usd)


def jobs(seeds: int) -> list[Job]:
    return [
        (name, seed, policy)
        for name in MARKETS
        for seed in range(seeds)
        for policy in (BUDGET, *contenders(market(name, seed, FLEET)), ORACLE)
    ]


def measured(todo: Sequence[Job]) -> Iterator[tuple[Job, float]]:
    """Measure them side by side, and tell how many are left and how long they may take."""
    began_s = time.monotonic()
    with ProcessPoolExecutor(min(2, os.cpu_count() or 1), initializer=quiet) as pool:
        running = {pool.submit(measure, job): job for job in todo}
        for done, future in enumerate(as_completed(running), 1):
            yield running[future], future.result()
            left_s = (time.monotonic() - began_s) / done * (len(todo) - done)
            told = f"{done} of {len(todo)} done, {left_s / 60:.0f} min left   "
            print(told, end="\r" if sys.stderr.isatty() else "\n", file=sys.stderr, flush=True)


def ratios_of(found: Mapping[Job, float], seeds: int) -> dict[str, dict[str, float]]:
    """By climate and policy, the median ratio to all on demand."""
    each: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for (name, seed, policy), value in found.items():
        if policy != BUDGET:
            base = found[name, seed, ON_DEMAND]
            each[name][policy].append(value / base if base else 0.0)
    order = [*CONTENDERS, ORACLE]
    return {
        name: {policy: round(statistics.median(each[name][policy]), 3) for policy in order if policy in each[name]}
        for name in MARKETS
        if name in each and len(each[name][ORACLE]) == seeds
    }


def told_aims(
    figures: Mapping[str, object], ticks: Mapping[int, float], ratios: Mapping[str, Mapping[str, float]]
) -> None:
    """Say of each aim whether it is met."""
    spot = {name: one["ours"] for name, one in ratios.items() if name != "never"}
    worst = min(spot, key=lambda name: spot[name])
    least = min(one["ours"] for one in ratios.values())
    tenfold = ticks[10_000] / ticks[1_000]
    for aim, met, told in (
        (
            "1.5 times all on demand a dollar where there is some spot",
            spot[worst] >= 1.5,
            f"{spot[worst]:.2f}, {worst}",
        ),
        ("never below 1.0", least >= 1.0, f"{least:.2f}"),
        (
            "0.9 of the oracle in the median",
            float(str(figures["oracle_share_median"])) >= 0.9,
            figures["oracle_share_median"],
        ),
        ("the budget is not passed", figures["over_budget_usd_max"] == 0, figures["over_budget_usd_max"]),
        ("a tick at 1,000 nodes under 10 ms", ticks[1_000] < 10, f"{ticks[1_000]:.1f} ms"),
        ("linear to 10,000", tenfold <= 12, f"{tenfold:.1f} times as long for ten times as many"),
    ):
        print(f"{'met   ' if met else 'MISSED'} {aim}: {told}")


def quiet() -> None:
    """Have the simulated controllers log nothing."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))


def main() -> None:
    arguments = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    arguments.add_argument("--seeds", type=int, default=SEEDS)
    seeds = max(1, arguments.parse_args().seeds)
    began_s = time.monotonic()
    quiet()
    todo = jobs(seeds)
    print(f"{len(todo)} jobs: about {len(todo) * 1.5 / 60:.0f} min on two quiet cores", flush=True)
    ticks = {nodes: round(tick_ms(nodes), 2) for nodes in NODES}
    for nodes, took_ms in ticks.items():
        print(f"a tick with {nodes:>6} nodes: {took_ms:8.2f} ms", flush=True)
    found = dict(measured(todo))
    ratios = ratios_of(found, seeds)
    for name, one in ratios.items():
        print(f"{name:17}" + "  ".join(f"{policy} {ratio:.2f}" for policy, ratio in one.items()))
    shares = {
        (name, seed): found[name, seed, "ours"] / found[name, seed, ORACLE]
        for name, seed, policy in found
        if policy == ORACLE
    }
    by_climate = {name: [shares[name, seed] for seed in range(seeds)] for name in MARKETS}
    mixed, on_demand = article_usd()
    print(f"a day without preemption: {mixed:.2f} USD, all on demand {on_demand:.2f} USD")
    figures = {
        "tick_ms": {str(nodes): took_ms for nodes, took_ms in ticks.items()},
        "goodput_per_dollar": ratios,
        "oracle_share": {name: round(statistics.median(ones), 3) for name, ones in by_climate.items()},
        "oracle_share_median": round(statistics.median(shares.values()), 3),
        "over_budget_usd_max": round(max(usd for (_, _, policy), usd in found.items() if policy == BUDGET), 2),
        "article": {"ours_usd": round(mixed, 2), "on_demand_usd": round(on_demand, 2)},
        "hours": HOURS,
        "seeds": seeds,
        "capped_runs": len(MARKETS) * seeds * CAPPED,
        "took_s": round(time.monotonic() - began_s),
    }
    told_aims(figures, ticks, ratios)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
